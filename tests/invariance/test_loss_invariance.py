"""Loss, gradients and rounding do not depend on how samples are ordered and cut into micro-batches (DESIGN.md 3.8)."""

from __future__ import annotations

import pytest
import torch
from trainers import (
    Step,
    assert_equal_tensors,
    batches_of,
    one_batch,
    relative_error,
    rollout,
    run_config,
    samples_of,
    step,
    trainer_of,
)

from megatron_trace.config import RunConfig
from megatron_trace.guidance.frames import Rounding
from megatron_trace.rollout.protocol import Trajectory

RELATIVE = 3e-6
"""FP32: sums over rows of another matrix shape differ by about 1e-6 of log-probabilities that stand in exponents."""
TOKENS = 57


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return run_config(precision={"compute_dtype": "float32"})


@pytest.fixture(scope="module")
def trajectories(config: RunConfig) -> list[Trajectory]:
    """Eight samples of 4 to 25 tokens from an engine with TP=2, so that rollout and trainer do not round alike everywhere."""
    return rollout(config, tensor_parallel=2)


def outcome(config: RunConfig, trajectories: list[Trajectory], *, size: int, order: int = 1, rounding: Rounding) -> Step:
    trainer = trainer_of(config)
    assert sum(len(t.logprobs) for t in trajectories) == TOKENS
    batches = batches_of(config, samples_of(trajectories)[::order], size=size, rounding=rounding)[::order]
    assert len(batches) == -(-len(trajectories) // size)
    return step(trainer, batches, denominator=TOKENS)


def assert_equal(a: Step, b: Step) -> None:
    # a sum over TOKENS terms of both signs and of the order of 1
    assert a.loss == pytest.approx(b.loss, abs=RELATIVE * TOKENS)
    assert a.result.grad_norm == pytest.approx(b.result.grad_norm, rel=RELATIVE)
    assert_equal_tensors(a.gradients, b.gradients, relative=RELATIVE)
    assert_equal_tensors(a.weights, b.weights, relative=RELATIVE)


@pytest.mark.parametrize("rounding", [Rounding.GUIDED, Rounding.NEAREST, Rounding.BF16], ids=lambda r: r.value)
def test_any_micro_batch_split_gives_the_same_step(config, trajectories, rounding: Rounding) -> None:
    whole = outcome(config, trajectories, size=8, rounding=rounding)
    assert sum(float(g.abs().sum()) > 0 for g in whole.gradients.values()) == len(whole.gradients)
    for size in (1, 3, 4):
        assert_equal(outcome(config, trajectories, size=size, rounding=rounding), whole)


def test_sample_order_does_not_matter(config, trajectories) -> None:
    forwards = outcome(config, trajectories, size=4, rounding=Rounding.GUIDED)
    assert_equal(outcome(config, trajectories, size=4, order=-1, rounding=Rounding.GUIDED), forwards)


def test_a_longer_neighbour_and_its_padding_change_nothing(config, trajectories) -> None:
    trainer = trainer_of(config)
    shortest, longest = (f(trajectories, key=lambda t: len(t.tokens)) for f in (min, max))
    together = trainer.logprobs([one_batch(config, [longest, shortest])])[0]
    for row, t in enumerate((longest, shortest)):
        by_itself = trainer.logprobs([one_batch(config, [t])])[0][0]
        torch.testing.assert_close(together[row, : len(t.tokens) - 1], by_itself, rtol=1e-5, atol=2e-6)


def test_a_step_without_a_trained_token_changes_nothing(config, trajectories) -> None:
    trainer = trainer_of(config)
    before = {n: p.detach().clone() for n, p in trainer.gpt.named_parameters()}
    result = trainer.step(batches_of(config, samples_of(trajectories)), None, denominator=0.0, learning_rate=1.0)
    assert (result.applied, result.collected, trainer.version) == (False, [], 0)
    assert all(torch.equal(p, before[n]) for n, p in trainer.gpt.named_parameters())


def test_gradient_is_that_of_the_mean_over_trained_tokens(config, trajectories) -> None:
    """Twice the denominator is half of every gradient and of the norm."""
    batches = batches_of(config, samples_of(trajectories))
    one, two = (step(trainer_of(config), batches, denominator=d) for d in (10.0, 20.0))
    assert one.result.grad_norm == pytest.approx(2 * two.result.grad_norm, rel=RELATIVE)
    for name, gradient in one.gradients.items():
        assert relative_error(two.gradients[name] * 2, gradient) < RELATIVE, name
