"""Chunked prefill, preemption and weight changes in flight: every row comes from the forward that sampled its token.

The oracle is a log of all forwards of the engine: for each (tokens up to a position, weight version) what was recorded there,
and the logits that followed. A trajectory's row, route and log-probability must all be found in one single entry of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import engine_of, plain_bundle, quantized_bundle, random_weights, request, tiny_config

from megatron_trace.guidance.segments import tokens_digest
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.rollout.embedded import EmbeddedEngine
from megatron_trace.rollout.protocol import GenerationRequest, Trajectory

FULL = GuidanceSpec(bits=4, layers=(0, 1, 2))
MODEL = tiny_config()
WEIGHTS = random_weights(MODEL)
OTHER_WEIGHTS = random_weights(MODEL, seed=1)
PROMPTS = [
    (3, 1, 4, 1, 5),
    (9, 2, 6),
    (3, 1, 4, 1, 5),
    (5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6),
    (33,),
    (5, 3, 5, 8, 9, 7, 9, 3),
]


@dataclass
class Entry:
    """One token of one forward: what was recorded for it, and the logits after it if they were asked for."""

    version: int
    row: bytes
    route: bytes
    logprobs: torch.Tensor | None


@dataclass
class ForwardLog:
    """Every token that ``engine`` computes, by the token ids up to it."""

    engine: EmbeddedEngine
    before_step: Callable[[int], None] = lambda step: None
    entries: dict[tuple[int, ...], list[Entry]] = field(default_factory=dict)
    forwards: list[int] = field(default_factory=list)
    """New tokens of each forward."""

    def __post_init__(self) -> None:
        inner_compute, inner_forward, inner_step = self.engine._compute, self.engine._forward.forward, self.engine._step
        logits: list[torch.Tensor] = []

        def forward(batch, *args):  # noqa: ANN001, ANN202
            self.forwards.append(len(batch.tokens_T))
            logits.append(inner_forward(batch, *args))
            return logits[-1]

        def compute(work, weights):  # noqa: ANN001, ANN202
            spans = [(list(s.tokens), s.computed, end, list(s.pages)) for s, end in zip(work.sequences, work.ends, strict=True)]
            inner_compute(work, weights)
            size = self.engine._blocks.page_size
            for (tokens, start, end, pages), after in zip(spans, logits[-1].double().log_softmax(-1), strict=True):
                for p in range(start, end):
                    slot = torch.tensor([pages[p // size] * size + p % size])
                    row = self.engine._recorder._rows[slot].numpy().tobytes()
                    route = self.engine._recorder._routes[slot].numpy().tobytes()
                    entry = Entry(weights.version, row, route, after if p == end - 1 else None)
                    self.entries.setdefault(tuple(tokens[: p + 1]), []).append(entry)

        def step(finished):  # noqa: ANN001, ANN202
            self.before_step(len(self.forwards))
            inner_step(finished)

        self.engine._compute, self.engine._forward.forward, self.engine._step = compute, forward, step

    def check(self, t: Trajectory) -> None:
        """Row, route, version and log-probability of each position of ``t`` are those of one forward."""
        tokens, n = t.tokens.tolist(), len(t.tokens) - 1
        assert len(t.guidance) == n and len(t.routes) == n
        assert t.guidance.tokens_digest == tokens_digest(tokens[:n])
        for p in range(n):
            if not t.guidance.valid[p]:
                assert not t.routes.valid[p] and p < t.prompt_length - 1 and t.finish_reason == "abort"
                continue
            row, route, version = t.guidance.rows[p].tobytes(), t.routes.experts[p].tobytes(), int(t.guidance.versions[p])
            assert t.routes.valid[p] and int(t.routes.versions[p]) == version
            found = [e for e in self.entries[tuple(tokens[: p + 1])] if (e.version, e.row, e.route) == (version, row, route)]
            assert found, f"position {p} holds rows of no forward"
            sampled = p - (t.prompt_length - 1)
            if sampled >= 0:
                assert int(t.token_versions[sampled]) == version
                said = float(t.logprobs[sampled])
                assert any(e.logprobs is not None and abs(float(e.logprobs[tokens[p + 1]]) - said) < 1e-6 for e in found), (
                    f"the log-probability of token {p + 1} is of another forward than its row"
                )
            assert version in t.guidance.static_amax


def requests(max_new_tokens: int = 9) -> list[GenerationRequest]:
    return [request(10 + i, p, max_new_tokens=max_new_tokens + i, seed=5) for i, p in enumerate(PROMPTS)]


def engine(version: int = 1, **settings_: object) -> EmbeddedEngine:
    return engine_of(MODEL, quantized_bundle(WEIGHTS, MODEL, version=version), **settings_)


def run(log: ForwardLog, asked: list[GenerationRequest]) -> list[Trajectory]:
    trajectories = log.engine.generate(asked, capture=FULL, capture_routes=True)
    for t in trajectories:
        log.check(t)
    assert log.engine.health().pages_in_use == 0
    return trajectories


def test_a_prompt_longer_than_a_forward_is_computed_in_chunks() -> None:
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(0, 61, 50))
    log = ForwardLog(engine(max_prefill_tokens=8))
    t = run(log, [request(0, prompt, max_new_tokens=3)])[0]
    assert log.forwards == [8] * 6 + [2, 1, 1]
    assert t.guidance.valid.all() and t.guidance.versions.tolist() == [1] * 52


@pytest.mark.parametrize("quantized", [False, True], ids=["none", "nvfp4"])
@pytest.mark.parametrize(
    "tight", [{"max_prefill_tokens": 3}, {"num_pages": 8}, {"num_pages": 8, "max_prefill_tokens": 5, "page_size": 3}], ids=str
)
def test_tokens_do_not_depend_on_chunks_or_preemption(tight: dict, quantized: bool) -> None:
    """In FP32 the arithmetic of the two runs differs in the order of sums only, too little to turn a sampled token."""
    bundle = quantized_bundle(WEIGHTS, MODEL, dtype=torch.float32) if quantized else plain_bundle(WEIGHTS, dtype=torch.float32)
    wide, narrow = engine_of(MODEL, bundle, dtype=torch.float32), engine_of(MODEL, bundle, dtype=torch.float32, **tight)
    for a, b in zip(wide.generate(requests()), narrow.generate(requests()), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5 if not quantized else 2e-3)
    assert ("num_pages" in tight) == (narrow.preemptions > 0) and wide.preemptions == 0


def test_preempted_requests_lose_no_row_and_keep_the_first_recording() -> None:
    log = ForwardLog(engine(num_pages=8))
    trajectories = run(log, requests())
    assert log.engine.preemptions >= 2
    assert all(t.guidance.valid.all() and t.routes.valid.all() for t in trajectories)
    again = sum(len(entries) > 1 for entries in log.entries.values())
    assert again > 5, "some positions must have been computed twice for this test to mean anything"


def test_rows_of_sampled_positions_survive_a_forward_that_records_others() -> None:
    """The second forward of a position is made to record garbage: none of it may reach the trajectory."""
    tight = engine(num_pages=8)
    expected = {t.sample_id: t for t in engine(num_pages=8).generate(requests(), capture=FULL, capture_routes=True)}
    preempted: dict[int, int] = {}
    inner = tight._scheduler._on_preempt

    def on_preempt(sequence) -> None:  # noqa: ANN001
        inner(sequence)
        preempted[sequence.request.sample_id] = max(sequence.kept, preempted.get(sequence.request.sample_id, 0))
        slots = torch.from_numpy(sequence.slots(4, 0, sequence.computed))
        tight._recorder._rows[slots] ^= 0xFF
        tight._blocks.flush()

    tight._scheduler._on_preempt = on_preempt
    for t in tight.generate(requests(), capture=FULL, capture_routes=True):
        kept = preempted.get(t.sample_id, 0)
        assert (t.guidance.rows[:kept] == expected[t.sample_id].guidance.rows[:kept]).all()
    assert any(preempted.values())


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_weights_changed_in_flight_give_each_token_its_version(mode: str) -> None:
    served = engine(version=3, on_refit=mode)

    def change(step: int) -> None:
        if step == 4 and served.health().weight_version == 3:
            served.update_weights(quantized_bundle(OTHER_WEIGHTS, MODEL, version=5, kv_amax=11.0))

    log = ForwardLog(served, before_step=change)
    trajectories = run(log, requests())
    for t in trajectories:
        versions = t.token_versions.tolist()
        assert set(versions) == {3, 5} and versions == sorted(versions)
        first_new = t.prompt_length - 1 + versions.index(5)
        assert t.guidance.versions[:first_new].tolist() == [3] * first_new, "rows keep the version of their first forward"
        assert set(t.guidance.versions[first_new:].tolist()) == {5}
        assert {v: amax[0, "k"] for v, amax in t.guidance.static_amax.items()} == {3: 8.0, 5: 11.0}
    assert (served.preemptions > 0) == (mode == "recompute")


def test_kept_keys_and_values_are_read_by_their_own_static_amax() -> None:
    """Same weights, another static amax: with the rows of version 1 read by its own amax little changes, misread all would."""
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5)
    base = dict(dtype=torch.float32)
    stay = engine_of(MODEL, quantized_bundle(WEIGHTS, MODEL, **base), on_refit="keep", **base)
    move = engine_of(MODEL, quantized_bundle(WEIGHTS, MODEL, **base), on_refit="keep", **base)
    moved = []

    def change(finished) -> None:  # noqa: ANN001
        if move._generated_tokens == 6 and not moved:
            moved.append(move.update_weights(quantized_bundle(WEIGHTS, MODEL, version=2, kv_amax=8.0 * 40, **base)))
        inner(finished)

    inner, move._step = move._step, change
    forced = (7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    a, b = (e.generate([request(0, prompt, forced=forced, max_new_tokens=10)])[0] for e in (stay, move))
    assert moved and a.token_versions.tolist() == [1] * 10 and b.token_versions.tolist() == [1] * 6 + [2] * 4
    # 40 times the amax with E4M3 block scales leaves the values nearly the same; a misread factor of 40 does not.
    assert np.abs(a.logprobs - b.logprobs).max() < 0.5
    misread = engine_of(MODEL, quantized_bundle(WEIGHTS, MODEL, **base), on_refit="keep", **base)
    misread._recorder.amax_index = lambda slots: None
    inner, move, moved = misread._step, misread, []
    move._step = change
    c = move.generate([request(0, prompt, forced=forced, max_new_tokens=10)])[0]
    assert np.abs(a.logprobs - c.logprobs).max() > 1.0


def test_prefix_hits_carry_the_version_they_were_recorded_under() -> None:
    served = engine(version=3, on_refit="keep")
    prompt = PROMPTS[3]
    served.generate([request(0, prompt)], capture=FULL, capture_routes=True)
    served.update_weights(quantized_bundle(OTHER_WEIGHTS, MODEL, version=7))
    t = served.generate([request(1, prompt)], capture=FULL, capture_routes=True)[0]
    assert t.guidance.versions.tolist() == [3] * 12 + [7] * (len(t.guidance) - 12)
    assert t.routes.versions.tolist() == t.guidance.versions.tolist()
    assert t.token_versions.tolist() == [7] * 8 and set(t.guidance.static_amax) == {3, 7}


def test_recompute_never_serves_a_prefix_of_older_weights() -> None:
    served = engine(version=3)
    served.generate([request(0, PROMPTS[3])], capture=FULL, capture_routes=True)
    served.update_weights(quantized_bundle(OTHER_WEIGHTS, MODEL, version=7))
    log = ForwardLog(served)
    t = run(log, [request(1, PROMPTS[3])])[0]
    assert log.forwards[0] == 13 and set(t.guidance.versions.tolist()) == {7}


def test_a_second_turn_after_new_weights_is_stitched_from_both_turns() -> None:
    """Rows of turn 1's sampled tokens come from turn 1; the last token of turn 1 gets its row in turn 2."""
    from megatron_trace.guidance.operations import restore

    served = engine(version=1)
    first = served.generate([request(0, PROMPTS[1])], capture=FULL, capture_routes=True)[0]
    served.update_weights(quantized_bundle(OTHER_WEIGHTS, MODEL, version=2))
    turn = (*first.tokens.tolist(), 7, 8)
    second = served.generate([request(0, turn)], capture=FULL, capture_routes=True)[0]
    whole = restore(first.guidance, second.guidance)
    n = len(first.guidance)
    assert len(whole) == len(second.guidance) and (whole.rows[:n] == first.guidance.rows).all()
    assert whole.versions.tolist() == [1] * n + [2] * (len(whole) - n) and whole.valid.all()
    assert set(whole.static_amax) == {1, 2}


def test_an_aborted_request_keeps_what_it_had() -> None:
    """Aborted while running, while waiting after preemption, and before its first token."""
    tight = engine(num_pages=8, max_batch_size=3)
    aborted: dict[int, int] = {}
    wanted = {"preempted", "running", "queued"}

    def abort(step: int) -> None:
        waiting, running = tight._scheduler.waiting, tight._scheduler.running
        found = {
            "preempted": [s for s in waiting if s.step],
            "running": [s for s in running if s.step == 3],
            "queued": [s for s in waiting if not s.step],
        }
        for kind in sorted(wanted):
            for sequence in found[kind][-1:]:
                if sequence.request.sample_id not in aborted:
                    aborted[sequence.request.sample_id] = sequence.step
                    tight.abort([sequence.request.sample_id])
                    wanted.discard(kind)

    log = ForwardLog(tight, before_step=abort)
    trajectories = {t.sample_id: t for t in run(log, requests())}
    assert not wanted and len(aborted) == 3
    for sample_id, t in trajectories.items():
        assert (t.finish_reason == "abort") == (sample_id in aborted)
        if sample_id in aborted:
            assert len(t.logprobs) == len(t.token_versions) == aborted[sample_id] == len(t.tokens) - t.prompt_length
            assert t.guidance.valid.all() == (aborted[sample_id] > 0 or t.prompt_length == 1)


def test_back_pressure_serves_one_at_a_time_until_it_ends() -> None:
    limit = {"open": False}
    served = engine(may_admit=lambda: limit["open"])
    batches: list[int] = []
    inner = served._compute

    def compute(work, weights) -> None:  # noqa: ANN001
        batches.append(len(served._scheduler.running))
        limit["open"] = served.health().generated_tokens >= 20
        inner(work, weights)

    served._compute = compute
    trajectories = served.generate(requests(), capture=FULL)
    assert len(trajectories) == len(PROMPTS) and batches[0] == 1 and max(batches) > 1
    opened = next(i for i, n in enumerate(batches) if n > 1)
    assert served.health().generated_tokens > 20 and set(batches[:opened]) == {1}


def test_weights_and_pauses_come_from_another_thread() -> None:
    served = engine(version=1, on_refit="recompute")
    started, out = threading.Event(), []
    inner = served._step

    def step(finished) -> None:  # noqa: ANN001
        started.set()
        inner(finished)

    served._step = step
    asked = [request(i, (1 + i,), max_new_tokens=80) for i in range(3)]
    worker = threading.Thread(target=lambda: out.extend(served.generate(asked, capture=FULL)))
    worker.start()
    assert started.wait(20)
    served.pause()
    at = served.health().generated_tokens
    ack = served.update_weights(quantized_bundle(OTHER_WEIGHTS, MODEL, version=2))
    assert served.health().generated_tokens == at, "a paused engine generates nothing"
    served.resume()
    worker.join(60)
    assert ack.success and not worker.is_alive() and len(out) == 3
    assert all(set(t.token_versions.tolist()) == {1, 2} for t in out)


def test_shutdown_ends_a_paused_generate() -> None:
    served = engine()
    errors: list[BaseException] = []
    started = threading.Event()
    inner = served._step
    served._step = lambda finished: (started.set(), inner(finished))[1]

    def work() -> None:
        try:
            served.generate([request(0, (1,), max_new_tokens=200)])
        except RuntimeError as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert started.wait(20)
    served.pause()
    served.shutdown()
    worker.join(30)
    assert not worker.is_alive() and "shut down" in str(errors[0])


@settings(max_examples=15)
@given(data=st.data())
def test_any_schedule_keeps_token_route_and_codes_of_one_forward(data: st.DataObject) -> None:
    """Pages, chunks, batch places, prompts, refit mode and the moments of weight changes and aborts are all arbitrary."""
    served = engine(
        num_pages=data.draw(st.integers(7, 16)),
        page_size=data.draw(st.sampled_from([2, 3, 4])),
        max_prefill_tokens=data.draw(st.integers(1, 20)),
        max_batch_size=data.draw(st.integers(1, 6)),
        on_refit=data.draw(st.sampled_from(["recompute", "keep"])),
    )
    changes = data.draw(st.lists(st.integers(1, 30), max_size=2, unique=True))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6))
    abort_at = data.draw(st.integers(0, 40))

    def before(step: int) -> None:
        if step in changes:
            changes.remove(step)
            version = served.health().weight_version + 1
            served.update_weights(quantized_bundle(OTHER_WEIGHTS if version % 2 else WEIGHTS, MODEL, version=version))
        if step == abort_at:
            served.abort([0])

    log = ForwardLog(served, before_step=before)
    run(log, [request(i, tuple(p), max_new_tokens=1 + 2 * i % 8) for i, p in enumerate(prompts)])
