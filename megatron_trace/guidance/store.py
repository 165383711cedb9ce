"""Segments of the samples in flight, within a byte budget, and their gathering into the frame of one micro-batch.

Every row is found by (sample, position, layer, weight version). A row that is missing, of another contract or of another
forward than the one that sampled the next token is never used: it raises, or is marked invalid and counted. Bits stay packed.

A sample's records go from memory to a mapped file when memory is full, and when that is full too the oldest are dropped: their
rows become invalid, are rounded to nearest and counted. ``pressure`` tells the rollout side before that happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megatron_trace.guidance.errors import DuplicateRowError, FingerprintError, TokenMismatchError
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import GuidanceError, GuidanceSegment, RouteSegment
from megatron_trace.guidance.sharding import sub_layout
from megatron_trace.guidance.spec import RecordLayout
from megatron_trace.guidance.wire import Record, map_record, write_record

GIB = 1 << 30


@dataclass(frozen=True)
class StoreBudget:
    """Bytes of records that are held at most. ``directory`` (on a local disk) is needed where ``disk_bytes`` is not 0."""

    memory_bytes: int = 8 * GIB
    disk_bytes: int = 0
    directory: Path | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or self.disk_bytes < 0:
            raise ValueError(f"store budget of {self.memory_bytes} and {self.disk_bytes} bytes: must not be negative")
        if self.disk_bytes and self.directory is None:
            raise ValueError(f"store budget: disk_bytes={self.disk_bytes} needs a directory to write to")


@dataclass(frozen=True)
class StoreReport:
    """What the budget has done so far: samples written to disk, samples and rows dropped; bytes held now."""

    memory_bytes: int
    disk_bytes: int
    spilled_samples: int
    dropped_samples: int
    dropped_rows: int


@dataclass(frozen=True)
class RowRequest:
    """What one sequence of a micro-batch needs: its first ``length`` positions, and the version each position must carry.

    ``versions`` int32 [length]: the weight version that sampled the token after the position, -1 where any version will do
    (prompt positions but the last carry their own). ``tokens_digest`` (``segments.tokens_digest`` of those positions' tokens),
    where given, must be the engine's own.
    """

    sample_id: int
    length: int
    versions: np.ndarray
    tokens_digest: str = ""


@dataclass
class _Held:
    """The records of one sample, wherever they are. Dropped: only shapes are left, and every row is invalid."""

    guidance: GuidanceSegment | Record | None = None
    routes: RouteSegment | None = None
    record: Record | None = None
    """Where both lie in one mapped file."""
    path: Path | None = None
    dropped: bool = False
    memory_bytes: int = 0
    disk_bytes: int = 0

    def has(self, what: str) -> bool:
        """Whether there is "guidance", or there are "routes"."""
        if what == "guidance":
            return self.guidance is not None
        return self.routes is not None or (self.record is not None and self.record.has_routes)

    def rows(self, what: str) -> int:
        """Positions covered."""
        source = self.guidance if what == "guidance" else self.routes if self.routes is not None else self.record
        return source.rows if isinstance(source, Record) else len(source) if source is not None else 0


class GuidanceStore:
    """Holds the records of one rollout by sample id, never more than ``budget`` bytes of them."""

    def __init__(self, *, contract_fingerprint: str, budget: StoreBudget | None = None) -> None:
        self._fingerprint = contract_fingerprint
        self.budget = budget or StoreBudget()
        self._held: dict[int, _Held] = {}  # oldest first
        self._memory = self._disk = 0
        self._spilled = self._dropped = self._dropped_rows = 0

    def put(self, guidance: GuidanceSegment | None, routes: RouteSegment | None) -> None:
        """Take ownership of one sample's segments; a second segment for the same sample is an error."""
        if guidance is not None:
            if guidance.contract_fingerprint != self._fingerprint:
                raise FingerprintError(
                    f"guidance of sample {guidance.sample_id} was recorded under contract "
                    f"{guidance.contract_fingerprint[:12]}, this trainer runs {self._fingerprint[:12]}: "
                    "start both sides from one config"
                )
            held = self._held.setdefault(guidance.sample_id, _Held())
            if held.guidance is not None:
                raise DuplicateRowError(f"guidance of sample {guidance.sample_id} was stored twice")
            held.guidance = guidance
            self._charge(held, memory=guidance.rows.nbytes + guidance.valid.nbytes + guidance.versions.nbytes)
        if routes is not None:
            held = self._held.setdefault(routes.sample_id, _Held())
            if held.routes is not None or (held.record is not None and held.record.has_routes):
                raise DuplicateRowError(f"routes of sample {routes.sample_id} were stored twice")
            held.routes = routes
            self._charge(held, memory=routes.experts.nbytes + routes.valid.nbytes + routes.versions.nbytes)
        self._make_room()

    def put_record(self, record: Record) -> None:
        """Take a record as it came over the wire; its planes are checked when they are read. Duplicates are an error."""
        if record.contract_fingerprint != self._fingerprint:
            raise FingerprintError(f"record of sample {record.sample_id} is of another contract than this trainer's")
        if record.sample_id in self._held:
            raise DuplicateRowError(f"guidance of sample {record.sample_id} was stored twice")
        held = _Held(guidance=record, record=record)
        self._held[record.sample_id] = held
        self._charge(held, memory=record.nbytes)
        self._make_room()

    def discard(self, sample_ids: Iterable[int]) -> None:
        """Forget samples that are trained on; unknown ids are an error (KeyError)."""
        for sample_id in sample_ids:
            self._release(self._held.pop(sample_id))

    def clear(self) -> None:
        self.discard(list(self._held))

    @property
    def pressure(self) -> float:
        """Share of the whole budget in use, 0 to 1. An engine should admit no new request above its high-water mark."""
        whole = self.budget.memory_bytes + self.budget.disk_bytes
        return (self._memory + self._disk) / whole if whole else 1.0

    def accepts(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more fit without dropping anything: the rollout side waits while they do not."""
        whole = self.budget.memory_bytes + self.budget.disk_bytes
        return self._memory + self._disk + nbytes <= whole

    def report(self) -> StoreReport:
        """Counters of the budget."""
        return StoreReport(
            memory_bytes=self._memory,
            disk_bytes=self._disk,
            spilled_samples=self._spilled,
            dropped_samples=self._dropped,
            dropped_rows=self._dropped_rows,
        )

    def frame(
        self,
        requests: Sequence[RowRequest],
        *,
        seq_len: int,
        rounding: Rounding,
        measure_flips: bool = False,
        layers: Sequence[int] | None = None,
        positions: np.ndarray | None = None,
    ) -> GuidanceFrame:
        """The frame of a micro-batch of B sequences padded to ``seq_len`` S; token order s * B + b.

        ``layers``: the global layers of this pipeline stage (None: all); records of others are not read. ``positions`` int [S]:
        which position each s is (a context- or sequence-parallel rank's order); None: 0 to S - 1. Raises GuidanceError for a
        sample without records (when any are held at all), mixed layouts, too few rows, or other tokens.
        """
        at_S = np.arange(seq_len) if positions is None else np.asarray(positions)
        if len(at_S) != seq_len:
            raise ValueError(f"{len(at_S)} positions for seq_len={seq_len}")
        gather = _Gather(at_S, requests)
        with_guidance = any(h.has("guidance") for h in self._held.values())
        with_routes = any(h.has("routes") for h in self._held.values())
        guidance = self._gather_guidance(gather, layers) if rounding.uses_record and with_guidance else {}
        routes = self._gather_routes(gather, layers) if with_routes else {}
        return GuidanceFrame(
            rounding=rounding,
            is_token=torch.from_numpy(gather.is_token_SB.reshape(-1)),
            measure_flips=measure_flips,
            **guidance,
            **routes,
        )

    def _gather_guidance(self, gather: _Gather, layers: Sequence[int] | None) -> dict[str, object]:
        held = [self._find(r, "guidance") for r in gather.requests]
        sources = [h.guidance for h in held]
        whole = sources[0].layout
        if any(s.layout != whole for s in sources):
            raise GuidanceError("guidance of one micro-batch has more than one record layout")
        layout = whole if layers is None else sub_layout(whole, layers)
        rows = gather.new(layout.row_bytes, dtype=np.uint8)
        valid, versions = gather.new(dtype=bool), gather.new(dtype=np.int64, fill=-1)
        for b, (request, source) in enumerate(zip(gather.requests, sources, strict=True)):
            if held[b].dropped:
                gather.clear(rows, b)
                continue
            if request.tokens_digest and source.tokens_digest and len(source.versions) == request.length:
                _same_tokens(request, source.tokens_digest)
            take = gather.take(b)
            if isinstance(source, GuidanceSegment) and layout is whole:
                gather.copy(rows, b, source.rows)
            else:
                for layer in layout.layers:
                    gather.copy(rows[..., slice(*layout.span(layer))], b, _layer_rows(source, layer))
            own = source.versions
            same = _same_forward(own[: request.length], request.versions)
            gather.put(valid, b, (source.valid[: request.length] & same)[take])
            gather.put(versions, b, own[take])
        return {
            "layout": layout,
            "rows": torch.from_numpy(rows.reshape(gather.is_token_SB.size, layout.row_bytes)),
            "valid": torch.from_numpy(valid.reshape(-1)),
            "static_amax": _static_amax(layout, [s for s, h in zip(sources, held, strict=True) if not h.dropped], versions),
        }

    def _gather_routes(self, gather: _Gather, layers: Sequence[int] | None) -> dict[str, object]:
        held = [self._find(r, "routes") for r in gather.requests]
        segments = [_route_layers(h, layers) for h in held]
        first = segments[0].experts
        routes = gather.new(*first.shape[1:], dtype=first.dtype)
        valid = gather.new(dtype=bool)
        for b, (request, segment) in enumerate(zip(gather.requests, segments, strict=True)):
            if held[b].dropped:
                gather.clear(routes, b)
                continue
            gather.copy(routes, b, segment.experts)
            same = _same_forward(segment.versions[: request.length], request.versions)
            gather.put(valid, b, (segment.valid[: request.length] & same)[gather.take(b)])
        flat = routes.reshape(-1, *routes.shape[2:])
        _refuse_repeats(flat[valid.reshape(-1)])
        return {
            "routes": torch.from_numpy(flat),
            "routes_valid": torch.from_numpy(valid.reshape(-1)),
            "route_layers": None if layers is None else tuple(layers),
        }

    def _find(self, request: RowRequest, what: str) -> _Held:
        held = self._held.get(request.sample_id)
        if held is None or not held.has(what):
            others = sum(h.has(what) for h in self._held.values())
            raise GuidanceError(f"no {what} for sample {request.sample_id}; {others} other samples are held")
        if held.rows(what) < request.length:
            raise GuidanceError(
                f"{what} of sample {request.sample_id} covers {held.rows(what)} positions, the trainer needs {request.length}"
            )
        return held

    def _charge(self, held: _Held, *, memory: int = 0, disk: int = 0) -> None:
        held.memory_bytes += memory
        held.disk_bytes += disk
        self._memory += memory
        self._disk += disk

    def _release(self, held: _Held) -> None:
        self._charge(held, memory=-held.memory_bytes, disk=-held.disk_bytes)
        if held.path is not None:
            held.path.unlink(missing_ok=True)
            held.path = None

    def _make_room(self) -> None:
        """Write the oldest in memory to disk until memory fits; drop the oldest of all where disk does not have the room."""
        for sample_id, held in list(self._held.items()):
            if self._memory <= self.budget.memory_bytes:
                return
            if not held.memory_bytes:
                continue
            if self._spill(sample_id, held):
                continue
            self._drop(held)

    def _spill(self, sample_id: int, held: _Held) -> bool:
        if self.budget.directory is None or held.guidance is None:
            return False
        size = held.memory_bytes
        for other in self._held.values():
            if self._disk + size <= self.budget.disk_bytes:
                break
            if other.disk_bytes:
                self._drop(other)
        path = self.budget.directory / f"{sample_id}.mtguide"
        written = self._write(path, held)
        if self._disk + written > self.budget.disk_bytes:
            path.unlink()
            return False
        record = map_record(path, contract_fingerprint=self._fingerprint)
        self._charge(held, memory=-held.memory_bytes, disk=written)
        held.guidance, held.routes, held.record, held.path = record, None, record, path
        self._spilled += 1
        return True

    def _write(self, path: Path, held: _Held) -> int:
        assert held.guidance is not None
        if isinstance(held.guidance, Record):
            path.write_bytes(held.guidance.data)
            return held.guidance.nbytes
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_record(path, held.guidance, held.routes)

    def _drop(self, held: _Held) -> None:
        """Keep shapes only: the sample is then trained without guidance, and counted."""
        guidance = held.guidance
        rows = max(held.rows("guidance"), held.rows("routes"))
        routes = _route_layers(held, None) if held.has("routes") else None
        self._release(held)
        held.dropped, held.record = True, None
        if guidance is not None:
            held.guidance = _blank(guidance, rows, self._fingerprint)
        if routes is not None:
            blank = np.broadcast_to(np.zeros((), routes.experts.dtype), (rows, *routes.experts.shape[1:]))
            held.routes = replace(routes, experts=blank, valid=np.zeros(rows, dtype=bool), versions=np.full(rows, -1, np.int32))
        self._dropped += 1
        self._dropped_rows += rows


class _Gather:
    """Copies rows of sequences into arrays [S, B, ...]; position ``at_S[s]`` of sequence b goes to [s, b]."""

    def __init__(self, at_S: np.ndarray, requests: Sequence[RowRequest]) -> None:
        self.requests = requests
        self._at_S = at_S
        self._in_order = bool((at_S == np.arange(len(at_S))).all())
        lengths = np.array([r.length for r in requests])
        self.is_token_SB = at_S[:, None] < lengths

    def new(self, *tail: int, dtype: type | np.dtype, fill: int = 0) -> np.ndarray:
        shape = (*self.is_token_SB.shape, *tail)
        # Wide arrays are left unwritten: ``copy`` and ``clear`` write every row once.
        return np.empty(shape, dtype=dtype) if tail else np.full(shape, fill, dtype=dtype)

    def take(self, b: int) -> slice | np.ndarray:
        """Which of a sequence's rows are wanted, in order."""
        return slice(0, self._count(b)) if self._in_order else self._at_S[self.is_token_SB[:, b]]

    def copy(self, out: np.ndarray, b: int, rows: np.ndarray) -> None:
        """Rows of sequence ``b`` to their places, zeros to padding."""
        if self._in_order:
            count = self._count(b)
            out[:count, b], out[count:, b] = rows[:count], 0
        else:
            there = self.is_token_SB[:, b]
            out[there, b], out[~there, b] = rows[self._at_S[there]], 0

    def put(self, out: np.ndarray, b: int, values: np.ndarray) -> None:
        """One value per wanted row, padding left as it is."""
        out[self.is_token_SB[:, b], b] = values

    def clear(self, out: np.ndarray, b: int) -> None:
        out[:, b] = 0

    def _count(self, b: int) -> int:
        return min(self.requests[b].length, len(self._at_S))


def _layer_rows(source: GuidanceSegment | Record, layer: int) -> np.ndarray:
    if isinstance(source, Record):
        return source.plane(f"layer.{layer}")
    return source.rows[:, slice(*source.layout.span(layer))]


def _route_layers(held: _Held, layers: Sequence[int] | None) -> RouteSegment:
    """Routes of global ``layers`` in that order (None: all), without reading others from a file."""
    if held.routes is None:
        assert held.record is not None
        segment = held.record.routes(layers)
        assert segment is not None
        return segment
    return held.routes if layers is None else replace(held.routes, experts=held.routes.experts[:, list(layers)])


def _blank(source: GuidanceSegment | Record, rows: int, fingerprint: str) -> GuidanceSegment:
    return GuidanceSegment(
        sample_id=source.sample_id,
        layout=source.layout,
        rows=np.broadcast_to(np.zeros((), np.uint8), (rows, source.layout.row_bytes)),
        valid=np.zeros(rows, dtype=bool),
        versions=np.full(rows, -1, dtype=np.int32),
        contract_fingerprint=fingerprint,
    )


def _same_tokens(request: RowRequest, recorded: str) -> None:
    if recorded != request.tokens_digest:
        raise TokenMismatchError(
            f"guidance of sample {request.sample_id} was recorded for other token ids than the trainer holds: "
            "pass the engine's tokens on, never tokenise its text again"
        )


def _same_forward(recorded: np.ndarray, required: np.ndarray) -> np.ndarray:
    return (required < 0) | (recorded == required)


def _refuse_repeats(routes: np.ndarray) -> None:
    """A token routed twice to one expert makes the dispatcher count fewer tokens than it sends."""
    ordered = np.sort(routes, axis=-1)
    if ordered.shape[-1] > 1 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise GuidanceError("a replayed route names the same expert twice for one token")


def _static_amax(
    layout: RecordLayout, sources: Sequence[GuidanceSegment | Record], versions: np.ndarray
) -> dict[tuple[int, str], torch.Tensor]:
    """FP32 amax per token for each statically scaled column, by the version each row was recorded under."""
    table: dict[int, dict[tuple[int, str], float]] = {}
    for source in sources:
        for version, amax in source.static_amax.items():
            known = table.setdefault(version, dict(amax))
            if known != dict(amax):
                raise GuidanceError(f"weight version {version} has two sets of static amax (sample {source.sample_id})")
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
        return 1.0  # padding and rows that were never recorded: not read, they are invalid
    try:
        return table[version][key]
    except KeyError:
        raise GuidanceError(f"no static amax for {key[1]} of layer {key[0]} at weight version {version}") from None
