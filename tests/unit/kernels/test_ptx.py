"""The PTX of the kernels, executed instruction by instruction on a CPU, equals the eager reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_trace.kernels import ptx
from megatron_trace.numerics import guided, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord
from tests.unit.kernels import ptx_machine
from tests.unit.kernels.ptx_machine import Register
from tests.unit.kernels.test_nvfp4_kernels import bits, hard


def edges(rows: int, width: int, seed: int) -> torch.Tensor:
    """BF16 values: 3 in 10 of any finite bit pattern, the others near E2M1's grid and ties, with both zeros and subnormals."""
    g = torch.Generator().manual_seed(seed)
    anything = torch.randint(0, 65536, (rows, width), generator=g).to(torch.uint16).view(torch.bfloat16)
    anything = torch.where(anything.isfinite(), anything, torch.zeros_like(anything)).clamp(-1e30, 1e30)
    grid = torch.tensor([0.0, -0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 1e-40, -1e-40, -9.2e-41])
    near = grid[torch.randint(0, len(grid), (rows, width), generator=g)] * (
        1 + 2.0**-7 * torch.randint(-1, 2, (rows, width), generator=g)
    )
    near = near * torch.where(torch.rand(rows, width, generator=g) < 0.5, -1.0, 1.0)
    return torch.where(torch.rand(rows, width, generator=g) < 0.3, anything, near.bfloat16())


def words(x: torch.Tensor) -> list[Register]:
    """The four words of every row of eight of BF16 ``x``."""
    columns = x.contiguous().view(-1, 8).view(torch.int32).numpy().view(np.uint32)
    return [np.ascontiguousarray(columns[:, j]) for j in range(4)]


def registers(x: torch.Tensor) -> Register:
    return x.contiguous().reshape(-1).float().numpy().view(np.uint32)


def run_guided(x: torch.Tensor, record: GuidanceRecord) -> torch.Tensor:
    scale = record.block_scale.float()
    inverse = nvfp4.inverse_scale(scale, nvfp4.encode_scale(record.global_amax, 448))
    factor = nvfp4.decode_factor(record.global_amax, 448, record.shape).expand(*x.shape[:-1], 1).expand_as(scale)
    payload = record.payload if record.bits == 1 else record.payload.contiguous().view(torch.int32)
    per_row = [registers(v.repeat_interleave(2, dim=-1)) for v in (inverse, scale * ptx.SCALE_SHIFT, factor * ptx.FACTOR_SHIFT)]
    inputs = [*words(x), payload.reshape(-1).numpy().astype(np.uint32), *per_row]
    out = np.stack(ptx_machine.run(ptx.guided(record.bits), inputs, 4), axis=1)
    return torch.from_numpy(out.view(np.int32)).view(torch.bfloat16).view(x.shape)


@pytest.mark.parametrize("record_bits", [1, 4])
@pytest.mark.parametrize("amax", [2688.0, 3.3e38, 1e-37, 5.0])
def test_guided_equals_the_reference(record_bits: int, amax: float) -> None:
    g = torch.Generator().manual_seed(3)
    x = edges(64, 512, seed=1) * (amax / 2688 if amax < 1e30 else 1.0)
    scale = torch.randint(0, 127, (64, 32), generator=g).to(torch.uint8)
    scale[:32] = 0x38  # 1.0: z is x itself where amax is 2688
    payload = torch.randint(0, 256, (64, 512 * record_bits // 8), generator=g).to(torch.uint8)
    record = GuidanceRecord(
        bits=record_bits, payload=payload, block_scale=scale.view(torch.float8_e4m3fn), global_amax=torch.tensor(amax)
    )
    expected = guided.fake_quantize(x, record=record)
    assert len(expected.float().abs().unique()) > 50
    assert torch.equal(bits(run_guided(x, record)), bits(expected))


@pytest.mark.parametrize("record_bits", [1, 4])
def test_guided_by_a_neighbouring_rollout(record_bits: int) -> None:
    x = hard(32, 2048, seed=1).bfloat16()
    q = nvfp4.quantize((hard(32, 2048, seed=1) * (1 + 0.03 * torch.randn(32, 2048))).bfloat16(), scale_scope="row")
    record = guided.make_record(q, bits=record_bits)
    assert torch.equal(bits(run_guided(x, record)), bits(guided.fake_quantize(x, record=record)))


@pytest.mark.parametrize("record_bits", [1, 4])
def test_guided_keeps_nan_and_clips_infinity(record_bits: int) -> None:
    x = hard(2, 512).bfloat16()
    record = guided.make_record(nvfp4.quantize(x, scale_scope="row"), bits=record_bits)
    x[0, ::3], x[1, 5], x[1, 77] = float("nan"), float("inf"), float("-inf")
    torch.testing.assert_close(run_guided(x, record), guided.fake_quantize(x, record=record), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("amax", [2688.0, 1e-36, 700.0])
def test_codes_and_amax_equal_the_reference(amax: float) -> None:
    x = edges(64, 512, seed=2) * (amax / 2688)
    q = nvfp4.quantize(x, scale_scope="static", global_amax=torch.tensor(amax))
    inverse = nvfp4.inverse_scale(q.block_scale.float(), nvfp4.encode_scale(q.global_amax, 448))
    (got,) = ptx_machine.run(ptx.codes(), [*words(x), registers(inverse.repeat_interleave(2, dim=-1))], 1)
    assert np.array_equal(got, q.codes.view(torch.int32).reshape(-1).numpy().view(np.uint32))
    (largest,) = ptx_machine.run(ptx.amax(), words(x), 1)
    assert np.array_equal(largest, registers(x.abs().view(-1, 8).amax(-1)))


def test_amax_is_nan_when_any_value_is() -> None:
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    x.fill_diagonal_(float("nan"))
    assert np.isnan(ptx_machine.run(ptx.amax(), words(x), 1)[0].view(np.float32)).all()
