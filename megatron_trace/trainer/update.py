"""From experience to new weights: proximal log-probabilities once per batch, then one optimiser step per mini-batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_trace.config import RunConfig
from megatron_trace.guidance.frames import Rounding
from megatron_trace.modeling.site_probe import FlipCount, probe
from megatron_trace.rl.losses import LossConfig, LossInputs, policy_loss
from megatron_trace.rl.metrics import PolicyMetrics
from megatron_trace.trainer.batch import MicroBatch, Sample, micro_batches
from megatron_trace.trainer.collectives import gathered, global_sum, merge_metrics
from megatron_trace.trainer.experience import Experience
from megatron_trace.trainer.megatron import MegatronTrainer


@dataclass(frozen=True)
class UpdateResult:
    """Metrics of all optimiser steps on one rollout, over all ranks.

    ``skipped`` counts steps that changed nothing, for want of a trained token or (``nonfinite``) of a finite gradient;
    ``grad_norm`` is the mean over the others.
    """

    policy: PolicyMetrics
    loss: float
    grad_norm: float
    skipped: int
    nonfinite: int
    sites: dict[str, dict[str, Any]]


def loss_config(config: RunConfig) -> LossConfig:
    """The loss this run optimises."""
    a = config.algorithm
    return LossConfig(objective=a.objective, clip_low=a.clip_low, clip_high=a.clip_high, truncation=a.truncation)


def update(trainer: MegatronTrainer, experience: Experience, *, learning_rate: float, pad_id: int) -> UpdateResult:
    """Train on ``experience``, split into ``updates_per_rollout`` mini-batches by sample. Collective."""
    config = trainer.config
    settings = loss_config(config)
    count = config.algorithm.updates_per_rollout
    layers = trainer.local_layers
    minibatches = [_batches(experience, experience.samples[i::count], config, pad_id, layers) for i in range(count)]
    if count > 1:  # with one step the proximal policy is the current one, detached
        minibatches = _with_proximal(trainer, minibatches)
    probe.reset()

    def loss(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, tuple[float, PolicyMetrics]]:
        out = policy_loss(loss_inputs(logprobs, batch), settings, denominator=1.0)
        return out.loss, (float(out.loss.detach()), out.metrics)

    total_loss, parts, norms, skipped, nonfinite = 0.0, [], [], 0, 0
    for batches in minibatches:
        tokens = global_sum(sum(int(b.mask.sum()) for b in batches))
        result = trainer.step(batches, loss, denominator=tokens, learning_rate=learning_rate)
        skipped += not result.applied
        nonfinite += not result.finite
        norms += [result.grad_norm] if result.applied else []
        total_loss += global_sum(sum(value for value, _ in result.collected)) / max(tokens, 1.0)
        parts += [metrics for _, metrics in result.collected]
    if norms:
        trainer.calibrate_kv()
    else:  # no new version: the engine keeps its amax, and so must the trainer
        trainer.forget_kv_range()
    return UpdateResult(
        policy=merge_metrics(parts),
        loss=total_loss / count,
        grad_norm=sum(norms) / max(len(norms), 1),
        skipped=skipped,
        nonfinite=nonfinite,
        sites=site_summary(),
    )


def loss_inputs(logprobs: torch.Tensor, batch: MicroBatch) -> LossInputs:
    """What the loss needs of one micro-batch, given the current log-probabilities [B, S]."""
    return LossInputs(
        logprobs=logprobs,
        proximal_logprobs=batch.proximal_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
    )


def site_summary() -> dict[str, dict[str, Any]]:
    """Per site, over all ranks: guided and fallback tokens, and the fields of ``FlipCount``."""
    merged: dict[str, dict[str, Any]] = {}
    for guided, fallback, flips in gathered(
        (dict(probe.guided_tokens), dict(probe.fallback_tokens), _plain(probe.flip_counts))
    ):
        for site in guided.keys() | fallback.keys():
            entry = merged.setdefault(site, {"guided": 0, "fallback": 0} | asdict(FlipCount()))
            entry["guided"] += guided.get(site, 0)
            entry["fallback"] += fallback.get(site, 0)
            for name, value in flips.get(site, {}).items():
                if value is not None:
                    entry[name] = value if name == "basis" else (entry[name] or 0) + value
    return merged


def _plain(flip_counts: dict[str, FlipCount]) -> dict[str, dict[str, Any]]:
    return {site: asdict(count) for site, count in flip_counts.items()}


def _batches(
    experience: Experience, samples: list[Sample], config: RunConfig, pad_id: int, layers: tuple[int, ...]
) -> list[MicroBatch]:
    return micro_batches(
        samples,
        size=config.trainer.micro_batch_size,
        store=experience.store,
        rounding=Rounding(config.trainer_forward),
        pad_id=pad_id,
        measure_flips=True,
        layers=layers,
    )


def _with_proximal(trainer: MegatronTrainer, minibatches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
    """Log-probabilities under the weights the update starts from, all computed before the first optimiser step."""
    flat = [batch for batches in minibatches for batch in batches]
    proximal = iter(trainer.logprobs(flat))
    return [[batch.with_proximal(next(proximal)) for batch in batches] for batches in minibatches]
