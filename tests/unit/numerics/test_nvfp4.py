"""NVFP4 against a value-by-value oracle and the worked numbers of the literature."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_trace.numerics import e2m1, nvfp4
from tests.unit.numerics import oracle

WORKED = [0.1, -0.2, 0.3, 0.45, 0.8, 1, -1.5, 2, 2.49, 2.51, 3, -3.6, 4.2, 5, -0.01, 0]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def families() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(6, 64, generator=g)
    heavy = normal / torch.rand(6, 64, generator=g).clamp_min(1e-3) ** 2
    single = torch.zeros(6, 64)
    single[3, 17] = -2.5
    tiny_block = normal.clone()
    tiny_block[:, 16:32] *= 1e-7
    subnormal = normal * 1e-41
    mixed_zero = torch.where(torch.rand(6, 64, generator=g) < 0.5, -0.0, 1.0) * normal
    huge = normal * 1e37
    boundary = torch.tensor([e for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0) for e in (t, -t)] * 24).view(6, 64)
    return {
        "normal": normal,
        "heavy": heavy,
        "single": single,
        "tiny_block": tiny_block,
        "subnormal": subnormal,
        "zeros": torch.zeros(6, 64),
        "mixed_zero": mixed_zero,
        "huge": huge,
        "boundary": boundary,
        "boundary_up": boundary * (1 + 2**-23),
        "boundary_down": boundary * (1 - 2**-24),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scope", ["tensor", "row"])
@pytest.mark.parametrize("name", list(families()))
def test_codes_scales_and_values_equal_the_oracle(name: str, scope: str, dtype: torch.dtype) -> None:
    x = families()[name]
    if dtype == torch.float16 and name in ("huge", "heavy"):
        x = x.clamp(-6e4, 6e4)
    x = x.to(dtype)
    codes, scales, values = oracle.quantize(x.float().numpy(), scope)
    q = nvfp4.quantize(x, scale_scope=scope)
    assert q.block_scale.view(torch.uint8).tolist() == scales.tolist()
    assert e2m1.unpack(q.codes).tolist() == codes.tolist()
    assert torch.equal(bits(q.dequantize(torch.float32)), bits(torch.from_numpy(values)))
    fused = nvfp4.quantize_dequantize(x, scale_scope=scope)
    assert fused.dtype == dtype and torch.equal(bits(fused), bits(q.dequantize(dtype)))
    both, value = nvfp4.quantize_with_dequantized(x, scale_scope=scope)
    assert torch.equal(both.codes, q.codes) and torch.equal(bits(value), bits(fused))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16), st.booleans())
def test_any_block_equals_the_oracle(values: list[float], bf16: bool) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    x = x.bfloat16().nan_to_num(posinf=3e38, neginf=-3e38) if bf16 else x
    codes, scales, _ = oracle.quantize(x.float().numpy(), "row")
    q = nvfp4.quantize(x, scale_scope="row")
    assert q.block_scale.view(torch.uint8).tolist() == scales.tolist()
    assert e2m1.unpack(q.codes).tolist() == codes.tolist()


def test_worked_block_global_amax_5() -> None:
    q = nvfp4.quantize(torch.tensor(WORKED))
    assert nvfp4.encode_scale(q.global_amax).item() == pytest.approx(537.6)
    assert q.block_scale.float().tolist() == [448.0]
    assert q.values().tolist() == [0, 0, 0.5, 0.5, 1, 1, -2, 2, 3, 3, 4, -4, 6, 6, 0, 0]
    assert q.dequantize(torch.float32)[9].item() == pytest.approx(3 * 0.833333, rel=1e-6)


def test_worked_block_global_amax_12() -> None:
    q = nvfp4.quantize(torch.tensor(WORKED), scale_scope="static", global_amax=torch.tensor(12.0))
    assert nvfp4.encode_scale(q.global_amax).item() == 224
    assert q.block_scale.float().tolist() == [192.0]  # from 186.67
    assert q.values().tolist() == [0, 0, 0.5, 0.5, 1, 1, -2, 2, 3, 3, 4, -4, 4, 6, 0, 0]


def test_scale_flip_example() -> None:
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 6.0, 6.26
    q = nvfp4.quantize(x, scale_scope="static", global_amax=torch.tensor(12.0))
    assert q.block_scale.float().flatten().tolist() == [224.0, 240.0]
    assert (q.block_scale.float().flatten() * 12 / 2688).tolist() == pytest.approx([1.0, 1.0714286])


def test_zero_blocks_and_underflowed_scales_dequantise_to_zero() -> None:
    x = torch.zeros(1, 48)
    x[0, 0] = 6e5
    x[0, 16:18] = torch.tensor([1.0, -1.0])  # ratio 6e5: scale underflows, codes saturate
    q = nvfp4.quantize(x)
    assert q.block_scale.view(torch.uint8).flatten().tolist()[1:] == [0, 0]
    assert e2m1.unpack(q.codes)[0, 16:18].tolist() == [7, 15]
    assert q.dequantize(torch.float32)[0, 1:].abs().max().item() == 0
    x[0, 0] = 3e5  # still representable as the smallest subnormal
    assert nvfp4.quantize(x).block_scale.view(torch.uint8).flatten().tolist()[1] == 1


def test_nan_and_infinity_follow_the_reference() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = float("nan")
    q = nvfp4.quantize(x, scale_scope="row")
    assert q.block_scale.view(torch.uint8)[0].tolist() == [0x7F, 0x7F] and e2m1.unpack(q.codes)[0].tolist() == [0] * 32
    assert q.dequantize(torch.float32)[0].isnan().all() and torch.equal(q.dequantize(torch.float32)[1], torch.ones(32))
    x[0, 3] = float("inf")
    q = nvfp4.quantize(x, scale_scope="row")
    assert q.block_scale.float()[0].tolist() == [448.0, pytest.approx(1 / 6, rel=0.07)]
    assert e2m1.unpack(q.codes)[0, 3].item() == 7


def test_row_scope_rows_do_not_depend_on_each_other() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([nvfp4.quantize_dequantize(r, scale_scope="row") for r in x.split(1)])
    x_outlier = torch.cat((x, torch.full((1, 64), 1e6)))
    assert torch.equal(nvfp4.quantize_dequantize(x_outlier, scale_scope="row")[:8], alone)


def test_supplied_amax_replaces_the_own_one_in_every_scope() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    halves = x.chunk(2, dim=-1)
    amax = nvfp4.global_amax_of(x, scale_scope="row")
    shards = torch.cat([nvfp4.quantize_dequantize(h, scale_scope="row", global_amax=amax) for h in halves], -1)
    assert torch.equal(shards, nvfp4.quantize_dequantize(x, scale_scope="row"))
    whole = nvfp4.global_amax_of(x, scale_scope="tensor")
    shards = torch.cat([nvfp4.quantize_dequantize(h, scale_scope="tensor", global_amax=whole) for h in halves], -1)
    assert torch.equal(shards, nvfp4.quantize_dequantize(x))


def test_static_amax_per_expert_equals_one_call_per_expert() -> None:
    w = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(3)) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1)
    amax = w.abs().amax((-2, -1), keepdim=True)
    stacked = nvfp4.quantize(w, scale_scope="static", global_amax=amax)
    for e in range(3):
        one = nvfp4.quantize(w[e])
        assert torch.equal(stacked.codes[e], one.codes) and torch.equal(stacked.dequantize()[e], one.dequantize())


def test_shapes_of_a_stack_and_of_nothing() -> None:
    q = nvfp4.quantize(torch.randn(2, 3, 48), scale_scope="row")
    assert q.codes.shape == (2, 3, 24) and q.block_scale.shape == (2, 3, 3) and q.global_amax.shape == (2, 3, 1)
    assert q.shape == (2, 3, 48) and q.dequantize().shape == (2, 3, 48) and q.dequantize().dtype == torch.bfloat16
    assert nvfp4.quantize(torch.randn(2, 16)).global_amax.shape == ()
    for scope in ("row", "tensor"):
        assert nvfp4.quantize(torch.zeros(0, 32), scale_scope=scope).dequantize().shape == (0, 32)


def test_non_contiguous_input_equals_its_copy() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)).t()
    assert not x.is_contiguous()
    assert torch.equal(nvfp4.quantize(x, scale_scope="row").codes, nvfp4.quantize(x.contiguous(), scale_scope="row").codes)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(4, 24), {}, ValueError, "last dimension of x is 24, must be a positive multiple of 16"),
        (torch.zeros(()), {}, ValueError, "last dimension of x is none"),
        (torch.zeros(4, 16, dtype=torch.int32), {}, TypeError, "must be float32, bfloat16 or float16"),
        (torch.zeros(4, 16), {"scale_scope": "static"}, ValueError, "needs global_amax"),
        (torch.zeros(4, 16), {"scale_scope": "column"}, ValueError, "must be 'tensor', 'row' or 'static'"),
        (torch.zeros(4, 16), {"global_amax": torch.ones(4)}, ValueError, r"shape \[4\], must be"),
        (torch.zeros(4, 16), {"e4m3_max": 256}, ValueError, "together with four_over_six"),
        (torch.zeros(4, 16), {"block": "16x16"}, ValueError, "multiple of 16, got 4"),
        (torch.zeros(4, 16), {"block": "32x1"}, ValueError, "'1x16' or '16x16'"),
        (torch.zeros(4, 16), {"four_over_six": "max"}, ValueError, "'mae' or 'mse'"),
    ],
)
def test_bad_input_is_named(x: torch.Tensor, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nvfp4.quantize(x, **options)
