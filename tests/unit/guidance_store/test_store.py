"""The store: gathering by layer and position from memory and files, and a byte budget that is never exceeded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_trace.guidance.errors import CorruptRecordError, DuplicateRowError, FingerprintError, TokenMismatchError
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import tokens_digest
from megatron_trace.guidance.sharding import slice_layers, zigzag_positions
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.guidance.store import GuidanceStore, RowRequest, StoreBudget
from megatron_trace.guidance.wire import encode, map_record, open_record, write_record
from tests.unit.guidance_wire.factory import CONTRACT, SHAPE, routes, segment

GUIDED = {"rounding": Rounding.GUIDED}


def ask(sample_id: int, length: int, **changes: object) -> RowRequest:
    return RowRequest(sample_id=sample_id, length=length, versions=np.full(length, -1), **changes)


def store_of(
    *samples: tuple[int, int], budget: StoreBudget | None = None, via: str = "memory", at: Path | None = None
) -> GuidanceStore:
    """Samples (id, rows) held as segments, as records in memory, or as mapped files."""
    held = GuidanceStore(contract_fingerprint=CONTRACT, budget=budget)
    for sample_id, n in samples:
        guidance, way = segment(n, sample_id=sample_id, seed=sample_id), routes(n, sample_id=sample_id, seed=sample_id)
        if via == "memory":
            held.put(guidance, way)
        elif via == "bytes":
            held.put_record(open_record(encode(guidance, way), contract_fingerprint=CONTRACT))
        else:
            write_record(at / str(sample_id), guidance, way)
            held.put_record(map_record(at / str(sample_id), contract_fingerprint=CONTRACT))
    return held


def rows_of(frame: GuidanceFrame, batch: int) -> np.ndarray:
    """[S, B, row_bytes]."""
    return frame.rows.numpy().reshape(-1, batch, frame.layout.row_bytes)


@pytest.mark.parametrize("via", ["memory", "bytes", "file"])
@pytest.mark.parametrize("layers", [None, (1, 2), (3,), (0, 3)])
def test_a_stage_gathers_its_layers_whatever_holds_the_sample(tmp_path: Path, via: str, layers: tuple[int, ...] | None) -> None:
    held = store_of((3, 5), (8, 4), via=via, at=tmp_path)
    frame = held.frame([ask(8, 4), ask(3, 5)], seq_len=6, layers=layers, **GUIDED)
    got = rows_of(frame, 2)
    for b, (sample_id, n) in enumerate(((8, 4), (3, 5))):
        whole = segment(n, sample_id=sample_id, seed=sample_id)
        expected = whole if layers is None else slice_layers(whole, layers)
        assert frame.layout == expected.layout
        assert (got[:n, b] == expected.rows).all() and not got[n:, b].any()
    assert frame.valid.reshape(6, 2).sum(0).tolist() == [4, 5]
    for layer in range(4) if layers is None else layers:
        experts, valid = frame.routes_of(layer)
        assert experts.dtype == torch.int64 and frame.routes.dtype == torch.uint8, "ids stay as narrow as they came"
        expected = routes(5, sample_id=3, seed=3).experts[:, layer]
        assert (experts.reshape(6, 2, 2)[:5, 1].numpy() == expected).all() and valid.sum() == 9


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_context_parallel_ranks_together_hold_each_row_once(cp: int) -> None:
    held = store_of((1, 13), (2, 16))
    whole = held.frame([ask(1, 13), ask(2, 16)], seq_len=16, **GUIDED)
    seen = np.zeros((16, 2, whole.layout.row_bytes), dtype=np.uint8)
    for rank in range(cp):
        at = zigzag_positions(16, cp_size=cp, cp_rank=rank)
        part = held.frame([ask(1, 13), ask(2, 16)], seq_len=16 // cp, positions=at, **GUIDED)
        seen[at] += rows_of(part, 2)
        assert (part.is_token.reshape(-1, 2).numpy() == whole.is_token.reshape(16, 2).numpy()[at]).all()
        assert (part.valid.reshape(-1, 2).numpy() == whole.valid.reshape(16, 2).numpy()[at]).all()
        assert (part.static_amax[1, "k"] == 1.125).reshape(-1, 2)[part.valid.reshape(-1, 2)].all()
        assert (part.routes_of(2)[0].reshape(-1, 2, 2) == whole.routes_of(2)[0].reshape(16, 2, 2)[torch.from_numpy(at)]).all()
    assert (seen == rows_of(whole, 2)).all()
    with pytest.raises(ValueError, match="4 positions for seq_len=5"):
        held.frame([ask(1, 13)], seq_len=5, positions=np.arange(4), **GUIDED)


def test_one_sample_twice_in_a_batch_and_split_over_micro_batches() -> None:
    held = store_of((1, 4), (2, 3))
    twice = rows_of(held.frame([ask(1, 4), ask(2, 3), ask(1, 4)], seq_len=4, **GUIDED), 3)
    assert (twice[:, 0] == twice[:, 2]).all()
    apart = [rows_of(held.frame([ask(i, n)], seq_len=4, **GUIDED), 1) for i, n in ((2, 3), (1, 4))]
    assert (apart[1][:, 0] == twice[:, 0]).all() and (apart[0][:, 0] == twice[:, 1]).all()


def test_rows_of_another_forward_are_invalid_and_no_others() -> None:
    held = GuidanceStore(contract_fingerprint=CONTRACT)
    held.put(segment(6, versions=[0, 0, 1, 1, 2, 2]), None)
    wanted = RowRequest(sample_id=7, length=6, versions=np.array([-1, -1, 1, 2, 2, 1]))
    frame = held.frame([wanted], seq_len=7, **GUIDED)
    assert frame.valid.tolist() == [True, True, True, False, True, False, False]
    assert frame.static_amax[3, "v"].tolist()[:6] == [1.4375, 1.4375, 2.4375, 2.4375, 3.4375, 3.4375]


def test_token_ids_are_compared() -> None:
    held = GuidanceStore(contract_fingerprint=CONTRACT)
    held.put(replace(segment(3), tokens_digest=tokens_digest([5, 6, 7])), None)
    held.frame([ask(7, 3, tokens_digest=tokens_digest([5, 6, 7]))], seq_len=3, **GUIDED)
    with pytest.raises(TokenMismatchError, match="sample 7 was recorded for other token ids"):
        held.frame([ask(7, 3, tokens_digest=tokens_digest([5, 67, 7]))], seq_len=3, **GUIDED)


def test_duplicates_and_other_contracts_are_refused_in_any_form() -> None:
    record = open_record(encode(segment(3), routes(3)), contract_fingerprint=CONTRACT)
    held = GuidanceStore(contract_fingerprint=CONTRACT)
    held.put_record(record)
    for again in (lambda: held.put_record(record), lambda: held.put(segment(3), None), lambda: held.put(None, routes(3))):
        with pytest.raises(DuplicateRowError, match="sample 7 w"):
            again()
    with pytest.raises(FingerprintError):
        GuidanceStore(contract_fingerprint="other").put_record(record)


def test_damage_on_disk_is_an_error_not_a_number(tmp_path: Path) -> None:
    held = store_of((1, 50), budget=StoreBudget(memory_bytes=100, disk_bytes=1 << 20, directory=tmp_path))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-70] ^= 4
    data[len(data) // 2] ^= 4
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(CorruptRecordError, match="sample 1"):
        held.frame([ask(1, 50)], seq_len=50, **GUIDED)


def test_k_with_an_amax_per_head_is_looked_at_by_head() -> None:
    spec = GuidanceSpec(bits=1, layers=(1,), sites=("k",), row_scaled=frozenset({"k"}))
    shape = RecordLayout.build(spec, SHAPE)
    amax = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    rows = segment(3, shape=shape).rows.copy()
    rows[:, -16:] = amax.view(np.uint8).reshape(3, 16)
    held = GuidanceStore(contract_fingerprint=CONTRACT)
    held.put(replace(segment(3, shape=shape), rows=rows), None)
    record = held.frame([ask(7, 3)], seq_len=3, **GUIDED).record(1, "k")
    assert record.shape == (3, 4, 32) and record.valid.shape == (3, 4)
    assert record.global_amax[..., 0].tolist() == amax.tolist()
    assert (record.payload.reshape(3, 16).numpy() == rows[:, :16]).all()
    assert (record.block_scale.view(torch.uint8).reshape(3, 8).numpy() == rows[:, 16:24]).all()


def test_pressure_and_acceptance(tmp_path: Path) -> None:
    held = store_of(budget=StoreBudget(memory_bytes=1000, disk_bytes=3000, directory=tmp_path))
    assert held.pressure == 0 and held.accepts(4000) and not held.accepts(4001)
    held.put(segment(4), None)
    used = 4 * (segment(1).layout.row_bytes + 1 + 4)
    assert held.report().memory_bytes == used and held.pressure == used / 4000
    assert held.accepts(4000 - used) and not held.accepts(4001 - used)
    held.discard([7])
    assert held.pressure == 0 and not list(tmp_path.iterdir())
    with pytest.raises(KeyError):
        held.discard([7])
    assert GuidanceStore(contract_fingerprint=CONTRACT, budget=StoreBudget(memory_bytes=0)).pressure == 1.0


@pytest.mark.parametrize("fields", [{"memory_bytes": -1}, {"disk_bytes": 5}, {"disk_bytes": -5}])
def test_budgets_that_cannot_work_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match="store budget"):
        StoreBudget(**fields)


def test_a_dropped_sample_trains_on_without_guidance_and_is_counted() -> None:
    size = 10 * (segment(1).layout.row_bytes + 5) + 10 * (4 * 2 + 5)
    held = store_of((1, 10), (2, 10), (3, 10), budget=StoreBudget(memory_bytes=2 * size))
    assert held.report().dropped_samples == 1 and held.report().dropped_rows == 10
    frame = held.frame([ask(1, 10), ask(2, 10)], seq_len=10, **GUIDED)
    assert frame.valid.reshape(10, 2).sum(0).tolist() == [0, 10] and not rows_of(frame, 2)[:, 0].any()
    assert frame.routes_of(1)[1].reshape(10, 2).sum(0).tolist() == [0, 10]
    assert frame.record(1, "k").valid.sum() == 10
    alone = held.frame([ask(1, 10)], seq_len=10, **GUIDED)
    assert not alone.valid.any() and alone.record(3, "fc1_in") is not None


class Budget(RuleBasedStateMachine):
    """Random puts and discards: never over budget, oldest lost first, everything still held comes back right."""

    @initialize(memory=st.integers(0, 6000), disk=st.integers(0, 12_000), tmp=st.just(None))
    def start(self, memory: int, disk: int, tmp: None) -> None:
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        at = Path(self.directory.name)
        self.held = GuidanceStore(contract_fingerprint=CONTRACT, budget=StoreBudget(memory, disk, at))
        self.sizes: dict[int, int] = {}
        self.next = 0

    @rule(n=st.integers(1, 30), as_record=st.booleans())
    def put(self, n: int, as_record: bool) -> None:
        self.next += 1
        guidance, way = segment(n, sample_id=self.next, seed=self.next), routes(n, sample_id=self.next, seed=self.next)
        if as_record:
            self.held.put_record(open_record(encode(guidance, way), contract_fingerprint=CONTRACT))
        else:
            self.held.put(guidance, way)
        self.sizes[self.next] = n

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.sizes)))
        self.held.discard([gone])
        del self.sizes[gone]

    @invariant()
    def bounded_and_right(self) -> None:
        report, budget = self.held.report(), self.held.budget
        on_disk = sum(p.stat().st_size for p in Path(self.directory.name).iterdir())
        assert report.memory_bytes <= budget.memory_bytes and report.disk_bytes == on_disk <= budget.disk_bytes
        states = []
        for sample_id, n in self.sizes.items():
            frame = self.held.frame([ask(sample_id, n)], seq_len=n, **GUIDED)
            assert frame.valid.all() or not frame.valid.any()
            states.append(bool(frame.valid.all()))
            if states[-1]:
                assert (frame.rows.numpy() == segment(n, sample_id=sample_id, seed=sample_id).rows).all()
                assert (frame.routes.numpy() == routes(n, sample_id=sample_id, seed=sample_id).experts).all()
        assert sum(not s for s in states) <= report.dropped_samples

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()


Budget.TestCase.settings = settings(max_examples=40, stateful_step_count=15)
TestBudget = Budget.TestCase


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), disk=st.booleans())
@settings(max_examples=25)
def test_the_oldest_go_first(sizes: list[int], disk: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as at:
        budget = StoreBudget(3000, 4000 if disk else 0, Path(at) if disk else None)
        held = store_of(*enumerate(sizes), budget=budget)
        alive = [bool(held.frame([ask(i, n)], seq_len=n, **GUIDED).valid.all()) for i, n in enumerate(sizes)]
    if all(n * (144 + 5 + 13) <= 3000 for n in sizes):
        assert alive == sorted(alive), "a sample is lost only after every older one"
