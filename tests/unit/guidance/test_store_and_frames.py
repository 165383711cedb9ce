"""From segments to the frame of a micro-batch: every row at its token's place, everything else refused or marked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny import tiny_config

from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import GuidanceError, GuidanceSegment, RouteSegment
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.guidance.store import GuidanceStore, RowRequest

MODEL = tiny_config()
SPEC = GuidanceSpec(bits=4, layers=(1, 2))
LAYOUT = RecordLayout.build(SPEC, MODEL)
ANY = -1


def segment(sample: int, n: int, *, versions: list[int] | None = None, amax: dict[int, float] | None = None) -> GuidanceSegment:
    """Rows that tell where they come from: random bytes drawn for (sample, position)."""
    rows = np.stack([np.random.default_rng((sample, i)).integers(0, 120, LAYOUT.row_bytes) for i in range(n)]).astype(np.uint8)
    versions = versions or [0] * n
    return GuidanceSegment(
        sample_id=sample,
        layout=LAYOUT,
        rows=rows,
        valid=np.ones(n, dtype=bool),
        versions=np.array(versions, dtype=np.int32),
        contract_fingerprint="c",
        static_amax={v: {(c.layer, c.site): a for c in LAYOUT if c.site in "kv"} for v, a in (amax or {0: 8.0}).items()},
    )


def routes(sample: int, n: int) -> RouteSegment:
    """Experts (p % 4, (p + 1) % 4) in layer 0, shifted by one a layer."""
    experts = np.array([[[(p + lay) % 4, (p + lay + 1) % 4] for lay in range(3)] for p in range(n)], dtype=np.uint8)
    return RouteSegment(sample_id=sample, experts=experts, valid=np.ones(n, dtype=bool), versions=np.zeros(n, dtype=np.int32))


def wanted(sample: int, n: int, versions: list[int] | None = None) -> RowRequest:
    return RowRequest(sample_id=sample, length=n, versions=np.array(versions or [ANY] * n))


def store(*segments: GuidanceSegment | RouteSegment) -> GuidanceStore:
    held = GuidanceStore(contract_fingerprint="c")
    for s in segments:
        held.put(s if isinstance(s, GuidanceSegment) else None, s if isinstance(s, RouteSegment) else None)
    return held


def test_rows_lie_at_position_times_batch_plus_sequence_whatever_the_order_they_came_in() -> None:
    a, b = segment(7, 4), segment(3, 6)
    frame = store(b, a).frame([wanted(7, 3), wanted(3, 5)], seq_len=6, rounding=Rounding.GUIDED)
    for p in range(6):
        for column, (s, n) in enumerate(((a, 3), (b, 5))):
            t = p * 2 + column
            assert bool(frame.is_token[t]) == bool(frame.valid[t]) == (p < n)
            expected = torch.from_numpy(s.rows[p]) if p < n else torch.zeros(LAYOUT.row_bytes, dtype=torch.uint8)
            assert torch.equal(frame.rows[t], expected)


def test_records_are_cut_out_of_the_rows() -> None:
    a = segment(7, 2)
    frame = store(a).frame([wanted(7, 2)], seq_len=2, rounding=Rounding.GUIDED)
    fc1, k = frame.record(2, "fc1_in"), frame.record(2, "k")
    start = LAYOUT.column(2, "fc1_in").start
    assert fc1.payload.tolist() == a.rows[:, start : start + 32].tolist() and fc1.shape == (2, 64) and fc1.bits == 4
    assert fc1.block_scale.view(torch.uint8).tolist() == a.rows[:, start + 32 : start + 36].tolist()
    assert fc1.global_amax.numpy().tobytes() == a.rows[:, start + 36 : start + 40].tobytes() and fc1.global_amax.shape == (2, 1)
    assert k.global_amax.tolist() == [[8.0], [8.0]] and k.shape == (2, 32)
    assert frame.record(0, "k") is None and GuidanceFrame(Rounding.GUIDED).record(2, "k") is None


def test_each_row_has_the_static_amax_of_its_own_version() -> None:
    a = segment(7, 3, versions=[0, 0, 2], amax={0: 8.0, 2: 5.0})
    b = segment(3, 2, versions=[2, 2], amax={2: 5.0})
    frame = store(a, b).frame([wanted(7, 3), wanted(3, 2)], seq_len=3, rounding=Rounding.GUIDED)
    amax = frame.record(1, "v").global_amax.flatten().tolist()
    assert [amax[t] for t in (0, 1, 2, 3, 4)] == [8.0, 5.0, 8.0, 5.0, 5.0]


def test_missing_and_contradictory_static_amax_are_refused() -> None:
    with pytest.raises(GuidanceError, match="no static amax for k of layer 1 at weight version 2"):
        store(segment(7, 1, versions=[2])).frame([wanted(7, 1)], seq_len=1, rounding=Rounding.GUIDED)
    held = store(segment(7, 1), segment(3, 1, amax={0: 9.0}))
    with pytest.raises(GuidanceError, match="weight version 0 has two sets of static amax"):
        held.frame([wanted(7, 1), wanted(3, 1)], seq_len=1, rounding=Rounding.GUIDED)


def test_a_row_of_another_version_than_asked_for_is_invalid() -> None:
    a = segment(7, 4, versions=[0, 0, 1, 1], amax={0: 8.0, 1: 8.0})
    frame = store(a, routes(7, 4)).frame([wanted(7, 4, [ANY, 0, 0, 1])], seq_len=4, rounding=Rounding.GUIDED)
    assert frame.valid.tolist() == [True, True, False, True]
    assert frame.routes_valid.tolist() == [True, True, True, False], "routes were recorded by version 0 throughout"


def test_routes_are_found_by_position_and_layer() -> None:
    held = store(routes(3, 4), routes(7, 3))
    frame = held.frame([wanted(7, 3), wanted(3, 4)], seq_len=4, rounding=Rounding.BF16)
    assert frame.rows is None
    ids, valid = frame.routes_of(2)
    assert ids.shape == (8, 2) and ids.dtype == torch.int64
    assert valid.tolist() == [True] * 6 + [False, True]
    for p in range(3):
        assert ids[p * 2].tolist() == ids[p * 2 + 1].tolist() == [(p + 2) % 4, (p + 3) % 4]
    assert GuidanceFrame(Rounding.GUIDED).routes_of(0) is None


@pytest.mark.parametrize("rounding", [Rounding.BF16, Rounding.WEIGHTS_ONLY, Rounding.NEAREST])
def test_guidance_is_not_gathered_where_it_is_not_used(rounding: Rounding) -> None:
    frame = store(segment(7, 2)).frame([wanted(7, 2)], seq_len=2, rounding=rounding)
    assert frame.rows is None and frame.valid is None and frame.is_token.tolist() == [True, True]


def test_what_must_not_be_used_is_refused() -> None:
    held = store(segment(7, 2), routes(7, 2))
    with pytest.raises(GuidanceError, match="no guidance for sample 8; 1 other samples are held"):
        held.frame([wanted(8, 1)], seq_len=1, rounding=Rounding.GUIDED)
    with pytest.raises(GuidanceError, match="no routes for sample 8"):
        held.frame([wanted(8, 1)], seq_len=1, rounding=Rounding.BF16)
    with pytest.raises(GuidanceError, match="guidance of sample 7 covers 2 positions, the trainer needs 3"):
        held.frame([wanted(7, 3)], seq_len=3, rounding=Rounding.GUIDED)
    with pytest.raises(GuidanceError, match="guidance of sample 7 was stored twice"):
        held.put(segment(7, 2), None)
    with pytest.raises(GuidanceError, match="routes of sample 7 were stored twice"):
        held.put(None, routes(7, 2))
    with pytest.raises(GuidanceError, match="sample 1 was recorded under contract c, this trainer runs d"):
        GuidanceStore(contract_fingerprint="d").put(segment(1, 1), None)
    doubled = routes(5, 2)
    doubled.experts[1, 0] = 2
    with pytest.raises(GuidanceError, match="names the same expert twice"):
        store(doubled).frame([wanted(5, 2)], seq_len=2, rounding=Rounding.BF16)


def test_clear_forgets_everything() -> None:
    held = store(segment(7, 2), routes(7, 2))
    held.clear()
    held.put(segment(7, 2), routes(7, 2))
    assert held.frame([wanted(7, 2)], seq_len=2, rounding=Rounding.GUIDED).valid.all()


def test_raw_values_are_bf16_at_the_end_of_the_column() -> None:
    layout = RecordLayout.build(GuidanceSpec(bits=1, layers=(2,), sites=("v",), raw_values=True), MODEL)
    raw = torch.randn(3, 32).bfloat16()
    rows = torch.zeros(3, layout.row_bytes, dtype=torch.uint8)
    rows[:, -64:] = raw.view(torch.uint8)
    frame = GuidanceFrame(Rounding.GUIDED, layout=layout, rows=rows)
    assert torch.equal(frame.raw_values(2, "v"), raw)
    with pytest.raises(KeyError, match="raw values of k in layer 2"):
        frame.raw_values(2, "k")


@pytest.fixture
def no_frame_left() -> Iterator[None]:
    yield
    frames.make_current(None)


def test_the_current_frame_is_seen_by_every_thread_and_bf16_when_there_is_none(no_frame_left: None) -> None:
    from threading import Thread

    assert frames.current().rounding is Rounding.BF16
    mine = GuidanceFrame(Rounding.GUIDED)
    frames.make_current(mine)
    seen: list[GuidanceFrame] = []
    thread = Thread(target=lambda: seen.append(frames.current()))
    thread.start()
    thread.join()
    assert seen == [mine] and frames.current() is mine
    frames.make_current(None)
    assert frames.current().rounding is Rounding.BF16


def test_what_each_method_rounds() -> None:
    table = {r.value: (r.quantizes_weights, r.quantizes_activations, r.uses_record) for r in Rounding}
    assert table == {
        "bf16": (False, False, False),
        "w4a16": (True, False, False),
        "qat": (True, True, False),
        "rtn_rollout_scale": (True, True, True),
        "guided": (True, True, True),
    }
