"""Records as bytes: what goes in comes out, a stage reads only its layers, and damage has a name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.guidance import errors, wire
from megatron_trace.guidance.checksum import checksum
from megatron_trace.guidance.sharding import merge_columns, slice_heads, slice_layers
from megatron_trace.guidance.wire import Shard, encode, map_record, open_record, require_layers, require_shards, write_record
from tests.unit.guidance_wire.factory import CONTRACT, equal, layout, routes, segment


def opened(data: bytes | bytearray) -> wire.Record:
    record = open_record(data, contract_fingerprint=CONTRACT)
    record.verify()
    return record


def remade(change) -> bytearray:  # noqa: ANN001
    """A record whose manifest was changed and honestly checksummed again."""
    good = encode(segment(5), routes(5))
    text, start = wire._manifest_text(np.frombuffer(good, dtype=np.uint8))
    manifest = json.loads(text)
    change(manifest)
    return wire._assemble(manifest, bytes(good[start:]))


@pytest.mark.parametrize("bits", [1, 4, "syndrome"])
@pytest.mark.parametrize("n", [0, 1, 700])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_records_come_back_as_they_were(bits: int | str, n: int, dtype: type) -> None:
    versions = [min(p // 100, 3) for p in range(n)]
    whole = replace(segment(n, shape=layout(bits), versions=versions), tokens_digest="abc")
    way = routes(n, dtype=dtype)
    record = opened(encode(whole, way))
    assert equal(record.segment(), whole) and record.tokens_digest == "abc"
    back = record.routes()
    assert back.experts.dtype == dtype and (back.experts == way.experts).all() and back.valid.all()
    assert opened(encode(whole)).routes() is None


@given(layers=st.sets(st.integers(0, 3)))
def test_a_stage_reads_what_slicing_gives(layers: set[int]) -> None:
    whole = segment(6)
    record = open_record(encode(whole, routes(6)), contract_fingerprint=CONTRACT)
    assert equal(record.segment(layers), slice_layers(whole, layers))
    ours = sorted(layers)
    if ours:
        assert (record.routes(ours).experts == routes(6).experts[:, ours]).all()


def test_a_stage_touches_only_its_own_planes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_record(path, segment(40), routes(40))
    assert not list(tmp_path.glob("*.partial"))
    data = bytearray(path.read_bytes())
    damaged = map_record(path, contract_fingerprint=CONTRACT).planes["layer.3"]
    data[damaged.offset + 5] ^= 1
    path.write_bytes(data)
    record = map_record(path, contract_fingerprint=CONTRACT)
    record.segment((1, 2))
    assert record.verified == {"layer.1", "layer.2", "valid", "versions"}
    with pytest.raises(errors.CorruptRecordError, match="plane layer.3"):
        record.segment((3,))


def test_planes_are_views_of_the_given_bytes() -> None:
    data = np.frombuffer(encode(segment(8)), dtype=np.uint8)
    plane = open_record(data, contract_fingerprint=CONTRACT).plane("layer.2")
    assert np.shares_memory(plane, data) and plane.flags.c_contiguous
    assert all(p.offset % 64 == 0 for p in open_record(data, contract_fingerprint=CONTRACT).planes.values())


def test_every_single_bit_is_covered() -> None:
    good = encode(segment(3, shape=layout(layers=(1,))), routes(3))
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.GuidanceError):
            opened(bad)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 200, -64, -1])
def test_truncation_and_extension_are_named(length: int) -> None:
    good = encode(segment(5))
    with pytest.raises(errors.TruncatedRecordError):
        opened(good[:length])
    with pytest.raises(errors.TruncatedRecordError):
        opened(good + b"\0" * (abs(length) + 1))


def test_wrong_contract_format_and_magic_are_named(tmp_path: Path) -> None:
    good = encode(segment(5))
    with pytest.raises(errors.FingerprintError, match="contract c0ffee, this trainer runs other: start both sides from one"):
        open_record(good, contract_fingerprint="other")
    newer = bytearray(good)
    newer[8] = 2
    with pytest.raises(errors.RecordVersionError, match="format 2; this reader knows format 1"):
        opened(newer)
    with pytest.raises(errors.RecordVersionError, match="not a guidance record"):
        opened(b"PK" + good[2:])
    (tmp_path / "empty").touch()
    with pytest.raises(errors.TruncatedRecordError, match="empty is empty"):
        map_record(tmp_path / "empty", contract_fingerprint=CONTRACT)


def test_wrong_layer_count_is_named() -> None:
    record = opened(encode(segment(5), routes(5)))
    require_layers(record, (1, 2, 3), num_route_layers=4)
    with pytest.raises(errors.LayerError, match=r"guides layers \[1, 2, 3\], the trainer expects \[2, 3\]"):
        require_layers(record, (2, 3))
    with pytest.raises(errors.LayerError, match="routes of 4 layers, the model has 5"):
        require_layers(record, (1, 2, 3), num_route_layers=5)
    with pytest.raises(errors.LayerError, match="no plane layer.0; recorded layers: 1, 2, 3"):
        record.plane("layer.0")


def test_shuffled_missing_repeated_and_mixed_shards_are_named() -> None:
    whole = segment(5)
    parts = [slice_heads(whole, head_dim=32, first=i, count=2) for i in (0, 2)]
    records = [opened(encode(p, shard=Shard(i, 2))) for i, p in enumerate(parts)]
    require_shards(records)
    assert equal(merge_columns([r.segment() for r in records]), whole)
    with pytest.raises(errors.ShardError, match=r"shards came in order \[1, 0\]"):
        require_shards(records[::-1])
    with pytest.raises(errors.ShardError, match=r"shards \[1\] of 2 are missing"):
        require_shards(records[:1])
    with pytest.raises(errors.DuplicateRowError, match="shard 0 came twice"):
        require_shards([records[0], records[0]])
    other = opened(encode(replace(parts[1], sample_id=8), shard=Shard(1, 2)))
    with pytest.raises(errors.ShardError, match=r"samples \[7, 8\] are mixed"):
        require_shards([records[0], other])
    with pytest.raises(errors.ShardError, match="of 2 parts|of \\[2, 3\\] parts"):
        require_shards([records[0], opened(encode(parts[1], shard=Shard(1, 3)))])
    with pytest.raises(errors.ShardError, match="no shards"):
        require_shards([])


def test_zero_filled_rows_are_named() -> None:
    whole = segment(5)
    rows = whole.rows.copy()
    rows[3] = 0
    with pytest.raises(errors.ZeroRowError, match="row 3 is valid and holds only zeros"):
        opened(encode(replace(whole, rows=rows)))
    opened(encode(replace(whole, rows=rows, valid=np.arange(5) != 3)))


def test_guidance_and_routes_of_different_samples_are_refused() -> None:
    with pytest.raises(errors.GuidanceError, match="do not belong together"):
        encode(segment(5), routes(4))
    with pytest.raises(errors.GuidanceError, match="do not belong together"):
        encode(segment(5), routes(5, sample_id=8))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: m.pop("rows"), errors.CorruptRecordError),
        (lambda m: m.update(more=1), errors.CorruptRecordError),
        (lambda m: m.update(rows=-1), errors.CorruptRecordError),
        (lambda m: m.update(rows=True), errors.CorruptRecordError),
        (lambda m: m.update(rows=6), errors.CorruptRecordError),
        (lambda m: m.update(rows="5"), errors.CorruptRecordError),
        (lambda m: m.update(bits=2), errors.CorruptRecordError),
        (lambda m: m.update(bits=4), errors.CorruptRecordError),
        (lambda m: m.update(columns=5), errors.CorruptRecordError),
        (lambda m: m["columns"].reverse(), errors.CorruptRecordError),
        (lambda m: m["columns"].pop(), errors.CorruptRecordError),
        (lambda m: m["columns"][0].update(layer=9), errors.CorruptRecordError),
        (lambda m: m["columns"][1].update(site="q"), errors.CorruptRecordError),
        (lambda m: m["columns"][1].update(width=1e3), errors.CorruptRecordError),
        (lambda m: m["columns"][1].update(scale_bytes=7), errors.CorruptRecordError),
        (lambda m: m["columns"][1].update(spare=0), errors.CorruptRecordError),
        (lambda m: m["planes"].pop("layer.2"), errors.CorruptRecordError),
        (lambda m: m["planes"].pop("routes.0"), errors.CorruptRecordError),
        (lambda m: m["planes"].update({"layer.9": m["planes"].pop("layer.2")}), errors.LayerError),
        (lambda m: m["planes"].update({"routes.9": m["planes"].pop("routes.2")}), errors.LayerError),
        (lambda m: m["planes"]["valid"].update(offset=1 << 70), errors.CorruptRecordError),
        (lambda m: m["planes"]["valid"].update(offset=1), errors.CorruptRecordError),
        (lambda m: m["planes"]["valid"].update(shape=[1, 5]), errors.CorruptRecordError),
        (lambda m: m["planes"]["valid"].update(dtype="<f8"), errors.CorruptRecordError),
        (lambda m: m["planes"]["versions"].update(dtype="object"), errors.CorruptRecordError),
        (lambda m: m["static_amax"][0].__setitem__(3, float("nan")), errors.CorruptRecordError),
        (lambda m: m["static_amax"][0].__setitem__(3, 0.0), errors.CorruptRecordError),
        (lambda m: m["static_amax"][0].pop(), errors.CorruptRecordError),
        (lambda m: m["shard"].update(index=1), errors.ShardError),
        (lambda m: m["planes"]["layer.1"].update(checksum="0" * 16), errors.CorruptRecordError),
    ],
)
def test_manifests_that_lie_are_named(change, error: type) -> None:  # noqa: ANN001
    with pytest.raises(error):
        opened(remade(change))


def test_an_unchanged_manifest_is_accepted() -> None:
    assert equal(opened(remade(lambda m: None)).segment(), segment(5))


def test_checksum_sees_swaps_shifts_and_paired_top_bits() -> None:
    data = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    seen = {checksum(data), checksum(data[:-1]), checksum(np.roll(data, 8)), checksum(np.roll(data, 8192))}
    for i, j in ((7, 15), (7, 8199), (3, 11), (8191, 16383)):
        changed = data.copy()
        changed[[i, j]] ^= 0x80
        seen.add(checksum(changed))
        changed[[i, j]] = data[[j, i]]
        seen.add(checksum(changed))
    assert len(seen) == 12
    assert checksum(np.zeros(0, np.uint8)) != checksum(np.zeros(1, np.uint8)) != checksum(np.zeros(8192, np.uint8))
