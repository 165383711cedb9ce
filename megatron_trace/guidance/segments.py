"""Records owned by one sample, found by (sample, position, global layer, weight version), never by order (DESIGN.md 3.5).

Row i of a segment belongs to position i of the sample's full token sequence. Arrays are numpy uint8, so that they travel
through shared memory and object stores without a copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.guidance.spec import Column, RecordLayout

__all__ = ["GuidanceError", "GuidanceSegment", "RouteSegment", "narrowed", "tokens_digest"]


def tokens_digest(tokens: Sequence[int] | np.ndarray) -> str:
    """Hex digest of token ids: both sides must mean the same tokens, not the same text (cases/capture.md D13)."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class GuidanceSegment:
    """All guidance rows of one sample.

    ``rows`` uint8 [n, layout.row_bytes]; ``valid`` bool [n]; ``versions`` int32 [n], the weight version each row was recorded
    under; ``static_amax`` {version: {(layer, site): FP32 amax}} for the sites that carry no amax of their own;
    ``tokens_digest`` of the n recorded tokens, empty where the engine did not say.
    """

    ROW_FIELDS: ClassVar[tuple[str, ...]] = ("rows", "valid", "versions")

    sample_id: int
    layout: RecordLayout
    rows: np.ndarray
    valid: np.ndarray
    versions: np.ndarray
    contract_fingerprint: str
    static_amax: Mapping[int, Mapping[tuple[int, str], float]] = field(default_factory=dict)
    tokens_digest: str = ""

    def __post_init__(self) -> None:
        n = len(self.valid)
        if self.rows.shape != (n, self.layout.row_bytes) or self.rows.dtype != np.uint8:
            raise GuidanceError(
                f"guidance of sample {self.sample_id}: rows are {self.rows.dtype}{list(self.rows.shape)}, "
                f"must be uint8[{n}, {self.layout.row_bytes}]"
            )
        if self.versions.shape != (n,):
            raise GuidanceError(f"guidance of sample {self.sample_id}: {len(self.versions)} versions for {n} rows")

    def __len__(self) -> int:
        return len(self.valid)


@dataclass(frozen=True)
class RouteSegment:
    """Routed experts of one sample.

    ``experts`` uint8 or uint16 [n, num_layers, top_k]; ``valid`` bool [n]; ``versions`` int32 [n].
    """

    ROW_FIELDS: ClassVar[tuple[str, ...]] = ("experts", "valid", "versions")

    sample_id: int
    experts: np.ndarray
    valid: np.ndarray
    versions: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.valid)
        if self.experts.ndim != 3 or len(self.experts) != n or len(self.versions) != n:
            raise GuidanceError(
                f"routes of sample {self.sample_id}: experts {list(self.experts.shape)}, {n} valid flags, "
                f"{len(self.versions)} versions; lengths must agree"
            )

    def __len__(self) -> int:
        return len(self.valid)


def narrowed(segment: GuidanceSegment, layout: RecordLayout) -> GuidanceSegment:
    """The record that would have been kept under ``layout``: fewer layers or sites, 1 bit or syndromes where 4 were recorded.

    Raises GuidanceError where ``layout`` asks for something ``segment`` does not hold. Widths and scales are carried unchanged.
    """
    rows = np.zeros((len(segment), layout.row_bytes), dtype=np.uint8)
    for column in layout:
        source = segment.layout.column(column.layer, column.site)
        if source is not None and layout.bits == "syndrome":
            rows[:, column.start : column.stop] = _syndromes(segment, source, column)
            continue
        if source is None or source.width != column.width or column.raw_bytes:
            raise GuidanceError(f"segment of sample {segment.sample_id} has no record of {column.site} in layer {column.layer}")
        codes = segment.rows[:, source.start : source.start + source.code_bytes]
        codes_end = column.start + column.code_bytes
        rows[:, column.start : codes_end] = _codes_at(codes, source, column, segment.sample_id)
        tail = source.start + source.code_bytes
        rows[:, codes_end : column.stop] = segment.rows[:, tail : tail + source.scale_bytes + source.amax_bytes]
    return GuidanceSegment(
        sample_id=segment.sample_id,
        layout=layout,
        rows=rows,
        valid=segment.valid,
        versions=segment.versions,
        contract_fingerprint=segment.contract_fingerprint,
        static_amax=segment.static_amax,
        tokens_digest=segment.tokens_digest,
    )


def _syndromes(segment: GuidanceSegment, source: Column, column: Column) -> np.ndarray:
    """Syndrome bytes of ``column`` from whole codes."""
    import torch

    from megatron_trace.guidance import syndrome

    if segment.layout.bits != 4 or column.raw_bytes or source.width != column.width:
        raise GuidanceError(f"segment of sample {segment.sample_id}: syndromes are made from whole codes (bits=4) only")
    at = {name: torch.from_numpy(segment.rows[:, start:stop].copy()) for name, start, stop in source.parts}
    amax = at["amax"].view(torch.float32) if source.amax_bytes else torch.ones(())
    return syndrome.recode(at["codes"], at["scale"], amax, column).numpy()


def _codes_at(codes: np.ndarray, source: Column, target: Column, sample_id: int) -> np.ndarray:
    """Packed codes of ``source`` at the bits of ``target``: the same, or bit 0 (mantissa) of each nibble, low nibble first."""
    if source.code_bytes == target.code_bytes:
        return codes
    if source.code_bytes != 4 * target.code_bytes:
        raise GuidanceError(f"segment of sample {sample_id} cannot be recorded at more bits than it has")
    bits = np.stack((codes & 1, (codes >> 4) & 1), axis=-1).reshape(len(codes), source.width)
    return np.packbits(bits, axis=-1, bitorder="little")
