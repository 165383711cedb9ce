"""Guided rounding: exhaustive over codewords, the guarantees and the documented exception, gradients, validity, counting."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_trace.numerics import e2m1, guided, nvfp4, rounding
from tests.unit.numerics import oracle

ALL = torch.arange(16, dtype=torch.uint8)
GRID = sorted({float(v) for v in oracle.E2M1} | {-float(v) for v in oracle.E2M1})


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense_z() -> torch.Tensor:
    """Even sweep of [-6, 6], plus every grid point and tie with both float neighbours."""
    special = [v for g in (*GRID, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e-9, 1e-40) for v in (g, -g)]
    near = [float(np.nextafter(np.float32(v), np.float32(d))) for v in special for d in (-9, 9)]
    z = torch.cat((torch.linspace(-6, 6, 4001), torch.tensor(special), torch.tensor(near)))
    return z[z.abs() <= 6]


def test_full_is_never_worse_than_nearest_for_any_z_and_codeword() -> None:
    z = dense_z()
    nearest = e2m1.round_to_nearest(z)
    for q_roll in GRID:
        roll = torch.full_like(z, q_roll)
        q = rounding.full(z, roll)
        assert int(((q - roll).abs() > (nearest - roll).abs()).sum()) == 0
        low, high = e2m1.bracket(z)
        assert bool(((q == low) | (q == high)).all())


def test_full_and_compact_equal_the_slow_search() -> None:
    z = dense_z()[::7]
    for code in range(16):
        q_roll = float(oracle.e2m1_float(code))
        full = rounding.full(z, torch.full_like(z, q_roll)).tolist()
        assert full == [oracle.guided_full(np.float32(v), q_roll) for v in z.tolist()]
    for bit in (0, 1):
        compact = rounding.compact(z, torch.full_like(z, float(bit))).tolist()
        assert compact == [oracle.guided_compact(np.float32(v), bit) for v in z.tolist()]


def test_compact_equals_full_iff_rollout_is_in_the_bracket_or_an_even_number_of_steps_outside() -> None:
    z = dense_z()
    low, high = (e2m1.ladder_from_values(e) for e in e2m1.bracket(z))
    for index in range(-7, 8):
        q_roll = e2m1.values_from_ladder(torch.tensor(index, dtype=torch.int8)).item()
        outside = torch.maximum(low - index, index - high).clamp(min=0)  # steps from the nearer endpoint
        full = rounding.full(z, torch.full_like(z, q_roll))
        compact = rounding.compact(z, torch.full_like(z, float(abs(index) % 2)))
        on_grid = low == high
        expected = (outside % 2 == 0) | on_grid
        assert torch.equal(full == compact, expected)


def test_documented_case_where_compact_is_worse_than_nearest() -> None:
    z = torch.tensor([2.4])
    assert e2m1.round_to_nearest(z).item() == 2.0  # gap .5 to the rollout's 1.5
    assert rounding.full(z, torch.tensor([1.5])).item() == 2.0
    assert rounding.compact(z, torch.tensor([1.0])).item() == 3.0  # gap 1.5


def test_explainer_example() -> None:
    z = torch.tensor([2.51, 2.49])
    assert e2m1.round_to_nearest(z).tolist() == [3.0, 2.0]
    assert rounding.full(z, torch.tensor([3.0, 3.0])).tolist() == [3.0, 3.0]
    assert rounding.compact(z, torch.tensor([1.0, 1.0])).tolist() == [3.0, 3.0]
    assert (rounding.full(torch.tensor([59.76 / 24]), torch.tensor([3.0])) * 24).item() == 72.0


def test_grid_points_and_saturation_do_not_move() -> None:
    grid = torch.tensor(GRID)
    for bit in (0.0, 1.0):
        assert torch.equal(rounding.compact(grid, torch.full_like(grid, bit)), grid)
    for q_roll in GRID:
        assert torch.equal(rounding.full(grid, torch.full_like(grid, q_roll)), grid)
    x = torch.full((1, 16), 100.0)
    q = nvfp4.quantize(torch.full((1, 16), 4.0), scale_scope="static", global_amax=torch.tensor(6.0))
    for bits in (1, 4):
        out = guided.fake_quantize(x, record=guided.make_record(q, bits=bits))
        assert torch.equal(out, (6.0 * q.block_scale.float() * (6.0 / 2688)).expand(1, 16))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.002, 0.01, 0.05, 0.3]), st.sampled_from(["row", "tensor"]))
def test_random_tensors_full_guarantee_and_zero_gap_inside_the_bracket(seed: int, noise: float, scope: str) -> None:
    x_roll = randn(4, 64, seed=seed)
    x_train = x_roll + noise * randn(4, 64, seed=seed + 1)
    q = nvfp4.quantize(x_roll, scale_scope=scope)
    full, compact = guided.make_record(q, bits=4), guided.make_record(q, bits=1)
    roll, nearest = guided.tensor_codes(q), guided.nearest_codes(x_train, full)
    counts = guided.count_codes(roll, guided.guided_codes(x_train, full), nearest=nearest)
    assert counts.worse_than_nearest == 0 and counts.values == 256
    z = nvfp4.scaled(x_train, q.block_scale.float(), nvfp4.encode_scale(q.global_amax))
    low, high = (e2m1.ladder_from_values(e) for e in e2m1.bracket(z))
    inside = (low <= roll) & (roll <= high)
    for record in (full, compact):
        assert torch.equal(guided.guided_codes(x_train, record)[inside], roll[inside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("scope", ["row", "tensor", "static"])
def test_same_values_and_scale_reproduce_the_rollout_bit_for_bit(scope: str, bits: int, dtype: torch.dtype) -> None:
    x = randn(8, 64).to(dtype)
    x[0, :16], x[1, 5], x[2, 3] = 0.0, -0.0, -1e-5
    x[3, 16:32] *= 1e-7
    amax = torch.tensor(3.5) if scope == "static" else None  # some values saturate
    q = nvfp4.quantize(x, scale_scope=scope, global_amax=amax)
    out = guided.fake_quantize(x, record=guided.make_record(q, bits=bits), scale_scope=scope, global_amax=amax)
    rollout = q.dequantize(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.view(integer), rollout.view(integer))
    assert torch.equal(guided.nearest_on_record_scale(x, guided.make_record(q, bits=bits)), rollout)
    assert torch.equal(guided.fake_quantize(x, scale_scope=scope, global_amax=amax), rollout)


def test_output_is_code_times_recorded_scale() -> None:
    x_roll, x_train = randn(4, 32), randn(4, 32, seed=9)
    q = nvfp4.quantize(x_roll, scale_scope="row")
    record = guided.make_record(q, bits=4)
    s, bits = q.block_scale.view(torch.uint8), q.codes
    out = guided.fake_quantize(x_train, record=record)
    for r, k in ((0, 0), (1, 17), (3, 31)):
        amax, byte = np.float32(q.global_amax[r, 0].item()), int(s[r, k // 16])
        z = oracle.z_of(np.float32(x_train[r, k].item()), oracle.e4m3_float(byte), oracle.encode_scale(amax))
        code = (int(bits[r, k // 2]) >> (4 * (k % 2))) & 15
        q_star = oracle.guided_full(z, float(oracle.e2m1_float(code)))
        expected = (np.float32(q_star) * oracle.e4m3_float(byte)) * (amax * (np.float32(1) / np.float32(2688)))
        assert out[r, k].item() == float(expected)


def test_bits_pack_lowest_first_and_round_trip() -> None:
    codes = torch.randint(0, 16, (3, 5, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    payload = guided.pack_bits(e2m1.pack(codes))
    assert payload.shape == (3, 5, 8)
    expected = [
        [sum((c & 1) << i for i, c in enumerate(row[8 * b : 8 * b + 8])) for b in range(8)] for row in codes[1].tolist()
    ]
    assert payload[1].tolist() == expected
    assert torch.equal(guided.unpack_bits(payload), (codes & 1).float())
    assert guided.unpack_bits(torch.zeros(0, 8, dtype=torch.uint8)).shape == (0, 64)


@pytest.mark.parametrize(("width", "bits", "expected"), [(2048, 4, 1152), (2048, 1, 384), (512, 4, 288), (512, 1, 96)])
def test_bytes_per_token(width: int, bits: int, expected: int) -> None:
    record = guided.make_record(nvfp4.quantize(randn(1, width), scale_scope="row"), bits=bits)
    assert record.payload.nbytes + record.block_scale.nbytes == expected
    assert record.shape == (1, width)


def test_dead_blocks_record_zero_bits_and_give_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 6e6, -1.0
    q = nvfp4.quantize(x)
    assert e2m1.unpack(q.codes)[0, 16].item() == 15
    for bits in (1, 4):
        record = guided.make_record(q, bits=bits)
        assert record.payload[0, record.payload.shape[1] // 2 :].tolist() == [0] * (record.payload.shape[1] // 2)
        assert guided.fake_quantize(torch.ones(1, 32), record=record)[0, 16:].abs().max().item() == 0
    assert guided.tensor_codes(q)[0, 16:].tolist() == [0] * 16


@pytest.mark.parametrize("bits", [None, 1, 4])
def test_gradient_is_identity_everywhere(bits: int | None) -> None:
    x = (randn(4, 32) * 10).requires_grad_()
    record = None if bits is None else guided.make_record(nvfp4.quantize(randn(4, 32), scale_scope="row"), bits=bits)
    upstream = randn(4, 32, seed=5)
    guided.fake_quantize(x, record=record).backward(upstream)
    assert torch.equal(x.grad, upstream)
    y = x.detach().requires_grad_()
    if record is not None:
        guided.nearest_on_record_scale(y, record).backward(upstream)
        assert torch.equal(y.grad, upstream)
    with torch.no_grad():
        assert not guided.fake_quantize(x, record=record).requires_grad


def test_invalid_rows_round_to_nearest_with_their_own_scale() -> None:
    x_roll, x = randn(6, 32), randn(6, 32, seed=3)
    record = guided.make_record(nvfp4.quantize(x_roll, scale_scope="row"))
    valid = torch.tensor([True, False, True, True, False, True])
    scale = torch.where(valid[:, None], record.block_scale.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)
    garbage = dataclasses.replace(record, valid=valid, block_scale=scale)
    out = guided.fake_quantize(x, record=garbage)
    assert torch.equal(out[valid], guided.fake_quantize(x, record=record)[valid])
    assert torch.equal(out[~valid], nvfp4.quantize_dequantize(x, scale_scope="row")[~valid])
    none_valid = guided.fake_quantize(x, record=dataclasses.replace(record, valid=torch.zeros(6, dtype=torch.bool)))
    assert torch.equal(none_valid, nvfp4.quantize_dequantize(x, scale_scope="row"))
    static = torch.tensor(2.0)
    out = guided.fake_quantize(x, record=garbage, scale_scope="static", global_amax=static)
    assert torch.equal(out[~valid], nvfp4.quantize_dequantize(x, scale_scope="static", global_amax=static)[~valid])


def test_rows_of_different_weight_versions_have_their_own_static_amax() -> None:
    x = randn(4, 32)
    amax = torch.tensor([3.0, 3.0, 5.0, 5.0]).view(4, 1)
    parts = [nvfp4.quantize(x[i : i + 2], scale_scope="static", global_amax=torch.tensor(a)) for i, a in ((0, 3.0), (2, 5.0))]
    records = [guided.make_record(p, bits=4) for p in parts]
    merged = guided.GuidanceRecord(
        bits=4,
        payload=torch.cat([r.payload for r in records]),
        block_scale=torch.cat([r.block_scale.view(torch.uint8) for r in records]).view(torch.float8_e4m3fn),
        global_amax=amax,
    )
    noisy = x + 0.05 * randn(4, 32, seed=8)
    expected = torch.cat([guided.fake_quantize(noisy[2 * i : 2 * i + 2], record=r) for i, r in enumerate(records)])
    assert torch.equal(guided.fake_quantize(noisy, record=merged), expected)


def test_guidance_before_and_after_a_permutation_is_equal() -> None:
    """Rows carry their own scale, so the expert dispatch may permute them first or afterwards."""
    x_roll, x = randn(16, 64), randn(16, 64, seed=1)
    record = guided.make_record(nvfp4.quantize(x_roll, scale_scope="row"))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).repeat(2)  # top-2: every row twice
    permuted = guided.GuidanceRecord(
        bits=1,
        payload=record.payload[order],
        block_scale=record.block_scale.view(torch.uint8)[order].view(torch.float8_e4m3fn),
        global_amax=record.global_amax[order],
    )
    assert torch.equal(guided.fake_quantize(x, record=record)[order], guided.fake_quantize(x[order], record=permuted))


def test_counts() -> None:
    roll = torch.tensor([[1, 2, 3, -1], [0, 0, 7, -7]], dtype=torch.int8)
    trained = torch.tensor([[1, 3, 3, 1], [0, 0, 5, -7]], dtype=torch.int8)
    nearest = torch.tensor([[2, 2, 3, 0], [0, 0, 4, -7]], dtype=torch.int8)
    counts = guided.count_codes(roll, trained, nearest=nearest)
    assert counts == guided.CodeCounts(values=8, flips=3, adjacent=1, worse_than_nearest=2)
    mask = torch.tensor([False, True])
    assert guided.count_codes(roll, trained, mask=mask) == guided.CodeCounts(
        values=4, flips=1, adjacent=0, worse_than_nearest=0
    )


def test_record_codes_are_the_rollouts() -> None:
    q = nvfp4.quantize(randn(2, 32), scale_scope="row")
    assert torch.equal(guided.record_codes(guided.make_record(q, bits=4)), guided.tensor_codes(q))
    with pytest.raises(ValueError, match="bits=1"):
        guided.record_codes(guided.make_record(q, bits=1))


def test_simulated_gap_of_the_literature() -> None:
    """Relative noise 1%, x ~ N(0,1): gap 5.45 own scale, 4.67 rollout scale, 0 guided; 3.28% flips, all adjacent."""
    x_roll = randn(512, 2048)
    x = x_roll + 0.01 * randn(512, 2048, seed=1)
    q = nvfp4.quantize(x_roll)
    full, compact = (guided.make_record(q, bits=b) for b in (4, 1))
    rollout, base = q.dequantize(torch.float32), (x - x_roll).norm()
    gap = {
        "own": (guided.fake_quantize(x, scale_scope="tensor") - rollout).norm() / base,
        "record": (guided.nearest_on_record_scale(x, full) - rollout).norm() / base,
        "full": (guided.fake_quantize(x, record=full) - rollout).norm() / base,
        "compact": (guided.fake_quantize(x, record=compact) - rollout).norm() / base,
    }
    assert gap["own"].item() == pytest.approx(5.45, rel=0.1)  # moves with the two tensors' own global amax
    assert gap["record"].item() == pytest.approx(4.67, rel=0.03)
    assert gap["full"].item() == 0 and gap["compact"].item() == 0
    counts = guided.count_codes(guided.tensor_codes(q), guided.nearest_codes(x, full))
    assert counts.flips / counts.values == pytest.approx(0.0328, rel=0.03) and counts.adjacent == counts.flips


def test_flip_rate_law() -> None:
    """z uniform on [-6, 6]: P(flip) = .9309 sigma, E[dq^2] = .9309 sigma."""
    z = (torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) * 12 - 6).float()
    noisy = (z + 0.01 * randn(1 << 20, seed=1)).clamp(-6, 6)
    a, b = e2m1.round_to_nearest(z), e2m1.round_to_nearest(noisy)
    assert (a != b).float().mean().item() == pytest.approx(0.009309, rel=0.03)
    assert ((a - b) ** 2).mean().sqrt().item() / 0.01 == pytest.approx(9.65, rel=0.03)


def test_mismatched_record_is_refused() -> None:
    record = guided.make_record(nvfp4.quantize(randn(4, 32), scale_scope="row"))
    with pytest.raises(ValueError, match=r"for shape \[4, 32\], x has \[5, 32\]"):
        guided.fake_quantize(torch.zeros(5, 32), record=record)
    with pytest.raises(ValueError, match="bits=2"):
        guided.make_record(nvfp4.quantize(randn(4, 32)), bits=2)
