"""Record layout, segments and narrowing: where every byte of a token's record lies, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_config

from megatron_trace.guidance.segments import GuidanceError, GuidanceSegment, RouteSegment, narrowed
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout, latter_half, site_width
from megatron_trace.numerics import guided, nvfp4

MODEL = tiny_config()  # hidden 64, 2 KV heads of 16, 3 layers


@pytest.mark.parametrize(("layers", "expected"), [(1, ()), (2, (1,)), (3, (2,)), (4, (2, 3)), (40, tuple(range(20, 40)))])
def test_latter_half_is_the_paper_s(layers: int, expected: tuple[int, ...]) -> None:
    assert latter_half(layers) == expected


def test_compact_record_takes_one_and_a_half_bits_a_value_and_one_amax_a_token() -> None:
    layout = RecordLayout.build(GuidanceSpec(bits=1, layers=(1, 2)), MODEL)
    values = 64 + 32 + 32
    assert layout.row_bytes == 2 * (values * 3 // 16 + 4)
    found = [
        (c.layer, c.site, c.width, c.start, c.code_bytes, c.scale_bytes, c.amax_bytes, c.raw_bytes, c.stop) for c in layout
    ]
    assert found == [
        (1, "fc1_in", 64, 0, 8, 4, 4, 0, 16),
        (1, "k", 32, 16, 4, 2, 0, 0, 22),
        (1, "v", 32, 22, 4, 2, 0, 0, 28),
        (2, "fc1_in", 64, 28, 8, 4, 4, 0, 44),
        (2, "k", 32, 44, 4, 2, 0, 0, 50),
        (2, "v", 32, 50, 4, 2, 0, 0, 56),
    ]


def test_full_record_takes_four_and_a_half_bits_and_raw_values_sixteen_more() -> None:
    full = RecordLayout.build(GuidanceSpec(bits=4, layers=(0,)), MODEL)
    raw = RecordLayout.build(GuidanceSpec(bits=4, layers=(0,), raw_values=True), MODEL)
    assert full.row_bytes == 128 * 9 // 16 + 4 and raw.row_bytes == full.row_bytes + 2 * 128


def test_sites_are_in_a_fixed_order_and_found_by_layer_and_name() -> None:
    layout = RecordLayout.build(GuidanceSpec(bits=1, layers=(0, 2), sites=("v", "fc1_in")), MODEL)
    assert [(c.layer, c.site) for c in layout] == [(0, "fc1_in"), (0, "v"), (2, "fc1_in"), (2, "v")]
    assert layout.column(2, "v").start == 38 and layout.column(2, "k") is None and layout.column(1, "v") is None
    assert layout == RecordLayout.build(GuidanceSpec(bits=1, layers=(0, 2), sites=("fc1_in", "v")), MODEL)
    assert (site_width(MODEL, "fc1_in"), site_width(MODEL, "k"), site_width(MODEL, "v")) == (64, 32, 32)
    assert RecordLayout.build(GuidanceSpec(bits=1, layers=()), MODEL).row_bytes == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 2, "layers": ()}, "guidance.bits=2"),
        ({"bits": 1, "layers": (2, 1)}, r"guidance.layers=\(2, 1\): must be ascending"),
        ({"bits": 1, "layers": (1, 1)}, "without repeats"),
        ({"bits": 1, "layers": (), "sites": ("q",)}, r"guidance.sites=\['q'\]: unknown"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GuidanceSpec(**settings)


def test_a_layer_the_model_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 3 is outside 0\.\.2"):
        RecordLayout.build(GuidanceSpec(bits=1, layers=(2, 3)), MODEL)


def segment_of(spec: GuidanceSpec, x: dict[tuple[int, str], torch.Tensor], n: int = 5) -> GuidanceSegment:
    """Record rows written here by hand from quantised ``x`` [n, K], at ``spec.bits``."""
    layout = RecordLayout.build(spec, MODEL)
    rows = torch.zeros(n, layout.row_bytes, dtype=torch.uint8)
    for column in layout:
        static = None if column.site == "fc1_in" else torch.tensor(8.0)
        q = nvfp4.quantize(x[column.layer, column.site], scale_scope="row" if static is None else "static", global_amax=static)
        record = guided.make_record(q, bits=spec.bits)
        parts = [record.payload, record.block_scale.view(torch.uint8)]
        if static is None:
            parts.append(q.global_amax.contiguous().view(torch.uint8))
        rows[:, column.start : column.stop] = torch.cat(parts, dim=1)
    return GuidanceSegment(
        sample_id=9,
        layout=layout,
        rows=rows.numpy(),
        valid=np.arange(n) != 2,
        versions=np.full(n, 3, dtype=np.int32),
        contract_fingerprint="c",
        static_amax={3: {(layer, site): 8.0 for layer in spec.layers for site in "kv"}},
    )


@pytest.fixture
def x() -> dict[tuple[int, str], torch.Tensor]:
    torch.manual_seed(0)
    return {(layer, site): torch.randn(5, site_width(MODEL, site)) for layer in range(3) for site in ("fc1_in", "k", "v")}


@pytest.mark.parametrize("bits", [1, 4])
def test_narrowing_gives_the_record_that_would_have_been_kept(x, bits: int) -> None:
    whole = segment_of(GuidanceSpec(bits=4, layers=(0, 1, 2)), x)
    spec = GuidanceSpec(bits=bits, layers=(1, 2), sites=("fc1_in", "v"))
    found, expected = narrowed(whole, RecordLayout.build(spec, MODEL)), segment_of(spec, x)
    assert found.layout == expected.layout and (found.rows == expected.rows).all() and found.rows.any()
    assert (found.valid == whole.valid).all() and (found.versions == whole.versions).all()
    assert (found.sample_id, found.contract_fingerprint) == (9, "c")


def test_narrowing_never_invents(x) -> None:
    half = segment_of(GuidanceSpec(bits=1, layers=(2,), sites=("k",)), x)
    with pytest.raises(GuidanceError, match="sample 9 has no record of k in layer 1"):
        narrowed(half, RecordLayout.build(GuidanceSpec(bits=1, layers=(1,), sites=("k",)), MODEL))
    with pytest.raises(GuidanceError, match="sample 9 cannot be recorded at more bits"):
        narrowed(half, RecordLayout.build(GuidanceSpec(bits=4, layers=(2,), sites=("k",)), MODEL))


def test_misshapen_segments_are_refused(x) -> None:
    good = segment_of(GuidanceSpec(bits=1, layers=(2,)), x)
    with pytest.raises(GuidanceError, match="guidance of sample 9: rows are uint8"):
        replace(good, rows=good.rows[:, :-1])
    with pytest.raises(GuidanceError, match="rows are int64"):
        replace(good, rows=good.rows.astype(np.int64))
    with pytest.raises(GuidanceError, match="sample 9: 4 versions for 5 rows"):
        replace(good, versions=good.versions[:4])
    experts, flags = np.zeros((5, 3, 2), dtype=np.uint8), np.ones(5, dtype=bool)
    assert len(RouteSegment(sample_id=1, experts=experts, valid=flags, versions=good.versions)) == len(good) == 5
    with pytest.raises(GuidanceError, match="routes of sample 1"):
        RouteSegment(sample_id=1, experts=experts[:4], valid=flags, versions=good.versions)
