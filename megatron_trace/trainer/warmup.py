"""Supervised warm-up: a random model becomes a partly right policy by imitating written-out solutions, in BF16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_trace.guidance.frames import Rounding
from megatron_trace.rollout.protocol import Trajectory
from megatron_trace.tasks.base import Problem, Task
from megatron_trace.trainer.batch import MicroBatch, Sample, micro_batches
from megatron_trace.trainer.collectives import global_sum
from megatron_trace.trainer.megatron import MegatronTrainer, data_parallel

LOAD_BALANCING = 1e-2
"""Coefficient of Megatron's auxiliary loss during warm-up, so that a random router does not starve experts."""


def supervised_batches(trainer: MegatronTrainer, task: Task, problems: Sequence[Problem]) -> list[MicroBatch]:
    """This rank's share of ``problems`` with their solutions, as BF16 micro-batches."""
    rank, size = data_parallel()
    layout = task.supervised_batch(problems[rank::size], sequence_length=trainer.config.trainer.sequence_length)
    samples = [Sample(_as_trajectory(i, tokens[:n], mask[:n])) for i, (tokens, mask, n) in enumerate(_rows(layout))]
    size = trainer.config.trainer.micro_batch_size
    return micro_batches(samples, size=size, store=None, rounding=Rounding.BF16, pad_id=task.tokenizer.pad_id)


def warmup_step(trainer: MegatronTrainer, task: Task, step: int) -> dict[str, float]:
    """One supervised step on problems ``step * batch_size`` onwards of the training stream. Collective."""
    section = trainer.config.warmup
    problems = task.train_problems(start=step * section.batch_size, count=section.batch_size)
    batches = supervised_batches(trainer, task, problems)
    tokens = global_sum(sum(int(b.mask.sum()) for b in batches))
    with trainer.load_balancing(LOAD_BALANCING):
        result = trainer.step(
            batches,
            _negative_log_likelihood,
            denominator=tokens,
            learning_rate=_rate(step, section.steps, section.learning_rate),
        )
    return {"loss": global_sum(sum(result.collected)) / tokens, "grad_norm": result.grad_norm, "tokens": tokens}


def calibrate(trainer: MegatronTrainer, task: Task) -> None:
    """Set the static amax of K and V from one BF16 forward over supervised problems. Collective."""
    problems = task.train_problems(start=0, count=trainer.config.warmup.batch_size)
    trainer.forget_kv_range()
    trainer.logprobs(supervised_batches(trainer, task, problems))
    trainer.calibrate_kv()


def _negative_log_likelihood(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, float]:
    loss = -torch.where(batch.mask, logprobs, 0.0).sum()
    return loss, float(loss.detach())


def _rate(step: int, steps: int, peak: float) -> float:
    """Linear rise over the first tenth, then linear fall to a tenth of the peak."""
    rise = max(1, steps // 10)
    return peak * min((step + 1) / rise, 1.0 - 0.9 * max(0, step - rise) / max(1, steps - rise))


def _rows(layout: object) -> list[tuple[np.ndarray, np.ndarray, int]]:
    return list(zip(layout.tokens, layout.response_mask, layout.lengths.tolist(), strict=True))  # type: ignore[attr-defined]


def _as_trajectory(sample_id: int, tokens: np.ndarray, response_mask: np.ndarray) -> Trajectory:
    response = int(response_mask.sum())
    return Trajectory(
        sample_id=sample_id,
        tokens=tokens,
        prompt_length=len(tokens) - response,
        logprobs=np.zeros(response, dtype=np.float32),
        token_versions=np.full(response, -1, dtype=np.int32),
        finish_reason="stop",
    )
