"""NVFP4 against other libraries' code: Transformer Engine's reference, ModelOpt, torchao, compressed-tensors.

Each known difference (docs/numerics.md, "Differences between libraries") has a test that fails when it goes away.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_trace.numerics import e2m1, e4m3, layout, nvfp4
from tests.unit.numerics import peers

INPUTS = peers.inputs()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def te() -> Any:
    return peers.transformer_engine_reference()


def reference(te: Any, x: torch.Tensor, **options: Any) -> Any:
    quantizer = te.NVFP4QuantizerRef(dtype=te.reference_utils.Fp4Formats.E2M1, **options)
    return quantizer.quantize(x)


def as_float16_safe(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-6e4, 6e4).to(dtype)


def assert_equal(got: nvfp4.NVFP4Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.block_scale.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(INPUTS))
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_transformer_engine_1x16(te: Any, scope: str, name: str, dtype: torch.dtype) -> None:
    x = as_float16_safe(INPUTS[name], dtype)
    ref = reference(te, x, columnwise=False, row_scaled_nvfp4=scope == "row")
    got = nvfp4.quantize(x, scale_scope=scope)
    assert_equal(got, ref.data, ref.scale)
    assert torch.equal(got.global_amax.flatten(), ref.global_amax_row.flatten())
    decoded = te.cast_from_fp4x2(ref.data, torch.float32)
    scaled = (decoded.view(32, 8, 16) * ref.scale.float().unsqueeze(-1)).view(32, 128)
    factor = ref.global_amax_row.view(-1, 1) * (torch.tensor(1.0) / torch.tensor(2688.0))
    assert torch.equal(got.dequantize(torch.float32).view(torch.int32), (scaled * factor).view(torch.int32))


@pytest.mark.parametrize("name", list(INPUTS))
def test_transformer_engine_16x16(te: Any, name: str) -> None:
    x = INPUTS[name]
    ref = reference(te, x, columnwise=False, quant_tile_shape=(16, 16))
    assert_equal(nvfp4.quantize(x, block="16x16"), ref.data, ref.scale)


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("tile", ["1x16", "16x16", "row"])
@pytest.mark.parametrize("name", [n for n in INPUTS if n not in ("subnormal",)])
def test_transformer_engine_four_over_six(te: Any, name: str, tile: str, error: str, e4m3_max: int) -> None:
    x = INPUTS[name].bfloat16()
    ref = reference(
        te,
        x,
        columnwise=False,
        quant_tile_shape=(16, 16) if tile == "16x16" else (1, 16),
        row_scaled_nvfp4=tile == "row",
        nvfp4_use_4over6=True,
        nvfp4_e4m3_max=e4m3_max,
        nvfp4_4over6_err_mode=error.upper(),
    )
    got = nvfp4.quantize(
        x,
        scale_scope="row" if tile == "row" else "tensor",
        block="16x16" if tile == "16x16" else "1x16",
        four_over_six=error,
        e4m3_max=e4m3_max,
    )
    assert_equal(got, ref.data, ref.scale)


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_transformer_engine_columnwise(te: Any, scope: str) -> None:
    x = INPUTS["normal"]
    ref = reference(te, x, row_scaled_nvfp4=scope == "row")
    assert_equal(layout.quantize_columnwise(x, scale_scope=scope), ref.data_t, ref.scale_t)


def test_transformer_engine_nan_and_infinity(te: Any) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        for scope in ("tensor", "row"):
            x = INPUTS["normal"].clone()
            x[3, 40] = value
            ref = reference(te, x, columnwise=False, row_scaled_nvfp4=scope == "row")
            got = nvfp4.quantize(x, scale_scope=scope)
            assert torch.equal(got.codes, ref.data)
            got_bytes, ref_bytes = (s.view(torch.uint8) for s in (got.block_scale, ref.scale))
            assert torch.equal(got_bytes & 0x7F, ref_bytes & 0x7F)  # the sign of a NaN is the processor's choice


def test_transformer_engine_ragged_width_is_zero_padded(te: Any) -> None:
    x = INPUTS["normal"][:, :120].contiguous()
    ref = reference(te, x, columnwise=False)
    padded = layout.pad_last(x)
    got = nvfp4.quantize(padded)
    assert padded.shape == (32, 128)
    assert torch.equal(got.codes[:, :60], ref.data) and torch.equal(
        got.block_scale.view(torch.uint8), ref.scale.view(torch.uint8)
    )


# --- ModelOpt ---------------------------------------------------------------------------------------------------------------


def modelopt(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale bytes, dequantised float32)."""
    tensor = peers.peer("modelopt.torch.quantization.qtensor").NVFP4QTensor
    q, scale, scale_2 = tensor.quantize(x, 16)
    values = q.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return q._quantized_data, scale.view(torch.uint8), values


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal", "heavy", "signed_zero"])
def test_modelopt_codes_and_scales_agree(name: str) -> None:
    x = INPUTS[name]
    codes, scales, values = modelopt(x)
    got = nvfp4.quantize(x)
    assert torch.equal(got.codes, codes) and torch.equal(got.block_scale.view(torch.uint8), scales)
    torch.testing.assert_close(got.dequantize(torch.float32), values, rtol=2.4e-7, atol=0)  # it multiplies both scales first


@pytest.mark.slow
def test_modelopt_differs_on_zero_blocks_underflow_zero_tensors_and_division() -> None:
    x = INPUTS["underflow"].clone()
    x[0, 64:80] = 0.0
    _, scales, values = modelopt(x)
    got = nvfp4.quantize(x)
    assert scales[1, 4] == 1 and got.block_scale.view(torch.uint8)[1, 4] == 0  # floor 2**-9 against flush to 0
    assert scales.view(torch.float8_e4m3fn)[0, 4].float() == 1.0 and got.block_scale[0, 4].float() == 0.0
    assert modelopt(INPUTS["zeros"])[2].isnan().all()
    assert nvfp4.quantize(INPUTS["zeros"]).dequantize(torch.float32).abs().max() == 0
    flips = _near_tie_flips(lambda t: e2m1.unpack(modelopt(t)[0]))
    assert 0.001 < flips < 0.5  # it divides by the scale, Transformer Engine multiplies by a rounded reciprocal


def _near_tie_flips(codes_of: Any) -> float:
    """Share of codes that differ on values laid within a few ulp of the ties of their own block's scale."""
    g = torch.Generator().manual_seed(1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[torch.randint(0, 7, (512, 512), generator=g)]
    peaks = torch.zeros(512, 512)
    peaks[:, ::16] = torch.rand(512, 32, generator=g) * 0.9 + 0.1
    q = nvfp4.quantize(peaks)
    step = (q.block_scale.float() * (q.global_amax / 2688)).repeat_interleave(16, -1)
    ulps = 1 + torch.randint(-2, 3, (512, 512), generator=g) * 2.0**-23
    x = torch.where(peaks > 0, peaks, ties * step * ulps)
    x = torch.where(x > peaks[:, ::16].repeat_interleave(16, -1), 0.0, x)  # the peak stays the block's amax
    ours = e2m1.unpack(nvfp4.quantize(x).codes)
    return (codes_of(x) != ours).float().mean().item()


# --- torchao ----------------------------------------------------------------------------------------------------------------


def torchao(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = peers.peer("torchao.prototype.mx_formats.nvfp4_tensor").NVFP4Tensor
    t = tensor.to_nvfp4(x, per_tensor_scale=x.abs().max() / 2688)
    return t.qdata.view(torch.uint8), t.scale.view(torch.uint8).view(x.shape[0], -1)


@pytest.mark.slow
def test_torchao_codes_and_scales_agree() -> None:
    codes, scales = torchao(INPUTS["normal"])
    got = nvfp4.quantize(INPUTS["normal"])
    assert torch.equal(got.codes, codes) and torch.equal(got.block_scale.view(torch.uint8), scales)


@pytest.mark.slow
def test_torchao_floors_block_scales() -> None:
    codes, scales = torchao(INPUTS["underflow"])
    got = nvfp4.quantize(INPUTS["underflow"])
    assert scales.view(torch.float8_e4m3fn).float().min() == 2.0**-6  # smallest normal
    assert got.block_scale.float().min() == 0
    assert not torch.equal(codes, got.codes)


@pytest.mark.slow
def test_torchao_keeps_the_sign_of_minus_zero() -> None:
    x = INPUTS["signed_zero"]
    at = (x == 0) & torch.signbit(x)
    assert (e2m1.unpack(torchao(x)[0])[at] == 8).all() and (e2m1.unpack(nvfp4.quantize(x).codes)[at] == 0).all()


# --- compressed-tensors -----------------------------------------------------------------------------------------------------


def compressed_tensors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, values)."""
    quantization = peers.peer("compressed_tensors.quantization")
    helpers = peers.peer("compressed_tensors.quantization.utils.helpers")
    forward = peers.peer("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16, dynamic=False,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    blocks, global_scale = x.view(32, 8, 16), helpers.generate_gparam(x.min(), x.max())
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=global_scale)
    return scale, forward.fake_quantize(x, scale, zero, args, global_scale=global_scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal", "heavy"])
def test_compressed_tensors_values_agree_to_an_ulp_in_float32(name: str) -> None:
    """Same codes and scales; it divides by the global scale where Transformer Engine multiplies by its reciprocal."""
    scale, values = compressed_tensors(INPUTS[name])
    got = nvfp4.quantize(INPUTS[name])
    assert torch.equal(got.block_scale.float(), scale.float())
    torch.testing.assert_close(got.dequantize(torch.float32), values, rtol=2.4e-7, atol=0)


@pytest.mark.slow
def test_compressed_tensors_differs_on_bfloat16_input() -> None:
    x = INPUTS["normal"].bfloat16()
    _, values = compressed_tensors(x)
    ours = nvfp4.quantize(x).dequantize(torch.float32)
    step = nvfp4.quantize(x).block_scale.float().repeat_interleave(16, -1) * (x.float().abs().max() / 2688)
    moved = ((values.float() - ours).abs() > 0.4 * step).float().mean().item()  # at least half a code apart
    assert 0 < moved < 0.1


def test_four_over_six_has_a_base_scale_of_its_own_order() -> None:
    """(amax / 6) * S against amax * (S / 6): somewhere E4M3 rounds them apart. Equal to Transformer Engine in both (above)."""
    g = torch.Generator().manual_seed(0)
    amax = torch.rand(1 << 20, generator=g) * 3 + 0.1
    s = nvfp4.encode_scale(torch.tensor(3.1))
    main = nvfp4.block_scale_from_amax(amax, s)
    divided = e4m3.cast(torch.div(amax, torch.full_like(amax, 6.0)) * s)
    different = main.view(torch.uint8) != divided.view(torch.uint8)
    assert 0 < different.float().mean().item() < 1e-4
