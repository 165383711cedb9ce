"""Cutting by layer, token and head, and putting together again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.guidance.errors import (
    CoverageError,
    DuplicateRowError,
    FingerprintError,
    LayerError,
    ShardError,
    ZeroRowError,
)
from megatron_trace.guidance.sharding import (
    TokenShard,
    merge_columns,
    merge_tokens,
    sequence_positions,
    slice_heads,
    slice_layers,
    take_positions,
    zigzag_positions,
)
from tests.unit.guidance_wire.factory import SHAPE, equal, layout, segment

HEADS = SHAPE.num_key_value_heads


def test_zigzag_order_is_megatrons() -> None:
    """Of 2 C chunks rank r holds r and 2 C - 1 - r (megatron.core.utils.get_batch_on_this_cp_rank)."""
    assert zigzag_positions(16, cp_size=2, cp_rank=0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert zigzag_positions(16, cp_size=2, cp_rank=1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert zigzag_positions(6, cp_size=1, cp_rank=0).tolist() == list(range(6))
    with pytest.raises(ValueError, match="multiple of 2 x context parallel size = 4"):
        zigzag_positions(6, cp_size=2, cp_rank=0)
    assert sequence_positions(6, size=3, rank=1).tolist() == [2, 3]
    with pytest.raises(ValueError, match="sequence parallel size 4"):
        sequence_positions(6, size=4, rank=0)


def test_zigzag_order_equals_megatron_core() -> None:
    torch = pytest.importorskip("torch")
    megatron_utils = pytest.importorskip("megatron.core.utils")
    from unittest import mock

    for rank in range(4):
        with (
            mock.patch.object(megatron_utils.parallel_state, "get_context_parallel_world_size", return_value=4),
            mock.patch.object(megatron_utils.parallel_state, "get_context_parallel_rank", return_value=rank),
            mock.patch.object(torch.Tensor, "cuda", lambda self, non_blocking=False: self),
        ):
            batch = megatron_utils.get_batch_on_this_cp_rank({"tokens": torch.arange(32)[None]})
        assert batch["tokens"][0].tolist() == zigzag_positions(32, cp_size=4, cp_rank=rank).tolist()


@given(
    cuts=st.lists(st.sampled_from([0, 1, 2]), min_size=4, max_size=4),
    bits=st.sampled_from([1, 4]),
    order=st.permutations([0, 1, 2]),
)
def test_layer_slices_of_any_stages_merge_back(cuts: list[int], bits: int, order: list[int]) -> None:
    """Also virtual stages: a rank's layers need not be contiguous."""
    whole = segment(5, shape=layout(bits, layers=(0, 1, 2, 3)))
    stages = [slice_layers(whole, [layer for layer in range(4) if cuts[layer] == stage]) for stage in order]
    assert equal(merge_columns([s for s in stages if s.layout.columns]), whole)


def test_a_stage_gets_its_columns_closed_up_and_its_own_amax() -> None:
    whole = segment(3)
    stage = slice_layers(whole, (2, 3, 9))
    assert [(c.layer, c.site) for c in stage.layout] == [(2, "fc1_in"), (3, "fc1_in"), (3, "k"), (3, "v")]
    start, stop = whole.layout.span(2)[0], whole.layout.row_bytes
    assert (stage.rows == whole.rows[:, start:stop]).all() and stage.layout.columns[0].start == 0
    assert set(stage.static_amax[0]) == {(3, "k"), (3, "v")}
    assert slice_layers(whole, (0,)).rows.shape == (3, 0)


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("row_scaled", [("fc1_in",), ("fc1_in", "k", "v")])
def test_head_slices_merge_back_in_any_order(bits: int, ranks: int, row_scaled: tuple[str, ...]) -> None:
    whole = segment(5, shape=layout(bits, row_scaled=frozenset(row_scaled)))
    share = HEADS // ranks
    parts = [slice_heads(whole, head_dim=32, first=r * share, count=share) for r in range(ranks)]
    assert equal(merge_columns(parts[::-1]), whole)


@pytest.mark.parametrize("bits", [1, 4])
def test_a_head_slice_holds_exactly_the_bytes_of_its_heads(bits: int) -> None:
    whole = segment(2, shape=layout(bits, row_scaled=frozenset({"fc1_in", "k"})))
    part = slice_heads(whole, head_dim=32, first=1, count=2)
    k, mine = whole.layout.column(3, "k"), part.layout.column(3, "k")
    code, scale = 32 * bits // 8, 2
    rows = whole.rows[:, k.start : k.stop]
    expected = np.concatenate(
        (
            rows[:, code : 3 * code],
            rows[:, 4 * code + scale : 4 * code + 3 * scale],
            rows[:, 4 * code + 4 * scale + 4 : 4 * code + 4 * scale + 12],
        ),
        axis=1,
    )
    assert (part.rows[:, mine.start : mine.stop] == expected).all()
    assert (mine.first, mine.width, mine.whole) == (32, 64, 128)
    f, g = whole.layout.column(3, "fc1_in"), part.layout.column(3, "fc1_in")
    assert (part.rows[:, g.start : g.stop] == whole.rows[:, f.start : f.stop]).all()


def test_reslicing_a_slice_and_replicated_heads() -> None:
    """Rollout TP 2, trainer TP 4; and more ranks than heads, each head on two of them."""
    whole = segment(3)
    half = slice_heads(whole, head_dim=32, first=2, count=2)
    assert equal(slice_heads(half, head_dim=32, first=3, count=1), slice_heads(whole, head_dim=32, first=3, count=1))
    with pytest.raises(LayerError, match="heads 1 to 1 are asked for, values 64 to 127 of 128 are held"):
        slice_heads(half, head_dim=32, first=1, count=1)
    twice = [slice_heads(whole, head_dim=32, first=r // 2 * 2, count=2) for r in range(4)]
    with pytest.raises(ShardError, match="two shards hold values from 0 on"):
        merge_columns(twice)
    assert equal(merge_columns(twice[::2]), whole)


def test_a_block_never_straddles_ranks() -> None:
    with pytest.raises(LayerError, match="head_dim=24"):
        slice_heads(segment(1), head_dim=24, first=0, count=1)
    with pytest.raises(LayerError, match="syndrome records"):
        slice_heads(segment(1, shape=layout("syndrome")), head_dim=32, first=0, count=1)


def test_holes_overlaps_and_strangers_are_refused() -> None:
    whole = segment(4)
    first, last = (slice_heads(whole, head_dim=32, first=i, count=2) for i in (0, 2))
    with pytest.raises(ShardError, match="k of layer 1: values 64 to 128 are in no shard"):
        merge_columns([first])
    with pytest.raises(ShardError, match="values from 0 on are missing"):
        merge_columns([last])
    with pytest.raises(ShardError, match="values from 32 on are overlapping"):
        merge_columns([first, slice_heads(whole, head_dim=32, first=1, count=3)])
    with pytest.raises(ShardError, match="samples 7 and 8"):
        merge_columns([first, replace(last, sample_id=8)])
    with pytest.raises(FingerprintError, match="different contracts"):
        merge_columns([first, replace(last, contract_fingerprint="x")])
    with pytest.raises(ShardError, match="4 and 3 rows"):
        merge_columns([first, replace(last, rows=last.rows[:3], valid=last.valid[:3], versions=last.versions[:3])])
    with pytest.raises(ShardError, match="different weight versions"):
        merge_columns([first, replace(last, versions=last.versions + 1)])
    with pytest.raises(ShardError, match="no shards"):
        merge_columns([])


def test_a_row_is_valid_only_where_every_shard_has_it() -> None:
    whole = segment(4)
    first, last = (slice_heads(whole, head_dim=32, first=i, count=2) for i in (0, 2))
    lost = replace(last, valid=np.array([True, False, True, True]), versions=np.array([0, -1, 0, 0], dtype=np.int32))
    assert merge_columns([first, lost]).valid.tolist() == [True, False, True, True]


def test_a_shard_that_nobody_captured_is_refused() -> None:
    """cases/capture.md D08: one rank's shard arrives, the others are zeros."""
    whole = segment(4)
    first, last = (slice_heads(whole, head_dim=32, first=i, count=2) for i in (0, 2))
    empty = last.rows.copy()
    empty[2] = 0
    with pytest.raises(ZeroRowError, match="sample 7: row 2 of shard 1 is valid and holds only zeros"):
        merge_columns([first, replace(last, rows=empty)])


@given(cp=st.sampled_from([1, 2, 4]), order=st.randoms())
def test_context_parallel_shards_merge_back(cp: int, order) -> None:
    whole = segment(16, versions=[1] * 9 + [2] * 7)
    shards = [take_positions(whole, zigzag_positions(16, cp_size=cp, cp_rank=r)) for r in range(cp)]
    for rank, shard in enumerate(shards):
        assert (shard.segment.rows == whole.rows[zigzag_positions(16, cp_size=cp, cp_rank=rank)]).all()
    order.shuffle(shards)
    assert equal(merge_tokens(shards, length=16), whole)


def test_token_shards_must_cover_each_position_once() -> None:
    whole = segment(6)
    low, high = take_positions(whole, np.arange(3)), take_positions(whole, np.arange(3, 6))
    with pytest.raises(DuplicateRowError, match="position 0 is in two shards"):
        merge_tokens([low, high, low], length=6)
    with pytest.raises(CoverageError, match="position 3 is in no shard"):
        merge_tokens([low], length=6)
    with pytest.raises(CoverageError, match="position 5 is beyond its 5 rows"):
        merge_tokens([low, high], length=5)
    with pytest.raises(CoverageError, match="position 6 asked for, 6 rows held"):
        take_positions(whole, np.array([0, 6]))
    with pytest.raises(LayerError, match="different record layouts"):
        merge_tokens([low, TokenShard(high.positions, segment(3, shape=layout(1, layers=(1,))))], length=6)
    with pytest.raises(ShardError, match="at 1 and 4 bits"):
        merge_tokens([low, TokenShard(high.positions, segment(3, shape=layout(4)))], length=6)
