"""One optimiser step of the same model on the same samples under several layouts: run by one process and by several.

As a script, under torchrun: ``cases.py OUT`` writes ``OUT/rank_<r>.pt`` with the outcome of every case of a two-process world.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from trainers import batches_of, guided_site_codes, rollout, run_config, samples_of, step, trainer_of

from megatron_trace.rollout.protocol import Trajectory
from megatron_trace.rollout.refit_digest import digest_bundle
from megatron_trace.trainer.batch import Sample
from megatron_trace.trainer.refit import build_bundle

STARVING_EXPERTS = (0, 1)
"""All that the ``starved`` trajectories are routed to: with EP=2 the second rank's experts get nothing."""


@dataclass(frozen=True)
class Case:
    """``starved``: replay routes to two experts only; ``by_length``: rank 0 has the short samples, else the first ones."""

    expert_parallel: int
    starved: bool = False
    by_length: bool = False


CASES = {
    "ep2": Case(expert_parallel=2),
    "ep1": Case(expert_parallel=1),
    "ep2 by length": Case(expert_parallel=2, by_length=True),
    "ep1 by length": Case(expert_parallel=1, by_length=True),
    "ep2 starved": Case(expert_parallel=2, starved=True),
    "ep1 starved": Case(expert_parallel=1, starved=True),
}


@dataclass
class Outcome:
    """What one process saw; tensors by Hugging Face name, ``codes`` (ladder indices) by (sample, layer, guided site)."""

    loss: float
    grad_norm: float
    applied: bool
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    first_digest: str
    codes: dict[tuple[int, int, str], torch.Tensor]
    kv_amax: dict[tuple[int, str], float]
    longest: int


def sent_to_two_experts(trajectory: Trajectory) -> Trajectory:
    """The trajectory with every recorded route replaced by ``STARVING_EXPERTS``."""
    assert trajectory.routes is not None
    experts = np.broadcast_to(np.array(STARVING_EXPERTS, dtype=np.uint8), trajectory.routes.experts.shape).copy()
    return replace(trajectory, routes=replace(trajectory.routes, experts=experts))


def share(samples: list[Sample], case: Case, rank: int, world: int) -> list[Sample]:
    ordered = sorted(samples, key=lambda s: len(s.trajectory.tokens)) if case.by_length else samples
    size = len(ordered) // world
    return ordered[rank * size : (rank + 1) * size]


def run(case: Case) -> Outcome:
    """Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = run_config(precision={"compute_dtype": "float32"}, parallel={"expert": case.expert_parallel})
    trajectories = rollout(config, tensor_parallel=2)
    if case.starved:
        trajectories = [sent_to_two_experts(t) for t in trajectories]
    everyone = samples_of(trajectories)
    mine = share(everyone, case, rank, world)
    trainer = trainer_of(config)
    bundle = build_bundle(trainer, quantized=True, contract_fingerprint=config.contract.fingerprint)
    codes = {
        (s.trajectory.sample_id, layer, site): value
        for s in mine
        for (layer, site), value in guided_site_codes(trainer, config, s.trajectory).items()
    }
    batches = batches_of(config, mine, size=2)
    tokens = float(sum(len(s.trajectory.logprobs) for s in everyone))
    done = step(trainer, batches, denominator=tokens)
    return Outcome(
        loss=done.loss,
        grad_norm=done.result.grad_norm,
        applied=done.result.applied,
        gradients=done.gradients,
        weights=done.weights,
        first_digest=digest_bundle(bundle),
        codes=codes,
        kv_amax=trainer.calibrate_kv(),
        longest=max(b.tokens.shape[1] for b in batches),
    )


def main() -> None:
    from megatron_trace.platform.device import init_process_group

    rank, _ = init_process_group(timeout_s=60)
    torch.set_num_threads(1)
    outcomes = {name: run(case) for name, case in CASES.items()}
    torch.save({name: vars(outcome) for name, outcome in outcomes.items()}, Path(sys.argv[1]) / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
