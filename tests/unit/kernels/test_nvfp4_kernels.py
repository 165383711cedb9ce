"""Every kernel equals its eager reference bit for bit, on hard inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.kernels import nvfp4 as kernels
from megatron_trace.numerics import dispatch, guided, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord
from megatron_trace.numerics.nvfp4 import NVFP4Tensor

SHAPES = [(3, 512), (2, 1, 640), (4, 3, 32), (1, 1040)]
"""Rows found by one program, even and ragged; narrow rows, whose amax is gathered; a tensor of odd size."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def bits(x: torch.Tensor) -> torch.Tensor:
    return (x.reshape(1) if x.ndim == 0 else x.contiguous()).view(torch.uint8)


def hard(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values with ties, zeros of both signs, underflowing blocks, subnormals and outliers mixed in."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    flat = x.view(-1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0, -0.0, 1e-42, -1e-38, 1e-7])
    pick = torch.randperm(flat.numel(), generator=g)[: flat.numel() // 4]
    flat[pick] = ties[torch.randint(0, 16, (len(pick),), generator=g)]
    blocks = x.view(-1, 16)
    blocks[0] = 0.0
    blocks[-1] *= 1e-7
    if len(blocks) > 8:
        blocks[5] *= 1e-41
        blocks[6] *= 400
    return x


def same(a: NVFP4Tensor, b: NVFP4Tensor) -> None:
    for field in ("codes", "block_scale", "global_amax"):
        left, right = getattr(a, field), getattr(b, field)
        assert left.shape == right.shape and left.dtype == right.dtype, field
        assert torch.equal(bits(left), bits(right)), field


@pytest.mark.parametrize(
    ("scope", "dtype"),
    [
        ("row", torch.bfloat16),
        ("row", torch.float32),
        ("tensor", torch.bfloat16),
        ("tensor", torch.float16),
        ("static", torch.bfloat16),
        ("static_rows", torch.float32),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantise_dequantise_and_record(shape: tuple[int, ...], scope: str, dtype: torch.dtype, device: str) -> None:
    x = hard(*shape).to(dtype).to(device)
    options: dict = {"scale_scope": scope}
    if scope.startswith("static"):
        amax = torch.tensor(2.0) if scope == "static" else torch.linspace(1, 9, x.numel() // shape[-1]).view(*shape[:-1], 1)
        options = {"scale_scope": "static", "global_amax": amax.to(device)}
    expected = nvfp4.quantize(x, **options)
    same(kernels.quantize(x, **options), expected)
    assert torch.equal(bits(kernels.dequantize(expected, dtype)), bits(expected.dequantize(dtype)))
    assert torch.equal(bits(kernels.quantize_dequantize(x, **options)), bits(expected.dequantize(dtype)))
    q, values = kernels.quantize_with_dequantized(x, **options)
    same(q, expected)
    assert torch.equal(bits(values), bits(expected.dequantize(dtype)))
    q, record = kernels.quantize_and_record(x, **options)
    same(q, expected)
    assert torch.equal(record.payload, guided.make_record(expected).payload)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("record_bits", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_guided(shape: tuple[int, ...], record_bits: int, scope: str, dtype: torch.dtype, device: str) -> None:
    x = hard(*shape, seed=1).to(dtype).to(device)
    for rollout in (hard(*shape, seed=2), hard(*shape, seed=1) * 1.02, hard(*shape, seed=1)):
        q = nvfp4.quantize(rollout.to(dtype).to(device), scale_scope=scope)
        record = guided.make_record(q, bits=record_bits)
        assert torch.equal(bits(kernels.fake_quantize_guided(x, record)), bits(guided.fake_quantize(x, record=record)))


@pytest.mark.parametrize("record_bits", [1, 4])
def test_guided_on_every_edge(record_bits: int, device: str) -> None:
    """z on, just above and just below every grid point and tie, against every codeword."""
    edges = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    rows = torch.cat([s * e for s in (1, -1) for e in (edges, edges * (1 + 2**-23), edges * (1 - 2**-24))]).view(6, 16)
    x = rows.repeat(16, 1).to(device)
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(6)
    packed = (codes | codes << 4).unsqueeze(-1).expand(96, 8).contiguous()
    one = torch.full((96, 1), 1.0).to(torch.float8_e4m3fn)
    record = guided.make_record(NVFP4Tensor(packed, one, torch.tensor(2688.0)), bits=record_bits)
    record = dataclasses.replace(
        record,
        payload=record.payload.to(device),
        block_scale=record.block_scale.to(device),
        global_amax=torch.tensor(2688.0).to(device),
    )
    assert torch.equal(bits(kernels.fake_quantize_guided(x, record)), bits(guided.fake_quantize(x, record=record)))


def test_nan_and_infinity_match_the_reference(device: str) -> None:
    x = hard(6, 512)
    x[0, 3], x[1, 20], x[2, :] = float("nan"), float("inf"), float("-inf")
    x = x.to(device)
    for scope in ("row", "tensor"):
        expected = nvfp4.quantize(x, scale_scope=scope)
        got = kernels.quantize(x, scale_scope=scope)
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(bits(got.block_scale) & 0x7F, bits(expected.block_scale) & 0x7F)  # a NaN's sign is free
        values = kernels.quantize_dequantize(x, scale_scope=scope)
        torch.testing.assert_close(values, expected.dequantize(torch.float32), rtol=0, atol=0, equal_nan=True)
    record = guided.make_record(nvfp4.quantize(hard(6, 512).to(device), scale_scope="row"))
    torch.testing.assert_close(
        kernels.fake_quantize_guided(x, record), guided.fake_quantize(x, record=record), rtol=0, atol=0, equal_nan=True
    )


def test_every_scale_byte_decodes(device: str) -> None:
    scale = torch.arange(127, dtype=torch.uint8).view(127, 1).view(torch.float8_e4m3fn)
    codes = torch.arange(8, dtype=torch.uint8) * 33
    q = NVFP4Tensor(codes.expand(127, 8).contiguous().to(device), scale.to(device), torch.tensor(3.7, device=device))
    assert torch.equal(bits(kernels.dequantize(q, torch.float32)), bits(q.dequantize(torch.float32)))


@pytest.mark.parametrize("with_amax", [True, False])
def test_gather(with_amax: bool, device: str) -> None:
    """Columns of a record row by index: payload, scales and the row's amax, equal to plain slicing."""
    q = nvfp4.quantize(hard(7, 48).bfloat16(), scale_scope="row")
    record = guided.make_record(q)
    amax = q.global_amax.contiguous().view(torch.uint8)
    noise = torch.randint(0, 256, (7, 5), dtype=torch.uint8)
    parts = [noise, record.payload, bits(record.block_scale), *([amax] if with_amax else []), noise]
    rows, index = torch.cat(parts, dim=1).to(device), torch.tensor([6, 0, 0, 3], device=device)
    static = None if with_amax else torch.tensor(4.0, device=device)
    for gather in (kernels.gather_record, guided.gather_record):
        got: GuidanceRecord = gather(rows, index, start=5, width=48, bits=1, global_amax=static)
        assert torch.equal(got.payload.cpu(), record.payload[index.cpu()])
        assert torch.equal(bits(got.block_scale).cpu(), bits(record.block_scale)[index.cpu()])
        assert torch.equal(got.global_amax.cpu(), q.global_amax[index.cpu()] if with_amax else torch.tensor(4.0))


def test_empty_and_refused(device: str) -> None:
    x = torch.zeros(0, 64, device=device)
    assert kernels.quantize(x, scale_scope="row").codes.shape == (0, 32)
    assert kernels.quantize_dequantize(x).shape == (0, 64)
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.quantize(torch.zeros(2, 24, device=device))
    q = nvfp4.quantize(torch.ones(2, 16, device=device), four_over_six="mae", e4m3_max=256)
    with pytest.raises(ValueError, match="e4m3_max=256"):
        kernels.dequantize(q)


def test_public_functions_reach_the_kernels(device: str) -> None:
    """Same bits through ``numerics`` whichever path runs; what the kernels cannot do falls back and is counted."""
    x = hard(4, 64).to(device)
    expected, record = guided.quantize_and_record(x)
    plain, full = guided.fake_quantize(x), guided.make_record(expected, bits=4)
    valid = torch.tensor([True, False, True, True], device=device)
    partial = dataclasses.replace(full, valid=valid)
    noisy = x * 1.01
    wanted = [guided.fake_quantize(noisy, record=r) for r in (record, full, partial)]
    dispatch.reset()
    with dispatch.prefer("triton"):
        q, same_record = guided.quantize_and_record(x)
        assert torch.equal(guided.fake_quantize(x), plain) and torch.equal(same_record.payload, record.payload)
        same(q, expected)
        assert torch.equal(q.dequantize(), expected.dequantize())
        for r, want in zip((record, full, partial), wanted, strict=True):
            assert torch.equal(guided.fake_quantize(noisy, record=r), want)
        nvfp4.quantize(x, four_over_six="mae")
    report = dispatch.report()
    assert report["calls"]["guided: triton"] == 3 and report["calls"]["quantize_and_record: triton"] == 1
    assert report["fallbacks"] == {"quantize: block 1x16, four_over_six mae": 1}
    dispatch.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_that_underflows_to_minus_zero_counts_as_zero(dtype: torch.dtype, device: str) -> None:
    """The sign is that of z, not of x: with a huge amax z can be -0.0 where x is not."""
    x = torch.tensor([-1e-40, 1e-40, -1e-39, -0.0, -1e-36, -1e30, 1e38, -1e38], dtype=dtype).repeat(2, 8).to(device)
    options: dict = {"scale_scope": "static", "global_amax": torch.tensor(3e38, device=device)}
    expected = nvfp4.quantize(x, **options)
    assert int(expected.codes[0, 0]) & 0xF == 0
    same(kernels.quantize(x, **options), expected)
    assert torch.equal(bits(kernels.quantize_dequantize(x, **options)), bits(expected.dequantize(dtype)))
    for record_bits in (1, 4):
        record = guided.make_record(expected, bits=record_bits)
        assert torch.equal(bits(kernels.fake_quantize_guided(x, record)), bits(guided.fake_quantize(x, record=record)))
