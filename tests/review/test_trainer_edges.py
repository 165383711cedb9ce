"""What the loop does at its edges: skipped and non-finite steps, token identity, and what a compact record can show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainers import batches_of, rollout, run_config, samples_of, trainer_of

from megatron_trace.config import RunConfig
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import tokens_digest
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import guided
from megatron_trace.rollout.build import build_engine
from megatron_trace.trainer.batch import row_request
from megatron_trace.trainer.run import Run


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return run_config()


def test_a_skipped_update_can_be_followed_by_a_refit(config: RunConfig, lone_process: None) -> None:
    """A step without trained tokens is skipped and counted, and the run goes on."""
    trainer, engine, task = trainer_of(config), build_engine(config), SimpleNamespace(tokenizer=SimpleNamespace(pad_id=0))
    run: Any = SimpleNamespace(config=config, trainer=trainer, engine=engine, task=task, _probed=False)
    for _ in range(2):
        Run.serve_weights(run)
        assert engine.health().weight_version == 0
        skipped = trainer.step([], lambda *_: (torch.zeros(()), None), denominator=0, learning_rate=1e-3)
        assert not skipped.applied and trainer.version == 0


def test_a_non_finite_gradient_never_reaches_the_weights(config: RunConfig, lone_process: None) -> None:
    trainer = trainer_of(config)
    batches = batches_of(config, samples_of(rollout(config)))
    result = trainer.step(
        batches,
        lambda logprobs, batch: (torch.where(batch.mask, logprobs, 0.0).sum() * float("nan"), None),
        denominator=1.0,
        learning_rate=1e-3,
    )
    assert not result.applied and not result.finite and trainer.version == 0
    assert all(torch.isfinite(p).all() for p in trainer.gpt.parameters())


def test_the_trainer_asks_for_the_tokens_it_holds(config: RunConfig, lone_process: None) -> None:
    """cases/capture.md D13: length and ids are compared with what the engine recorded."""
    trajectory = rollout(config)[0]
    assert trajectory.guidance.tokens_digest == tokens_digest(trajectory.tokens[:-1])
    assert row_request(trajectory).tokens_digest == trajectory.guidance.tokens_digest


def test_the_flip_rate_of_a_compact_record_is_not_zero_where_codes_differ() -> None:
    """A rollout so far away that more than a third of guided codes are wrong must not be reported as flip rate 0."""
    torch.manual_seed(0)
    x, other = torch.randn(64, 64), torch.randn(64, 64)
    q, record = guided.quantize_and_record(other, bits=1)
    record = guided.GuidanceRecord(
        bits=1,
        payload=record.payload,
        block_scale=record.block_scale,
        global_amax=record.global_amax,
        valid=torch.ones(64, dtype=torch.bool),
    )
    wrong = float((guided.guided_codes(x, record) != guided.tensor_codes(q)).float().mean())
    assert wrong > 0.33
    probe.reset()
    probe.flips(GuidanceFrame(Rounding.GUIDED), 0, "fc1_in", x, record)
    count = probe.flip_counts["fc1_in"]
    probe.reset()
    assert (count.values, count.basis) == (64 * 64, "mantissa bit")
    assert count.with_guidance is None, "the recorded bit cannot tell"
    assert count.without_guidance / count.values > 0.1
