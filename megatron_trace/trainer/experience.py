"""From prompts to scored trajectories with advantages: this rank's share of one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_trace.config import RunConfig
from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.guidance.probe import require_records
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.guidance.store import GuidanceStore
from megatron_trace.rl.advantages import grpo_advantages
from megatron_trace.rollout.protocol import GenerationRequest, RolloutEngine, SamplingParams, Trajectory
from megatron_trace.tasks.base import Problem, Task
from megatron_trace.trainer.batch import Sample
from megatron_trace.trainer.megatron import data_parallel


@dataclass(frozen=True)
class Experience:
    """This rank's trajectories with rewards and advantages, and the store that holds their guidance and routes."""

    samples: list[Sample]
    rewards: list[float]
    zero_variance: int
    """Samples of groups whose rewards are all equal."""
    store: GuidanceStore
    invalid_guidance_rows: int = 0
    """Rows that the engine was to record and marked invalid: rounded to nearest."""
    invalid_route_rows: int = 0
    """Rows without valid routes: the trainer's own router chooses."""

    @property
    def response_tokens(self) -> int:
        return sum(len(s.trajectory.logprobs) for s in self.samples)

    @property
    def truncated(self) -> int:
        """Responses cut at the length limit."""
        return sum(s.trajectory.finish_reason == "length" for s in self.samples)


def guidance_spec(config: RunConfig) -> GuidanceSpec | None:
    """What the engine records for this run's trainer; None unless the forward is guided."""
    if config.trainer_forward != "guided":
        return None
    section = config.guidance
    return GuidanceSpec(
        bits=section.bits, layers=config.guided_layers, sites=section.sites, prompt_tokens=section.prompt_tokens
    )


def generate(
    engine: RolloutEngine, problems: Sequence[Problem], config: RunConfig, *, stop_ids: tuple[int, ...], step: int
) -> list[Trajectory]:
    """``samples_per_prompt`` responses to each of this rank's ``problems``; sample ids are unique over ranks and steps."""
    rank, size = data_parallel()
    group = config.algorithm.samples_per_prompt
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        seed=config.run.seed,
        stop_token_ids=stop_ids,
    )
    first = step * config.algorithm.prompts_per_step
    requests = [
        GenerationRequest(sample_id=(first + rank + i * size) * group + g, prompt=problem.prompt_ids, sampling=sampling)
        for i, problem in enumerate(problems)
        for g in range(group)
    ]
    return engine.generate(requests, capture=guidance_spec(config), capture_routes=True)


def collect(engine: RolloutEngine, task: Task, config: RunConfig, *, step: int) -> Experience:
    """Roll out this rank's prompts of ``step``, score them and normalise rewards within each prompt's samples."""
    rank, size = data_parallel()
    count = config.algorithm.prompts_per_step
    first = config.warmup.steps * config.warmup.batch_size  # where the warm-up left the training stream
    problems = task.train_problems(start=first + step * count, count=count)[rank::size]
    trajectories = generate(engine, problems, config, stop_ids=(task.tokenizer.eos_id,), step=step)
    group = config.algorithm.samples_per_prompt
    rewards = [task.reward(problems[i // group], t.tokens[t.prompt_length :].tolist()) for i, t in enumerate(trajectories)]
    groups = torch.arange(len(trajectories)) // group
    advantages = grpo_advantages(torch.tensor(rewards), groups)
    store = GuidanceStore(contract_fingerprint=config.contract.fingerprint)
    invalid = [0, 0]
    for trajectory in trajectories:
        for i, count in enumerate(_invalid_rows(trajectory, config)):
            invalid[i] += count
        store.put(trajectory.guidance, trajectory.routes)
    return Experience(
        samples=[Sample(t, float(a)) for t, a in zip(trajectories, advantages.advantages, strict=True)],
        rewards=rewards,
        zero_variance=int(advantages.zero_variance.sum()),
        store=store,
        invalid_guidance_rows=invalid[0],
        invalid_route_rows=invalid[1],
    )


def _invalid_rows(trajectory: Trajectory, config: RunConfig) -> tuple[int, int]:
    """Rows of guidance and of routes that are invalid though wanted; GuidanceError where a sample has none of them at all."""
    guided = config.trainer_forward == "guided"
    for what, segment in (("guidance", trajectory.guidance if guided else trajectory.routes), ("routes", trajectory.routes)):
        if segment is None:
            raise GuidanceError(f"the engine returned no {what} for sample {trajectory.sample_id}: it must record them for all")
    first = 0 if config.guidance.prompt_tokens else trajectory.prompt_length
    guidance = int((~trajectory.guidance.valid[first:]).sum()) if guided and trajectory.guidance is not None else 0
    assert trajectory.routes is not None
    return guidance, int((~trajectory.routes.valid).sum())


def greedy_accuracy(engine: RolloutEngine, task: Task, config: RunConfig) -> tuple[float, int]:
    """(sum of rewards, problems) of this rank's share of the held-out split, decoded greedily by the engine as it serves."""
    rank, size = data_parallel()
    problems = task.heldout_problems()[rank::size]
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens, temperature=0.0, stop_token_ids=(task.tokenizer.eos_id,)
    )
    total = 0.0
    for start in range(0, len(problems), config.evaluation.batch_size):
        part = problems[start : start + config.evaluation.batch_size]
        requests = [GenerationRequest(sample_id=i, prompt=p.prompt_ids, sampling=sampling) for i, p in enumerate(part)]
        for problem, t in zip(part, engine.generate(requests), strict=True):
            total += task.reward(problem, t.tokens[t.prompt_length :].tolist())
    return total, len(problems)


def probe_engine(engine: RolloutEngine, task: Task, config: RunConfig) -> None:
    """Ask for two tokens and require the records the trainer relies on; GuidanceError names what is missing.

    The prompt is padding, with which no problem begins: pages that stay findable in the engine serve no later request, and a
    resumed run, which asks again, computes what an uninterrupted one does.
    """
    prompt = (task.tokenizer.pad_id,) * 4
    request = GenerationRequest(sample_id=0, prompt=prompt, sampling=SamplingParams(max_new_tokens=2, temperature=0.0))
    spec = guidance_spec(config)
    trajectory = engine.generate([request], capture=spec, capture_routes=True)[0]
    require_records(
        trajectory.guidance,
        trajectory.routes,
        layout=None if spec is None else RecordLayout.build(spec, config.model),
        route_layers=config.model.num_layers,
        rows=len(trajectory.tokens) - 1,
        prompt_rows_recorded=config.guidance.prompt_tokens,
    )
