"""Segments of the samples in flight, and their gathering into the frame of one micro-batch.

Every row is found by (sample, position, layer, weight version). A row that is missing, of another contract or of another
forward than the one that sampled the next token is never used: it raises, or is marked invalid and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import GuidanceError, GuidanceSegment, RouteSegment
from megatron_trace.guidance.spec import RecordLayout

S = TypeVar("S", GuidanceSegment, RouteSegment)


@dataclass(frozen=True)
class RowRequest:
    """What one sequence of a micro-batch needs: its first ``length`` positions, and the version each position must carry.

    ``versions`` int32 [length]: the weight version that sampled the token after the position, -1 where any version will do
    (prompt positions but the last carry their own).
    """

    sample_id: int
    length: int
    versions: np.ndarray


class GuidanceStore:
    """Holds the segments of one rollout by sample id."""

    def __init__(self, *, contract_fingerprint: str) -> None:
        self._fingerprint = contract_fingerprint
        self._guidance: dict[int, GuidanceSegment] = {}
        self._routes: dict[int, RouteSegment] = {}

    def put(self, guidance: GuidanceSegment | None, routes: RouteSegment | None) -> None:
        """Take ownership of one sample's segments; a second segment for the same sample is an error."""
        if guidance is not None:
            if guidance.contract_fingerprint != self._fingerprint:
                raise GuidanceError(
                    f"guidance of sample {guidance.sample_id} was recorded under contract "
                    f"{guidance.contract_fingerprint[:12]}, this trainer runs {self._fingerprint[:12]}: "
                    "start both sides from one config"
                )
            if guidance.sample_id in self._guidance:
                raise GuidanceError(f"guidance of sample {guidance.sample_id} was stored twice")
            self._guidance[guidance.sample_id] = guidance
        if routes is not None:
            if routes.sample_id in self._routes:
                raise GuidanceError(f"routes of sample {routes.sample_id} were stored twice")
            self._routes[routes.sample_id] = routes

    def clear(self) -> None:
        self._guidance.clear()
        self._routes.clear()

    def frame(
        self, requests: Sequence[RowRequest], *, seq_len: int, rounding: Rounding, measure_flips: bool = False
    ) -> GuidanceFrame:
        """The frame of a micro-batch of B sequences padded to ``seq_len`` S; token order s * B + b.

        Raises GuidanceError for a sample without a segment (when segments are held at all), mixed layouts, or too few rows.
        """
        is_token = np.zeros((seq_len, len(requests)), dtype=bool)
        for b, request in enumerate(requests):
            is_token[: request.length, b] = True
        guidance = self._gather_guidance(requests, seq_len) if rounding.uses_record and self._guidance else {}
        routes = self._gather_routes(requests, seq_len) if self._routes else {}
        return GuidanceFrame(
            rounding=rounding,
            is_token=torch.from_numpy(is_token.reshape(-1)),
            measure_flips=measure_flips,
            **guidance,
            **routes,
        )

    def _gather_guidance(self, requests: Sequence[RowRequest], seq_len: int) -> dict[str, object]:
        segments = [self._segment(self._guidance, r, "guidance") for r in requests]
        layout = segments[0].layout
        if any(s.layout != layout for s in segments):
            raise GuidanceError("guidance of one micro-batch has more than one record layout")
        shape = (seq_len, len(requests))
        rows = np.zeros((*shape, layout.row_bytes), dtype=np.uint8)
        valid = np.zeros(shape, dtype=bool)
        versions = np.full(shape, -1, dtype=np.int64)
        for b, (request, segment) in enumerate(zip(requests, segments, strict=True)):
            n = request.length
            rows[:n, b] = segment.rows[:n]
            valid[:n, b] = segment.valid[:n] & _same_forward(segment.versions[:n], request.versions)
            versions[:n, b] = segment.versions[:n]
        return {
            "layout": layout,
            "rows": torch.from_numpy(rows.reshape(-1, layout.row_bytes)),
            "valid": torch.from_numpy(valid.reshape(-1)),
            "static_amax": _static_amax(layout, segments, versions),
        }

    def _gather_routes(self, requests: Sequence[RowRequest], seq_len: int) -> dict[str, object]:
        segments = [self._segment(self._routes, r, "routes") for r in requests]
        layers, k = segments[0].experts.shape[1:]
        routes = np.zeros((seq_len, len(requests), layers, k), dtype=np.int64)
        valid = np.zeros((seq_len, len(requests)), dtype=bool)
        for b, (request, segment) in enumerate(zip(requests, segments, strict=True)):
            n = request.length
            routes[:n, b] = segment.experts[:n]
            valid[:n, b] = segment.valid[:n] & _same_forward(segment.versions[:n], request.versions)
        flat = routes.reshape(-1, layers, k)
        _refuse_repeats(flat[valid.reshape(-1)])
        return {"routes": torch.from_numpy(flat), "routes_valid": torch.from_numpy(valid.reshape(-1))}

    @staticmethod
    def _segment(held: dict[int, S], request: RowRequest, what: str) -> S:
        segment = held.get(request.sample_id)
        if segment is None:
            raise GuidanceError(f"no {what} for sample {request.sample_id}; {len(held)} other samples are held")
        if len(segment) < request.length:
            raise GuidanceError(
                f"{what} of sample {request.sample_id} covers {len(segment)} positions, the trainer needs {request.length}"
            )
        return segment


def _same_forward(recorded: np.ndarray, required: np.ndarray) -> np.ndarray:
    return (required < 0) | (recorded == required)


def _refuse_repeats(routes: np.ndarray) -> None:
    """A token routed twice to one expert makes the dispatcher count fewer tokens than it sends."""
    ordered = np.sort(routes, axis=-1)
    if ordered.shape[-1] > 1 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise GuidanceError("a replayed route names the same expert twice for one token")


def _static_amax(
    layout: RecordLayout, segments: Sequence[GuidanceSegment], versions: np.ndarray
) -> dict[tuple[int, str], torch.Tensor]:
    """FP32 amax per token for each statically scaled column, by the version each row was recorded under."""
    table: dict[int, dict[tuple[int, str], float]] = {}
    for segment in segments:
        for version, amax in segment.static_amax.items():
            known = table.setdefault(version, dict(amax))
            if known != dict(amax):
                raise GuidanceError(f"weight version {version} has two sets of static amax (sample {segment.sample_id})")
    present, inverse = np.unique(versions, return_inverse=True)
    inverse = inverse.reshape(-1)
    out: dict[tuple[int, str], torch.Tensor] = {}
    for column in layout:
        if column.amax_bytes:
            continue
        key = (column.layer, column.site)
        per_version = np.array([_amax_of(table, int(v), key) for v in present], dtype=np.float32)
        out[key] = torch.from_numpy(per_version[inverse])
    return out


def _amax_of(table: dict[int, dict[tuple[int, str], float]], version: int, key: tuple[int, str]) -> float:
    if version < 0:
        return 1.0  # padding: never read, its rows are invalid
    try:
        return table[version][key]
    except KeyError:
        raise GuidanceError(f"no static amax for {key[1]} of layer {key[0]} at weight version {version}") from None
