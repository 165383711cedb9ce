"""Cutting segments for the ranks that use them, and putting together what ranks recorded apart.

By layer for pipeline stages, by token for data, context and sequence parallelism, by head for tensor parallelism. Guidance of
the expert input is taken before dispatch, so expert parallelism cuts it by token, never by expert.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_trace.guidance.errors import (
    CoverageError,
    DuplicateRowError,
    FingerprintError,
    LayerError,
    ShardError,
    ZeroRowError,
)
from megatron_trace.guidance.operations import join_amax
from megatron_trace.guidance.segments import GuidanceSegment
from megatron_trace.guidance.spec import BLOCK, KV_SITES, Column, RecordLayout


@dataclass(frozen=True)
class TokenShard:
    """Rows of some positions of a sample: ``segment`` row i belongs to ``positions`` int64 [n] at i."""

    positions: np.ndarray
    segment: GuidanceSegment


def zigzag_positions(length: int, *, cp_size: int, cp_rank: int) -> np.ndarray:
    """Positions int64 of context-parallel rank ``cp_rank``, in its order: of 2 C equal chunks it holds r and 2 C - 1 - r.

    Megatron-core's balanced order for causal attention (``get_batch_on_this_cp_rank``). ValueError unless 2 C divides it.
    """
    if length % (2 * cp_size):
        raise ValueError(f"sequence length {length} must be a multiple of 2 x context parallel size = {2 * cp_size}: pad it")
    chunks = np.arange(length, dtype=np.int64).reshape(2 * cp_size, -1)
    return np.concatenate((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))


def sequence_positions(length: int, *, size: int, rank: int) -> np.ndarray:
    """Positions int64 of sequence-parallel ``rank``: one contiguous part. ValueError unless ``size`` divides ``length``."""
    if length % size:
        raise ValueError(f"sequence length {length} must be a multiple of the sequence parallel size {size}: pad it")
    return np.arange(length, dtype=np.int64).reshape(size, -1)[rank]


def sub_layout(layout: RecordLayout, layers: Collection[int]) -> RecordLayout:
    """The columns of ``layers``, closed up."""
    return _closed(layout, [c for c in layout if c.layer in layers])


def slice_layers(segment: GuidanceSegment, layers: Collection[int]) -> GuidanceSegment:
    """What a pipeline stage (or one of its virtual chunks) with global ``layers`` needs; layers without record are no error."""
    layout = sub_layout(segment.layout, layers)
    parts = [segment.rows[:, slice(*segment.layout.span(layer))] for layer in layout.layers]
    rows = np.concatenate(parts, axis=1) if parts else segment.rows[:, :0]
    kept = {(c.layer, c.site) for c in layout}
    amax = {version: {key: a for key, a in table.items() if key in kept} for version, table in segment.static_amax.items()}
    return replace(segment, layout=layout, rows=rows, static_amax=amax)


def take_positions(segment: GuidanceSegment, positions: np.ndarray) -> TokenShard:
    """Rows of ``positions``, in that order (a CP rank's zig-zag order, an SP rank's part). CoverageError beyond the end."""
    if len(positions) and (int(positions.max()) >= len(segment) or int(positions.min()) < 0):
        raise CoverageError(f"sample {segment.sample_id}: position {int(positions.max())} asked for, {len(segment)} rows held")
    taken = {name: getattr(segment, name)[positions] for name in segment.ROW_FIELDS}
    return TokenShard(positions=np.asarray(positions, dtype=np.int64), segment=replace(segment, **taken, tokens_digest=""))


def slice_heads(segment: GuidanceSegment, *, head_dim: int, first: int, count: int) -> GuidanceSegment:
    """K and V of ``count`` heads from ``first`` on, other sites whole: what a tensor-parallel rank needs.

    A block of 16 never straddles heads. LayerError for syndrome records, whose packing and checksums span heads (cut before
    encoding), and for heads that are not held.
    """
    if segment.layout.bits == "syndrome":
        raise LayerError("syndrome records of K and V are not cut by head: cut the codes before encoding")
    if head_dim % BLOCK:
        raise LayerError(f"head_dim={head_dim} is not a multiple of {BLOCK}: a block would straddle heads")
    columns = [_heads(c, head_dim, first, count) if c.site in KV_SITES else c for c in segment.layout]
    layout = _closed(segment.layout, columns)
    rows = np.empty((len(segment), layout.row_bytes), dtype=np.uint8)
    for source, target in zip(segment.layout, layout, strict=True):
        _copy_range(segment.rows, source, rows, target)
    return replace(segment, layout=layout, rows=rows)


def merge_columns(shards: Sequence[GuidanceSegment]) -> GuidanceSegment:
    """One segment from shards of the same rows: other layers (PP), other sites, other heads (TP), in any order.

    A row is valid where every shard says so. ShardError for a hole, an overlap, or shards of different rows; ZeroRowError for a
    valid row of zeros: a rank that captured nothing.
    """
    if not shards:
        raise ShardError("no shards to merge")
    head = shards[0]
    for shard in shards[1:]:
        _same_sample(head, shard)
        if len(shard) != len(head):
            raise ShardError(f"sample {head.sample_id}: shards of {len(head)} and {len(shard)} rows")
    for index, shard in enumerate(shards):
        bare = shard.valid & ~shard.rows.any(axis=1)
        if bare.any() and shard.layout.columns:
            row = int(np.argmax(bare))
            raise ZeroRowError(f"sample {head.sample_id}: row {row} of shard {index} is valid and holds only zeros")
    valid = np.logical_and.reduce([s.valid for s in shards])
    for shard in shards[1:]:
        if (shard.versions != head.versions)[valid].any():
            raise ShardError(f"sample {head.sample_id}: shards were recorded under different weight versions")
    layout, sources = _tiled(shards)
    rows = np.empty((len(head), layout.row_bytes), dtype=np.uint8)
    for target, pieces in zip(layout, sources, strict=True):
        for shard, column in pieces:
            _copy_range(shard.rows, column, rows, target)
    amax: dict[int, dict[tuple[int, str], float]] = {}
    for shard in shards:
        amax = join_amax(amax, shard.static_amax, head.sample_id)
    return replace(head, layout=layout, rows=rows, valid=valid, static_amax=amax)


def merge_tokens(shards: Sequence[TokenShard], *, length: int) -> GuidanceSegment:
    """One segment of ``length`` positions from shards of its tokens (CP, SP, DP attention), in any order.

    DuplicateRowError where two shards hold a position, CoverageError where none does.
    """
    if not shards:
        raise ShardError("no shards to merge")
    head = shards[0].segment
    counts = np.bincount(np.concatenate([s.positions for s in shards]), minlength=length)
    if len(counts) > length:
        raise CoverageError(f"sample {head.sample_id}: position {len(counts) - 1} is beyond its {length} rows")
    if (counts > 1).any():
        raise DuplicateRowError(f"sample {head.sample_id}: position {int(np.argmax(counts > 1))} is in two shards")
    if (counts < 1).any():
        raise CoverageError(f"sample {head.sample_id}: position {int(np.argmax(counts < 1))} is in no shard")
    out = {name: np.empty((length, *getattr(head, name).shape[1:]), getattr(head, name).dtype) for name in head.ROW_FIELDS}
    amax: dict[int, dict[tuple[int, str], float]] = {}
    for shard in shards:
        _same_sample(head, shard.segment)
        if shard.segment.layout != head.layout:
            raise LayerError(f"sample {head.sample_id}: token shards have different record layouts")
        amax = join_amax(amax, shard.segment.static_amax, head.sample_id)
        for name in head.ROW_FIELDS:
            out[name][shard.positions] = getattr(shard.segment, name)
    return replace(head, **out, static_amax=amax)


def _tiled(
    shards: Sequence[GuidanceSegment],
) -> tuple[RecordLayout, list[list[tuple[GuidanceSegment, Column]]]]:
    """The whole layout, and for each of its columns the (shard, column) pieces that make it up.

    A whole column that several shards hold (a replicated site) is taken from the first of them.
    """
    pieces: dict[tuple[int, str], dict[int, tuple[GuidanceSegment, Column]]] = {}
    for shard in shards:
        for column in shard.layout:
            key = (column.layer, column.site)
            held = pieces.setdefault(key, {})
            if column.first in held and column.width != column.whole:
                raise ShardError(f"{column.site} of layer {column.layer}: two shards hold values from {column.first} on")
            held.setdefault(column.first, (shard, column))
    order = sorted(pieces, key=lambda key: (key[0], ("fc1_in", "k", "v", "fc2_in").index(key[1])))
    columns, sources = [], []
    for layer, site in order:
        parts = [pieces[layer, site][first] for first in sorted(pieces[layer, site])]
        end = 0
        for _, column in parts:
            if column.first != end:
                what = "missing" if column.first > end else "overlapping"
                raise ShardError(f"{site} of layer {layer}: values from {min(end, column.first)} on are {what}")
            end = column.first + column.width
        whole = parts[0][1].whole
        if end != whole:
            raise ShardError(f"{site} of layer {layer}: values {end} to {whole} are in no shard")
        columns.append(_widened([c for _, c in parts]))
        sources.append(parts)
    return _closed(shards[0].layout, columns), sources


def _widened(parts: Sequence[Column]) -> Column:
    sizes = ("width", "code_bytes", "scale_bytes", "amax_bytes", "check_bytes", "raw_bytes")
    return replace(parts[0], first=0, **{name: sum(getattr(c, name) for c in parts) for name in sizes})


def _heads(column: Column, head_dim: int, first: int, count: int) -> Column:
    start, width = first * head_dim, count * head_dim
    if start < column.first or start + width > column.first + column.width:
        raise LayerError(
            f"{column.site} of layer {column.layer}: heads {first} to {first + count - 1} are asked for, "
            f"values {column.first} to {column.first + column.width - 1} of {column.whole} are held"
        )
    share = {
        name: getattr(column, name) * width // column.width for name in ("code_bytes", "scale_bytes", "amax_bytes", "raw_bytes")
    }
    return replace(column, width=width, first=start, **share)


def _copy_range(source: np.ndarray, held: Column, target: np.ndarray, wanted: Column) -> None:
    """Copy the values both columns hold, part by part. Sizes of parts are in proportion to width."""
    begin, end = max(held.first, wanted.first), min(held.first + held.width, wanted.first + wanted.width)
    for (name, s0, s1), (_, t0, t1) in zip(held.parts, wanted.parts, strict=True):
        if s1 == s0 or t1 == t0:
            continue
        s = [s0 + (s1 - s0) * (at - held.first) // held.width for at in (begin, end)]
        t = [t0 + (t1 - t0) * (at - wanted.first) // wanted.width for at in (begin, end)]
        if s[1] - s[0] != t[1] - t[0]:
            raise ShardError(f"{held.site} of layer {held.layer}: {name} bytes do not divide by heads")
        target[:, t[0] : t[1]] = source[:, s[0] : s[1]]


def _closed(layout: RecordLayout, columns: Sequence[Column]) -> RecordLayout:
    """``columns`` laid one after another."""
    out, start = [], 0
    for column in columns:
        out.append(replace(column, start=start))
        start = out[-1].stop
    return RecordLayout(bits=layout.bits, columns=tuple(out))


def _same_sample(a: GuidanceSegment, b: GuidanceSegment) -> None:
    if a.sample_id != b.sample_id:
        raise ShardError(f"shards of samples {a.sample_id} and {b.sample_id} do not belong together")
    if a.layout.bits != b.layout.bits:
        raise ShardError(f"sample {a.sample_id}: shards were recorded at {a.layout.bits} and {b.layout.bits} bits")
    if a.contract_fingerprint != b.contract_fingerprint:
        raise FingerprintError(f"sample {a.sample_id}: shards were recorded under different contracts")
