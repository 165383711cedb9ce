"""Operations on segments. Each is pure: it returns a new segment and leaves its arguments as they were.

Row i of a segment is position i of the sample's full token sequence, over all turns. What keeps the rules of DESIGN.md 3.6:

* ``extend`` and ``append`` add rows at the end (prefill chunk, decoded token);
* ``adopt`` takes the rows of a shared prefix as they were recorded, each with its own weight version;
* ``retract`` drops rows from the end;
* ``restore`` puts a retracted request together again: positions recorded before keep their first recording, because the
  reported log-probabilities came from that forward, and a position that had no valid row then has none now.

Shards (``merge_columns``, ``merge_tokens``, ``slice_layers``, ``slice_heads``, ``take_positions``) are in ``sharding.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from megatron_trace.guidance.errors import CoverageError, FingerprintError, GuidanceError, LayerError
from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment
from megatron_trace.guidance.spec import RecordLayout

S = TypeVar("S", GuidanceSegment, RouteSegment)
Amax = Mapping[int, Mapping[tuple[int, str], float]]


def empty(layout: RecordLayout, *, sample_id: int, contract_fingerprint: str) -> GuidanceSegment:
    """A segment of no rows."""
    return GuidanceSegment(
        sample_id=sample_id,
        layout=layout,
        rows=np.zeros((0, layout.row_bytes), dtype=np.uint8),
        valid=np.zeros(0, dtype=bool),
        versions=np.zeros(0, dtype=np.int32),
        contract_fingerprint=contract_fingerprint,
    )


def extend(
    segment: GuidanceSegment,
    rows: np.ndarray,
    *,
    version: int,
    static_amax: Mapping[tuple[int, str], float],
    valid: bool = True,
) -> GuidanceSegment:
    """``segment`` with ``rows`` uint8 [m, row_bytes] of one forward of ``version`` at its end."""
    if rows.ndim != 2 or rows.shape[1] != segment.layout.row_bytes:
        raise LayerError(
            f"sample {segment.sample_id}: rows are {list(rows.shape)}, layout has {segment.layout.row_bytes} bytes"
        )
    m = len(rows)
    return replace(
        segment,
        rows=np.concatenate((segment.rows, rows)),
        valid=np.concatenate((segment.valid, np.full(m, valid))),
        versions=np.concatenate((segment.versions, np.full(m, version, dtype=np.int32))),
        static_amax=join_amax(segment.static_amax, {version: static_amax}, segment.sample_id),
        tokens_digest="",
    )


def append(
    segment: GuidanceSegment, row: np.ndarray, *, version: int, static_amax: Mapping[tuple[int, str], float]
) -> GuidanceSegment:
    """``segment`` with the one ``row`` uint8 [row_bytes] of a decoded token at its end.

    Costs a copy of the segment: an engine collects rows by slot and extends once.
    """
    return extend(segment, row[None], version=version, static_amax=static_amax)


def pad_invalid(segment: S, length: int) -> S:
    """``segment`` with rows that hold nothing, marked invalid and of version -1, up to ``length``."""
    missing = length - len(segment)
    if missing <= 0:
        return segment
    blank = {
        name: np.zeros((missing, *getattr(segment, name).shape[1:]), getattr(segment, name).dtype)
        for name in segment.ROW_FIELDS
    }
    blank["versions"] -= 1
    return replace(segment, **{name: np.concatenate((getattr(segment, name), blank[name])) for name in segment.ROW_FIELDS})


def adopt(segment: GuidanceSegment, source: GuidanceSegment, length: int) -> GuidanceSegment:
    """``segment`` grown to ``length`` with the rows of ``source``, whose first ``length`` tokens are the same.

    Rows keep the version and validity they were recorded with. GuidanceError where the two do not mix or ``source`` is short.
    """
    _same_kind(segment, source)
    if len(source) < length:
        raise CoverageError(f"sample {segment.sample_id}: {length} rows to adopt, sample {source.sample_id} has {len(source)}")
    if length <= len(segment):
        return segment
    taken = slice(len(segment), length)
    return replace(
        segment,
        **{name: np.concatenate((getattr(segment, name), getattr(source, name)[taken])) for name in segment.ROW_FIELDS},
        static_amax=join_amax(segment.static_amax, source.static_amax, segment.sample_id),
        tokens_digest="",
    )


def retract(segment: S, length: int) -> S:
    """The first ``length`` rows, as views."""
    changed = {name: getattr(segment, name)[:length] for name in segment.ROW_FIELDS}
    if isinstance(segment, GuidanceSegment) and length < len(segment):
        return replace(segment, **changed, tokens_digest="")
    return replace(segment, **changed)


def restore(first: S, again: S) -> S:
    """One request after retraction: rows of ``first``, recorded when its tokens were sampled, then those of ``again``.

    Positions of ``first`` keep its rows, versions and validity whatever ``again`` recorded for them: a row recorded again comes
    from another forward than the log-probability, so it never replaces an invalid one either.
    """
    if len(again) <= len(first):
        return first
    n = len(first)
    changed = {name: np.concatenate((getattr(first, name), getattr(again, name)[n:])) for name in first.ROW_FIELDS}
    if isinstance(first, GuidanceSegment) and isinstance(again, GuidanceSegment):
        _same_kind(first, again)
        amax = join_amax(first.static_amax, again.static_amax, first.sample_id)
        return replace(first, **changed, static_amax=amax, tokens_digest=again.tokens_digest)
    return replace(first, **changed)


def join_amax(a: Amax, b: Amax, sample_id: int) -> dict[int, dict[tuple[int, str], float]]:
    """Static amax of both; GuidanceError where one version has two values for a site."""
    joined = {version: dict(amax) for version, amax in a.items()}
    for version, amax in b.items():
        known = joined.setdefault(version, {})
        clash = next((key for key, value in amax.items() if known.setdefault(key, value) != value), None)
        if clash is not None:
            raise GuidanceError(
                f"sample {sample_id}: weight version {version} has static amax {known[clash]} and {amax[clash]} "
                f"for {clash[1]} of layer {clash[0]}"
            )
    return joined


def _same_kind(a: GuidanceSegment, b: GuidanceSegment) -> None:
    if a.layout != b.layout:
        raise LayerError(f"samples {a.sample_id} and {b.sample_id} have different record layouts")
    if a.contract_fingerprint != b.contract_fingerprint:
        raise FingerprintError(
            f"samples {a.sample_id} and {b.sample_id} were recorded under contracts {a.contract_fingerprint[:12]} and "
            f"{b.contract_fingerprint[:12]}"
        )
