"""What a rollout must bring back for training, and what the start-up probe asks for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from trainers import FULL, rollout, run_config, trainer_of

from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.rollout.build import build_engine
from megatron_trace.tasks.base import Problem
from megatron_trace.trainer import experience
from megatron_trace.trainer.refit import build_bundle, refit

PAD = 0


class Task:
    """Two-token problems, one reward."""

    tokenizer = SimpleNamespace(eos_id=63, pad_id=PAD)

    def train_problems(self, *, start: int, count: int) -> list[Problem]:
        return [Problem(i, "", (5, 9 + i), "", "") for i in range(start, start + count)]

    def reward(self, problem: Problem, response: list[int]) -> float:
        return 0.0


class Engine:
    """Gives the trajectories it was made with."""

    def __init__(self, trajectories) -> None:
        self.trajectories = trajectories

    def generate(self, requests, **_):
        return self.trajectories[: len(requests)]


def collect(trajectories, **sections):
    config = run_config(algorithm={"prompts_per_step": 1, "samples_per_prompt": 2}, **sections)
    return experience.collect(Engine(trajectories), Task(), config, step=0)


@pytest.fixture(scope="module")
def trajectories(lone_process: None):
    return rollout(run_config(), spec=FULL, prompts=[(5, 9), (5, 9)])


def test_invalid_rows_are_counted(trajectories) -> None:
    first, second = trajectories
    guidance = replace(first.guidance, valid=first.guidance.valid.copy())
    guidance.valid[[0, 3]] = False
    routes = replace(second.routes, valid=second.routes.valid.copy())
    routes.valid[1] = False
    flawed = [replace(first, guidance=guidance), replace(second, routes=routes)]
    found = collect(flawed)
    assert (found.invalid_guidance_rows, found.invalid_route_rows) == (2, 1)
    without_prompts = collect(flawed, guidance={"layers": "all", "bits": 4, "prompt_tokens": False})
    assert without_prompts.invalid_guidance_rows == 1, "prompt rows were not to be recorded"
    whole = collect(trajectories)
    assert (whole.invalid_guidance_rows, whole.invalid_route_rows) == (0, 0)


@pytest.mark.parametrize("what", ["guidance", "routes"])
def test_a_sample_without_records_ends_a_guided_run(trajectories, what: str) -> None:
    with pytest.raises(GuidanceError, match=f"the engine returned no {what} for sample 1"):
        collect([trajectories[0], replace(trajectories[1], **{what: None})])


def test_a_run_that_is_not_guided_needs_routes_only(trajectories) -> None:
    plain = [replace(t, guidance=None) for t in trajectories]
    assert collect(plain, precision={"trainer_forward": "qat"}).invalid_guidance_rows == 0


def test_the_probe_leaves_nothing_that_a_later_prompt_finds(lone_process: None) -> None:
    """A resumed run asks again: pages of a real prompt would then change what its first rollout computes."""
    config = run_config(rollout={"max_new_tokens": 8, "tensor_parallel": 1, "num_pages": 64, "page_size": 1})
    trainer, engine = trainer_of(config), build_engine(config)
    refit(engine, build_bundle(trainer, quantized=True, contract_fingerprint=config.contract.fingerprint))
    asked = []
    generate = engine.generate
    engine.generate = lambda requests, **k: asked.extend(requests) or generate(requests, **k)
    experience.probe_engine(engine, Task(), config)
    assert [set(r.prompt) for r in asked] == [{PAD}]


def test_the_rotary_base_is_not_cut_to_an_integer(lone_process: None) -> None:
    model = run_config().model.model_copy(update={"rope_theta": 1.9})
    trainer = trainer_of(run_config(model))
    width = model.head_dim
    wanted = [1.9 ** (-2 * i / width) for i in range(width // 2)]
    assert trainer.gpt.rotary_pos_emb.inv_freq.tolist() == pytest.approx(wanted, rel=1e-6)
