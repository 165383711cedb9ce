"""Records as bytes: for the wire, for shared memory and for disk. docs/guidance.md has the format byte by byte.

A record holds the guidance and routes of one sample, or of one shard of it: a fixed header, a JSON manifest, and one contiguous
plane per recorded layer, so that a pipeline stage maps a file and touches only its own layers. Every byte is covered: the
manifest by a checksum in the header, each plane by one in the manifest, gaps by being zero. ``open_record`` copies nothing.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_trace.guidance.checksum import checksum
from megatron_trace.guidance.errors import (
    CorruptRecordError,
    DuplicateRowError,
    FingerprintError,
    GuidanceError,
    LayerError,
    RecordVersionError,
    ShardError,
    TruncatedRecordError,
    ZeroRowError,
)
from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment
from megatron_trace.guidance.sharding import sub_layout
from megatron_trace.guidance.spec import ALL_SITES, SYNDROME_BITS, Column, RecordLayout

MAGIC = b"MTGUIDE\0"
FORMAT = 1
ALIGN = 64
_HEADER = struct.Struct("<8sIIQ16s24x")  # magic, format, manifest bytes, total bytes, manifest checksum, reserved zeros
assert _HEADER.size == ALIGN


@dataclass(frozen=True)
class Shard:
    """Which part of a sample a record holds: ``index`` of ``count``, in the order the ranks were cut."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Plane:
    """One array of the record: ``offset`` and ``nbytes`` from the start of the record, its checksum, dtype and shape."""

    offset: int
    nbytes: int
    checksum: str
    dtype: str
    shape: tuple[int, ...]


def encode(guidance: GuidanceSegment, routes: RouteSegment | None = None, *, shard: Shard | None = None) -> bytearray:
    """``guidance``, and ``routes`` of the same rows, as one record. GuidanceError where the two do not belong together."""
    arrays: dict[str, np.ndarray] = {"valid": guidance.valid.view(np.uint8), "versions": guidance.versions.astype("<i4")}
    for layer in guidance.layout.layers:
        arrays[f"layer.{layer}"] = guidance.rows[:, slice(*guidance.layout.span(layer))]
    if routes is not None:
        if routes.sample_id != guidance.sample_id or len(routes) != len(guidance):
            raise GuidanceError(
                f"guidance of sample {guidance.sample_id} ({len(guidance)} rows) and routes of sample {routes.sample_id} "
                f"({len(routes)} rows) do not belong together"
            )
        arrays |= {"routes.valid": routes.valid.view(np.uint8), "routes.versions": routes.versions.astype("<i4")}
        for layer in range(routes.experts.shape[1]):
            arrays[f"routes.{layer}"] = routes.experts[:, layer]
    planes, body = _lay_out(arrays)
    manifest = {
        "sample_id": guidance.sample_id,
        "rows": len(guidance),
        "contract": guidance.contract_fingerprint,
        "tokens": guidance.tokens_digest,
        "bits": guidance.layout.bits,
        "columns": [asdict(c) for c in guidance.layout],
        "static_amax": [
            [version, layer, site, float(amax)]
            for version, table in sorted(guidance.static_amax.items())
            for (layer, site), amax in sorted(table.items())
        ],
        "shard": asdict(shard or Shard()),
        "planes": {name: asdict(plane) for name, plane in planes.items()},
    }
    return _assemble(manifest, body)


def _lay_out(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Plane], bytearray]:
    """Planes at aligned offsets from the start of the body, and the body."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // ALIGN) * ALIGN
    body, planes = bytearray(end), {}
    for name, array in arrays.items():
        target = np.frombuffer(body, dtype=np.uint8, count=array.nbytes, offset=offsets[name])
        target.view(array.dtype).reshape(array.shape)[...] = array
        planes[name] = Plane(offsets[name], array.nbytes, checksum(target), array.dtype.str, array.shape)
    return planes, body


def _assemble(manifest: Mapping[str, Any], body: bytes | bytearray) -> bytearray:
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
    start = ALIGN + -(-len(text) // ALIGN) * ALIGN
    record = bytearray(start + len(body))
    digest = checksum(np.frombuffer(text, dtype=np.uint8)).encode()
    record[:ALIGN] = _HEADER.pack(MAGIC, FORMAT, len(text), len(record), digest)
    record[ALIGN : ALIGN + len(text)] = text
    record[start:] = body
    return record


@dataclass(frozen=True)
class Record:
    """A record in memory or mapped from a file. Planes are checked when they are first asked for, each once.

    ``data`` uint8 [total bytes]; the manifest is already checked.
    """

    data: np.ndarray
    sample_id: int
    rows: int
    contract_fingerprint: str
    tokens_digest: str
    layout: RecordLayout
    static_amax: Mapping[int, Mapping[tuple[int, str], float]]
    shard: Shard
    planes: Mapping[str, Plane]
    verified: set[str]

    def plane(self, name: str) -> np.ndarray:
        """View of one plane in its dtype and shape; CorruptRecordError when its bytes are not those written."""
        plane = self.planes.get(name)
        if plane is None:
            held = ", ".join(map(str, self.layout.layers))
            raise LayerError(f"record of sample {self.sample_id} has no plane {name}; recorded layers: {held}")
        flat = self.data[plane.offset : plane.offset + plane.nbytes]
        if name not in self.verified:
            end = plane.offset + plane.nbytes
            padding = self.data[end : -(-end // ALIGN) * ALIGN]
            if checksum(flat) != plane.checksum or padding.any():
                raise CorruptRecordError(f"record of sample {self.sample_id}: plane {name} differs from what was written")
            self.verified.add(name)
        return flat.view(plane.dtype).reshape(plane.shape)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def has_routes(self) -> bool:
        return "routes.valid" in self.planes

    @property
    def valid(self) -> np.ndarray:
        """bool [rows]."""
        return self.plane("valid").view(bool)

    @property
    def versions(self) -> np.ndarray:
        """int32 [rows]."""
        return self.plane("versions")

    def verify(self) -> None:
        """Check every plane, and that no valid row is all zeros (ZeroRowError): a shard that nobody captured."""
        for name in self.planes:
            self.plane(name)
        filled = np.zeros(self.rows, dtype=bool)
        for layer in self.layout.layers:
            filled |= self.plane(f"layer.{layer}").any(axis=1)
        if self.layout.columns and (self.valid & ~filled).any():
            raise ZeroRowError(
                f"record of sample {self.sample_id}: row {int(np.argmax(self.valid & ~filled))} is valid and holds only zeros"
            )

    def segment(self, layers: Collection[int] | None = None) -> GuidanceSegment:
        """The guidance of ``layers`` (None: all recorded), rows copied together; layers without record are no error."""
        layout = self.layout if layers is None else sub_layout(self.layout, layers)
        rows = np.empty((self.rows, layout.row_bytes), dtype=np.uint8)
        for layer in layout.layers:
            rows[:, slice(*layout.span(layer))] = self.plane(f"layer.{layer}")
        kept = {(c.layer, c.site) for c in layout}
        return GuidanceSegment(
            sample_id=self.sample_id,
            layout=layout,
            rows=rows,
            valid=self.valid,
            versions=self.versions,
            contract_fingerprint=self.contract_fingerprint,
            static_amax={v: {key: a for key, a in table.items() if key in kept} for v, table in self.static_amax.items()},
            tokens_digest=self.tokens_digest,
        )

    def routes(self, layers: Sequence[int] | None = None) -> RouteSegment | None:
        """The routes of global ``layers`` in that order (None: all); None where the record holds no routes."""
        if not self.has_routes:
            return None
        count = sum(name.startswith("routes.") for name in self.planes) - 2
        planes = [self.plane(f"routes.{layer}") for layer in (range(count) if layers is None else layers)]
        return RouteSegment(
            sample_id=self.sample_id,
            experts=np.stack(planes, axis=1),
            valid=self.plane("routes.valid").view(bool),
            versions=self.plane("routes.versions"),
        )


def write_record(
    path: Path, guidance: GuidanceSegment, routes: RouteSegment | None = None, *, shard: Shard | None = None
) -> int:
    """Write a record; the file appears whole or not at all. Returns its bytes."""
    record = encode(guidance, routes, shard=shard)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(record)
    partial.replace(path)
    return len(record)


def map_record(path: Path, *, contract_fingerprint: str) -> Record:
    """Open a file by mapping it: only the planes that are asked for are ever read."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise TruncatedRecordError(f"{path.name} is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return open_record(np.frombuffer(mapped, dtype=np.uint8), contract_fingerprint=contract_fingerprint)


def open_record(data: bytes | bytearray | memoryview | np.ndarray, *, contract_fingerprint: str) -> Record:
    """The record in ``data``, which stays where it is. Raises a GuidanceError that names what is wrong."""
    flat = np.frombuffer(data, dtype=np.uint8)
    text, start = _manifest_text(flat)
    try:
        record = _parse(json.loads(text), flat, start)
    except GuidanceError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptRecordError(f"record manifest is not one of this format: {type(error).__name__}: {error}") from error
    if record.contract_fingerprint != contract_fingerprint:
        raise FingerprintError(
            f"guidance of sample {record.sample_id} was recorded under contract {record.contract_fingerprint[:12]}, "
            f"this trainer runs {contract_fingerprint[:12]}: start both sides from one config"
        )
    return record


def _manifest_text(flat: np.ndarray) -> tuple[bytes, int]:
    """The checked manifest and where the body starts."""
    if len(flat) < ALIGN:
        raise TruncatedRecordError(f"record of {len(flat)} bytes is shorter than its header of {ALIGN}")
    header = flat[:ALIGN].tobytes()
    magic, version, length, total, digest = _HEADER.unpack(header)
    if magic != MAGIC:
        raise RecordVersionError("not a guidance record")
    if version != FORMAT:
        raise RecordVersionError(f"guidance record of format {version}; this reader knows format {FORMAT}")
    if header[40:].strip(b"\0"):
        raise CorruptRecordError("reserved bytes of the record header are not zero")
    start = ALIGN + -(-length // ALIGN) * ALIGN
    if total != len(flat) or start > total:
        raise TruncatedRecordError(f"record declares {total} bytes and a manifest of {length}; {len(flat)} bytes are there")
    text = flat[ALIGN : ALIGN + length]
    if checksum(text).encode() != digest or flat[ALIGN + length : start].any():
        raise CorruptRecordError("record manifest differs from what was written")
    return text.tobytes(), start


def _parse(manifest: dict[str, Any], flat: np.ndarray, start: int) -> Record:
    expected = {"sample_id", "rows", "contract", "tokens", "bits", "columns", "static_amax", "shard", "planes"}
    if set(manifest) != expected:
        raise CorruptRecordError(f"record manifest has fields {sorted(set(manifest) ^ expected)} too many or too few")
    rows, bits = _count(manifest["rows"]), manifest["bits"]
    if isinstance(bits, bool) or bits not in (1, 4, "syndrome"):
        raise CorruptRecordError(f"record manifest has bits={bits!r}")
    layout = RecordLayout(bits=bits, columns=tuple(_column(c) for c in manifest["columns"]))
    _check_columns(layout)
    shard = Shard(index=_count(manifest["shard"]["index"]), count=_count(manifest["shard"]["count"]))
    if shard.index >= shard.count:
        raise ShardError(f"record says it is shard {shard.index} of {shard.count}")
    amax: dict[int, dict[tuple[int, str], float]] = {}
    for version, layer, site, value in manifest["static_amax"]:
        if not 0 < float(value) < float("inf") or site not in ALL_SITES:
            raise CorruptRecordError(f"record manifest has static amax {value!r} for site {site!r}")
        amax.setdefault(_count(version), {})[_count(layer), site] = float(value)
    planes = {name: _plane(name, p, start) for name, p in manifest["planes"].items()}
    _check_planes(planes, layout, rows, start=start, total=len(flat))
    return Record(
        data=flat,
        sample_id=_count(manifest["sample_id"]),
        rows=rows,
        contract_fingerprint=str(manifest["contract"]),
        tokens_digest=str(manifest["tokens"]),
        layout=layout,
        static_amax=amax,
        shard=shard,
        planes=planes,
        verified=set(),
    )


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or value >= 1 << 62:
        raise CorruptRecordError(f"record manifest has {value!r} where a count belongs")
    return value


def _column(values: Mapping[str, Any]) -> Column:
    numbers = {f.name: _count(values[f.name]) for f in fields(Column) if f.name != "site"}
    if set(values) != {f.name for f in fields(Column)} or values["site"] not in ALL_SITES:
        raise CorruptRecordError("record manifest describes a column this format does not have")
    return Column(site=values["site"], **numbers)


def _check_columns(layout: RecordLayout) -> None:
    """Columns lie one after another, layers ascending, each (layer, site) once, with the sizes its kind must have."""
    end, last = 0, (-1, -1)
    for c in layout:
        place = (c.layer, ALL_SITES.index(c.site))
        blocks = c.width // 16
        sizes = SYNDROME_BITS if layout.bits == "syndrome" else (16 * layout.bits,)
        scale = -(-blocks * 3 // 8) if layout.bits == "syndrome" else blocks
        fits = (
            c.start == end
            and place > last
            and c.width > 0
            and c.width % 16 == 0
            and c.block_bits in sizes
            and c.code_bytes == -(-blocks * c.block_bits // 8)
            and c.scale_bytes == scale
            and c.raw_bytes in (0, 2 * c.width)
            and c.first + c.width <= c.whole
        )
        if not fits:
            raise CorruptRecordError(f"record manifest: column {c.site} of layer {c.layer} is out of place or of a wrong size")
        end, last = c.stop, place


def _plane(name: str, values: Mapping[str, Any], start: int) -> Plane:
    shape = tuple(_count(n) for n in values["shape"])
    kinds = {"|u1", "<u2"} if name.startswith("routes.") and name[7:].isdigit() else {"|u1"}
    dtype = "<i4" if name.endswith("versions") else str(values["dtype"])
    if values["dtype"] != dtype or (dtype != "<i4" and dtype not in kinds):
        raise CorruptRecordError(f"record manifest: plane {name} has dtype {values['dtype']!r}")
    plane = Plane(start + _count(values["offset"]), _count(values["nbytes"]), str(values["checksum"]), dtype, shape)
    size = np.dtype(dtype).itemsize
    for n in shape:
        size *= n
    if size != plane.nbytes or plane.offset % ALIGN:
        raise CorruptRecordError(f"record manifest: plane {name} of shape {list(shape)} does not take {plane.nbytes} bytes")
    return plane


def _check_planes(planes: Mapping[str, Plane], layout: RecordLayout, rows: int, *, start: int, total: int) -> None:
    """Planes tile the body in order, and are exactly those the layout asks for, with ``rows`` rows each."""
    end = start
    for plane in sorted(planes.values(), key=lambda p: (p.offset, p.nbytes)):
        if plane.offset != end:
            raise CorruptRecordError("record manifest: planes overlap or leave a gap")
        end = -(-(plane.offset + plane.nbytes) // ALIGN) * ALIGN
    if end != total:
        raise TruncatedRecordError(f"planes end at byte {end}, the record at {total}")
    expected = {f"layer.{layer}": (rows, layout.span(layer)[1] - layout.span(layer)[0]) for layer in layout.layers}
    expected |= {"valid": (rows,), "versions": (rows,)}
    routes = {name for name in planes if name.startswith("routes.")}
    if routes:
        layers = len(routes) - 2
        if layers < 1 or routes != {"routes.valid", "routes.versions", *(f"routes.{layer}" for layer in range(layers))}:
            raise LayerError("record manifest: route planes do not run from layer 0 without gaps")
        k = planes["routes.0"].shape[1:]
        if len(k) != 1:
            raise CorruptRecordError("record manifest: route planes are not [rows, experts per token]")
        expected |= {"routes.valid": (rows,), "routes.versions": (rows,)}
        expected |= {f"routes.{layer}": (rows, *k) for layer in range(layers)}
    if set(planes) != set(expected):
        raise LayerError(f"record manifest: planes {sorted(set(planes) ^ set(expected))} are missing or not of this layout")
    for name, shape in expected.items():
        if planes[name].shape != shape:
            raise CorruptRecordError(f"record manifest: plane {name} is {list(planes[name].shape)}, must be {list(shape)}")


def require_layers(record: Record, layers: Sequence[int], *, num_route_layers: int | None = None) -> None:
    """LayerError unless ``record`` holds exactly these guided layers, and routes of this many: both sides run one spec."""
    if record.layout.layers != tuple(layers):
        raise LayerError(
            f"record of sample {record.sample_id} guides layers {list(record.layout.layers)}, "
            f"the trainer expects {list(layers)}"
        )
    held = sum(name.startswith("routes.") for name in record.planes) - 2 if record.has_routes else 0
    if num_route_layers is not None and held != num_route_layers:
        raise LayerError(f"record of sample {record.sample_id} has routes of {held} layers, the model has {num_route_layers}")


def require_shards(records: Sequence[Record]) -> None:
    """ShardError or DuplicateRowError unless ``records`` are all shards of one sample, each once, in order."""
    if not records:
        raise ShardError("no shards")
    if len({r.sample_id for r in records}) > 1:
        raise ShardError(f"shards of samples {sorted({r.sample_id for r in records})} are mixed")
    indices, counts = [r.shard.index for r in records], {r.shard.count for r in records}
    if len(counts) > 1:
        raise ShardError(f"sample {records[0].sample_id}: shards say they are of {sorted(counts)} parts")
    if len(set(indices)) < len(indices):
        raise DuplicateRowError(
            f"sample {records[0].sample_id}: shard {next(i for i in indices if indices.count(i) > 1)} came twice"
        )
    count = counts.pop()
    if len(indices) < count:
        missing = sorted(set(range(count)) - set(indices))
        raise ShardError(f"sample {records[0].sample_id}: shards {missing} of {count} are missing")
    if indices != sorted(indices):
        raise ShardError(f"sample {records[0].sample_id}: shards came in order {indices}; sort them by index before merging")
