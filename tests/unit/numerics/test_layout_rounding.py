"""Layouts, the remaining rounding rules, baseline sites and health counters."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.numerics import baselines, dispatch, e2m1, guided, health, layout, nvfp4, rounding


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- layout -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (129, 5), (1, 1), (300, 13), (256, 8)])
def test_swizzle_places_each_byte_by_the_published_formula(rows: int, columns: int) -> None:
    scales = torch.randint(1, 127, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    swizzled = layout.swizzle_scales(scales.view(torch.float8_e4m3fn))
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    assert swizzled.shape == (padded_rows, padded_columns) and swizzled.dtype == torch.float8_e4m3fn
    flat = swizzled.view(torch.uint8).flatten()
    for r in range(0, rows, 7):
        for c in range(columns):
            tile = (r // 128) * (padded_columns // 4) + c // 4
            assert flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] == scales[r, c]
    back = layout.unswizzle_scales(swizzled, rows=rows, columns=columns)
    assert torch.equal(back.view(torch.uint8), scales)
    with pytest.raises(ValueError, match="are padded to"):
        layout.unswizzle_scales(swizzled, rows=rows + 128, columns=columns)


def test_expert_offsets_in_a_swizzled_stack_use_padded_rows() -> None:
    """hidden 1600 gives 100 scale columns; experts of 160 rows are padded to 256 each, so expert 1 starts at row 256."""
    experts = [torch.randint(1, 127, (160, 100), dtype=torch.uint8) for _ in range(3)]
    stacked = torch.cat([layout.swizzle_scales(e) for e in experts])
    for e, scales in enumerate(experts):
        part = stacked[256 * e : 256 * (e + 1)]
        assert torch.equal(layout.unswizzle_scales(part, rows=160, columns=100), scales)


def test_padding_keeps_every_other_block_and_shards_never_cut_one() -> None:
    x = randn(3, 40)
    padded = layout.pad_last(x)
    assert padded.shape == (3, 48) and padded[:, 40:].abs().max() == 0
    full, short = nvfp4.quantize(padded), nvfp4.quantize(x[:, :32], global_amax=x.abs().amax())
    assert torch.equal(full.codes[:, :16], short.codes)
    assert layout.pad_last(padded) is padded
    assert layout.check_shard(128, 8) == 16
    with pytest.raises(ValueError, match=r"K=96 cannot be cut into 4 shards.*\[1, 2, 3, 6\]"):
        layout.check_shard(96, 4)


def test_columnwise_is_not_the_transpose_of_rowwise() -> None:
    x = randn(32, 48)
    by_column = layout.quantize_columnwise(x)
    assert by_column.codes.shape == (48, 16)
    assert torch.equal(by_column.dequantize(), nvfp4.quantize(x.t().contiguous()).dequantize())
    assert not torch.equal(by_column.dequantize().t(), nvfp4.quantize(x).dequantize())


def test_gate_and_up_share_one_global_scale() -> None:
    gate, up = randn(16, 32), randn(16, 32, seed=1) * 3
    amax = layout.pair_amax(gate, up)
    both = nvfp4.quantize(torch.cat((gate, up)))
    halves = [nvfp4.quantize(h, scale_scope="static", global_amax=amax) for h in (gate, up)]
    assert torch.equal(torch.cat([h.codes for h in halves]), both.codes)

    q_gate, q_up = nvfp4.quantize(gate), nvfp4.quantize(up)
    p_gate, p_up = layout.pair(q_gate, q_up)
    assert p_gate.global_amax == p_up.global_amax == torch.maximum(q_gate.global_amax, q_up.global_amax)
    assert p_gate.codes is q_gate.codes and p_up is q_up  # payload unchanged; the larger half untouched
    assert torch.allclose(p_gate.dequantize(torch.float32), q_gate.dequantize(torch.float32), rtol=1 / 16, atol=0)
    same_1, same_2 = layout.pair(halves[0], halves[1])
    assert same_1 is halves[0] and same_2 is halves[1]


# --- rounding ---------------------------------------------------------------------------------------------------------------


def test_nearest_cell_beats_parity_for_large_noise_and_equals_the_rollout_for_small() -> None:
    far = rounding.nearest_cell(torch.tensor([4.1, 2.05]), torch.tensor([1.0, 1.0]))
    assert far.tolist() == [4.0, 2.0]  # 3's cell is nearer than 6's; 1.5's nearer than 3's: where parity gives 6 and 3
    roll = (randn(20000) * 2).clamp(-6, 6)
    q_roll = e2m1.round_to_nearest(roll)
    train = (roll + 0.4 * randn(20000, seed=1)).clamp(-6, 6)
    bit = (e2m1.ladder_from_values(q_roll).abs() % 2).float()
    close = (roll + 0.02 * randn(20000, seed=2)).clamp(-6, 6)
    assert torch.equal(rounding.nearest_cell(close, bit), q_roll)
    parity, cell = ((f(train, bit) - q_roll).norm() for f in (rounding.compact, rounding.nearest_cell))
    assert cell < parity


def test_stochastic_is_unbiased_and_stays_in_the_bracket() -> None:
    g = torch.Generator().manual_seed(0)
    for value in (0.1, -0.4, 1.3, 2.25, -3.7, 5.5, 6.0, 0.0):
        z = torch.full((200_000,), value)
        q = rounding.stochastic(z, torch.rand(200_000, generator=g))
        low, high = (e.item() for e in e2m1.bracket(z[:1]))
        assert set(q.unique().tolist()) <= {low, high}
        assert q.mean().item() == pytest.approx(value, abs=0.01)


# --- baselines --------------------------------------------------------------------------------------------------------------


def test_quads_counter_example() -> None:
    """x_r 2.45 and x_t 2.40 at scale 1: FP4 on both sides agrees, QUADS with an exact residual leaves the gap of .05."""
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, 2.45
    trained = x.clone()
    trained[0, 1] = 2.40
    amax = torch.tensor(2688.0 / 448 * 448)  # block scale 1 times global scale 1
    options = {"scale_scope": "static", "global_amax": amax}
    fp4 = [nvfp4.quantize_dequantize(t, **options)[0, 1].item() for t in (x, trained)]
    assert fp4 == [2.0, 2.0]
    quads = baselines.quads_rollout(x, ratio=1.0, exact=True, **options)
    assert quads[0, 1].item() == pytest.approx(2.45) and abs(quads[0, 1] - trained[0, 1]).item() == pytest.approx(
        0.05, abs=1e-6
    )


def test_quads_corrects_the_top_channels_only() -> None:
    x = randn(64, 128)
    x[:, 40:56] *= 8
    q = nvfp4.quantize_dequantize(x, scale_scope="row")
    top = baselines.top_residual_channels(x - q, ratio=0.5)
    assert len(top) == 64 and torch.equal(top, top.sort().values)
    energy = (x - q).square().sum(0)
    rest = torch.ones(128, dtype=torch.bool).index_fill(0, top, False)
    assert energy[top].min() >= energy[rest].max()
    out = baselines.quads_rollout(x)
    assert torch.equal(out[:, rest], q[:, rest])
    gap = [(baselines.quads_rollout(x, ratio=r) - x).norm().item() for r in (0.125, 0.25, 0.5, 1.0)]
    assert gap == sorted(gap, reverse=True) and gap[0] < (q - x).norm()
    assert baselines.quads_rollout(x, ratio=1.0, exact=True) == pytest.approx(x, abs=1e-5)
    with pytest.raises(ValueError, match=r"ratio=0"):
        baselines.top_residual_channels(x, ratio=0)


def test_resq_keeps_two_of_four() -> None:
    kept = baselines.keep_2_of_4(torch.tensor([[1.0, -3.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0]]))
    assert kept.tolist() == [[0.0, -3.0, 2.0, 0.0, 1.0, 1.0, 0.0, 0.0]]
    x = randn(16, 64)
    q = nvfp4.quantize_dequantize(x, scale_scope="row")
    correction = baselines.resq_rollout(x) - q
    assert (correction.view(16, 16, 4) != 0).sum(-1).max() <= 2
    assert (baselines.resq_rollout(x) - x).norm() < 0.7 * (q - x).norm()
    with pytest.raises(ValueError, match="multiple of 4"):
        baselines.keep_2_of_4(torch.zeros(6))


# --- health, dispatch -------------------------------------------------------------------------------------------------------


def test_health_counts() -> None:
    x = torch.ones(2, 64)
    x[0, 0], x[0, 16:32], x[1, 5], x[1, 20] = 6e6, 1e-3, float("nan"), float("inf")
    q = nvfp4.quantize(x, scale_scope="static", global_amax=torch.tensor(6e6))
    h = health.measure(x, q).as_dict()
    assert (h["values"], h["blocks"], h["nan"], h["infinite"]) == (128, 8, 1, 1)
    assert h["flushed"] == 5  # ones against 6e6: all but the amax block, the NaN block and the infinite one
    assert sum(h["scale_histogram"]) == 8 and h["scale_histogram"][-1] == 1 and h["scale_histogram"][0] == 5
    clipped = nvfp4.quantize(torch.full((1, 16), 10.0), scale_scope="static", global_amax=torch.tensor(5.0))
    one = health.measure(torch.full((1, 16), 10.0), clipped)
    assert one.saturated == 16 and (one + one).saturated == 32


def test_checked_mode_names_the_tensor() -> None:
    x = torch.zeros(3, 16)
    assert health.require_finite(x, name="fc1_in") is x
    x[2, 7] = float("-inf")
    with pytest.raises(health.NonFiniteError, match=r"layers\.3\.fc1_in: 1 of 48 .* first -inf at \[2, 7\]"):
        health.require_finite(x, name="layers.3.fc1_in")


def test_fallbacks_are_counted_and_visible() -> None:
    dispatch.reset()
    x = randn(4, 32)
    nvfp4.quantize(x)
    with dispatch.prefer("compiled"):
        nvfp4.quantize(x)
    report = dispatch.report()
    assert report == {"calls": {"quantize: eager": 2}, "fallbacks": {"quantize: no compiled form": 1}}
    dispatch.reset()


@pytest.mark.slow
@pytest.mark.skipif(dispatch.unavailable("compiled") is not None, reason="no C++ compiler")
def test_compiled_path_equals_eager_bit_for_bit() -> None:
    dtype, integer = torch.float32, torch.int32  # subnormals and all; BF16 differs by two exact casts
    x = randn(33, 256)
    x[0, :64] = torch.tensor([0.0, -0.0, 1e-42, -1e-41] * 16)
    x[1, :16] *= 1e-7
    x[2] = torch.tensor([0.25, -0.75, 1.25, 2.5, 3.5, -5.0, 6.0, 6.0]).repeat(32)
    for scope in ("tensor", "row"):
        eager = nvfp4.quantize_dequantize(x, scale_scope=scope)
        records = [
            guided.make_record(nvfp4.quantize(randn(33, 256, seed=1).to(dtype), scale_scope=scope), bits=b) for b in (1, 4)
        ]
        eager_guided = [guided.fake_quantize(x, record=r) for r in records]
        with dispatch.prefer("compiled"):
            assert torch.equal(nvfp4.quantize_dequantize(x, scale_scope=scope).view(integer), eager.view(integer))
            for record, expected in zip(records, eager_guided, strict=True):
                assert torch.equal(guided.fake_quantize(x, record=record).view(integer), expected.view(integer))
