"""MXFP4, INT8, FP8: worked values, slow per-value oracles, equivariance, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_trace.numerics import e2m1, mxfp4, scaled8
from tests.unit.numerics import oracle


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- MXFP4 ------------------------------------------------------------------------------------------------------------------


def mx_oracle(block: np.ndarray, rule: str) -> tuple[list[int], int]:
    """Codes and E8M0 byte of 32 float32 values, in exact arithmetic."""
    amax = float(np.max(np.abs(block)))
    if amax == 0:
        exponent = -127
    else:
        exponent = math.frexp(amax)[1] - 3
        if rule == "ceil" and amax > 6 * math.ldexp(1.0, exponent):
            exponent += 1
        exponent = max(-127, min(127, exponent))
    return [oracle.e2m1_code(np.float32(max(-6.0, min(6.0, math.ldexp(float(v), -exponent))))) for v in block], exponent + 127


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.sampled_from(["floor", "ceil"]),
)
def test_mxfp4_any_block_equals_the_oracle(values: list[float], rule: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    q = mxfp4.quantize(x, rule=rule)
    codes, byte = mx_oracle(x.numpy(), rule)
    assert q.block_scale.view(torch.uint8).tolist() == [byte]
    assert e2m1.unpack(q.codes).tolist() == codes


def test_mxfp4_worked_block() -> None:
    """amax 7: floor rule scale 1, so 7 saturates to 6; ceil rule scale 2, 7 -> 3.5 -> 4, times 2."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([7.0, -2.5, 0.25, 0.3])
    floor, ceil = mxfp4.quantize(x), mxfp4.quantize(x, rule="ceil")
    assert floor.block_scale.float().item() == 1.0 and ceil.block_scale.float().item() == 2.0
    assert floor.dequantize(torch.float32)[0, :4].tolist() == [6.0, -2.0, 0.0, 0.5]
    assert ceil.dequantize(torch.float32)[0, :4].tolist() == [8.0, -2.0, 0.0, 0.0]


@pytest.mark.parametrize("bits", [1, 4])
def test_mxfp4_guided(bits: int) -> None:
    x_roll = randn(8, 64)
    q = mxfp4.quantize(x_roll)
    record = mxfp4.make_record(q, bits=bits)
    assert record.payload.nbytes + record.block_scale.nbytes == 8 * 64 * (bits + 0.25) / 8
    rollout = q.dequantize(torch.float32)
    assert torch.equal(mxfp4.fake_quantize(x_roll, record=record), rollout)
    x = (x_roll + 0.005 * randn(8, 64, seed=1)).requires_grad_()
    out = mxfp4.fake_quantize(x, record=record)
    nearest = mxfp4.fake_quantize(x)
    assert (out.detach() - rollout).norm() < 0.5 * (nearest.detach() - rollout).norm()
    upstream = randn(8, 64, seed=2)
    out.backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_mxfp4_nan_and_bad_input() -> None:
    x = torch.ones(2, 32)
    x[0, 5] = float("nan")
    q = mxfp4.quantize(x)
    assert q.block_scale.view(torch.uint8).flatten().tolist() == [255, 125]
    assert e2m1.unpack(q.codes)[0].tolist() == [0] * 32 and q.dequantize()[0].isnan().all()
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.quantize(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="'floor' or 'ceil'"):
        mxfp4.quantize(x, rule="nearest")
    with pytest.raises(ValueError, match="bits=2"):
        mxfp4.make_record(q, bits=2)


# --- INT8 and FP8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_rows_equal_a_per_value_oracle(format: str) -> None:
    x = randn(4, 24)
    x[1] = 0.0
    q = scaled8.quantize(x, format=format)
    largest = np.float32(127 if format == "int8" else 448)
    for row, codes, scale in zip(x.numpy(), q.codes, q.scale.flatten().tolist(), strict=True):
        expected = np.max(np.abs(row)) / largest or np.float32(1)
        assert scale == float(expected)
        for value, code in zip(row, codes, strict=True):
            t = np.float32(value) / expected
            if format == "int8":
                assert int(code) == int(np.rint(t))
            else:
                assert abs(float(code.float())) == float(oracle.e4m3_float(oracle.e4m3_byte(abs(t))))
    assert q.dequantize(torch.float32)[1].abs().max() == 0


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("granularity", ["row", "1x128", "128x128"])
def test_codes_do_not_change_when_x_is_scaled_by_a_power_of_two(format: str, granularity: str) -> None:
    x = randn(200, 300)
    a, b = (scaled8.quantize(t, format=format, granularity=granularity) for t in (x, x / 4))
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, 4 * b.scale)


@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
def test_blocks_equal_quantising_each_block_alone(granularity: str) -> None:
    """Ragged edges included: 200 rows, 300 columns."""
    x = randn(200, 300)
    q = scaled8.quantize(x, format="fp8", granularity=granularity)
    assert q.scale.shape == ((200, 3) if granularity == "1x128" else (2, 3))
    for i, rows in enumerate(x.split(1 if granularity == "1x128" else 128)):
        for j, block in enumerate(rows.split(128, dim=1)):
            scale = block.abs().max() / torch.tensor(448.0)
            assert q.scale[i, j] == scale
            top = i * (1 if granularity == "1x128" else 128)
            got = q.codes[top : top + block.shape[0], 128 * j : 128 * j + block.shape[1]].float()
            assert torch.equal(got, (block / scale).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_error_bound_gradient_and_refusals(format: str) -> None:
    x = randn(8, 64).requires_grad_()
    out = scaled8.fake_quantize(x, format=format)
    scale = x.detach().abs().amax(-1, keepdim=True) / (127 if format == "int8" else 448)
    bound = scale / 2 if format == "int8" else torch.maximum(x.detach().abs() / 16, scale * 2**-10)
    assert ((out - x).detach().abs() <= bound * (1 + 1e-5)).all()
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with pytest.raises(ValueError, match="int8|fp8"):
        scaled8.quantize(x, format="int4")
    with pytest.raises(ValueError, match="needs a matrix"):
        scaled8.quantize(torch.zeros(128), format=format, granularity="128x128")
