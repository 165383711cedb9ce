"""Append, extend, adopt, retract and restore against a simple model: a list of what each position must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_trace.guidance import operations
from megatron_trace.guidance.errors import CoverageError, FingerprintError, GuidanceError, LayerError
from megatron_trace.guidance.segments import GuidanceSegment
from tests.unit.guidance_wire.factory import CONTRACT, amax_of, equal, layout, routes, segment

LAYOUT = layout()


class Request(RuleBasedStateMachine):
    """One request in an engine: prefilled, decoded, retracted, restored, in any order.

    The model knows, for each position, (forward that recorded it, version); a forward is a number that is written into the row.
    ``sampled`` positions have had a token sampled from them; their recording is the first one, for good.
    """

    @initialize()
    def start(self) -> None:
        self.now = operations.empty(LAYOUT, sample_id=7, contract_fingerprint=CONTRACT)
        self.kept = self.now
        self.truth: list[tuple[int, int]] = []
        self.frozen: list[tuple[int, int]] = []
        self.forward = self.version = 0
        self.donor = segment(30, sample_id=9, versions=[5] * 12 + [6] * 18)
        self.snapshots: list[tuple[GuidanceSegment, bytes]] = []

    def _rows(self, m: int) -> np.ndarray:
        self.forward += 1
        rows = np.zeros((m, LAYOUT.row_bytes), dtype=np.uint8)
        rows[:, :4] = np.frombuffer(self.forward.to_bytes(4, "little"), dtype=np.uint8)
        return rows

    @rule()
    def new_weights(self) -> None:
        self.version += 1

    @rule(m=st.integers(1, 5))
    def extend(self, m: int) -> None:
        self.snapshots = [*self.snapshots[-2:], (self.now, self.now.rows.tobytes())]
        self.now = operations.extend(self.now, self._rows(m), version=self.version, static_amax=amax_of(self.version, LAYOUT))
        self.truth += [(self.forward, self.version)] * m

    @rule()
    def append(self) -> None:
        amax = amax_of(self.version, LAYOUT)
        self.now = operations.append(self.now, self._rows(1)[0], version=self.version, static_amax=amax)
        self.truth.append((self.forward, self.version))

    @rule(length=st.integers(0, 30))
    def adopt(self, length: int) -> None:
        start = len(self.truth)
        self.now = operations.adopt(self.now, self.donor, length)
        self.truth += [(-1 - p, int(self.donor.versions[p])) for p in range(start, length)]

    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """The engine takes the pages away: what is recorded so far is saved, and recording starts over."""
        self.kept = operations.restore(self.kept, self.now)
        self.frozen = self.frozen + self.truth[len(self.frozen) :]
        length = data.draw(st.integers(0, len(self.truth)))
        self.now, self.truth = operations.retract(self.now, length), self.truth[:length]

    @invariant()
    def trajectory_is_first_recordings_then_the_rest(self) -> None:
        expected = self.frozen + self.truth[len(self.frozen) :]
        got = operations.restore(self.kept, self.now)
        assert len(got) == len(expected) and got.valid.all()
        assert got.versions.tolist() == [version for _, version in expected]
        for p, (forward, _) in enumerate(expected):
            if forward < 0:
                assert (got.rows[p] == self.donor.rows[-1 - forward]).all()
            else:
                assert int.from_bytes(got.rows[p, :4].tobytes(), "little") == forward
        assert {v for _, v in expected} <= set(got.static_amax)

    @invariant()
    def older_segments_did_not_change(self) -> None:
        assert all(held.rows.tobytes() == before for held, before in self.snapshots)


Request.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestRequest = Request.TestCase


def test_restore_never_revives_a_position_whose_first_recording_is_missing() -> None:
    first = segment(4)
    first = replace(first, valid=np.array([True, False, True, True]))
    whole = operations.restore(first, segment(6, seed=1))
    assert whole.valid.tolist() == [True, False, True, True, True, True]
    assert (whole.rows[:4] == first.rows).all() and (whole.rows[4:] == segment(6, seed=1).rows[4:]).all()


def test_routes_follow_the_same_rules() -> None:
    first, again = routes(3), routes(5, seed=1)
    whole = operations.restore(first, again)
    assert (whole.experts[:3] == first.experts).all() and (whole.experts[3:] == again.experts[3:]).all()
    padded = operations.pad_invalid(operations.retract(whole, 2), 4)
    assert padded.valid.tolist() == [True, True, False, False] and padded.versions.tolist() == [0, 0, -1, -1]
    assert operations.pad_invalid(whole, 2) is whole


def test_rows_of_another_kind_are_refused() -> None:
    ours = segment(3)
    with pytest.raises(LayerError, match="different record layouts"):
        operations.adopt(ours, segment(9, shape=layout(4)), 5)
    with pytest.raises(FingerprintError, match="contracts"):
        operations.restore(ours, replace(segment(9), contract_fingerprint="other"))
    with pytest.raises(CoverageError, match="9 rows to adopt, sample 7 has 5"):
        operations.adopt(ours, segment(5), 9)
    with pytest.raises(LayerError, match="layout has 144 bytes"):
        operations.append(ours, np.zeros(3, np.uint8), version=0, static_amax={})
    clash = {(1, "k"): 99.0}
    with pytest.raises(GuidanceError, match="version 0 has static amax 1.125 and 99.0 for k of layer 1"):
        operations.extend(ours, ours.rows, version=0, static_amax=clash)


def test_equal_tells_segments_apart() -> None:
    assert equal(segment(3), segment(3)) and not equal(segment(3), segment(3, seed=1))
