"""The distribution tokens are drawn from, and the log-probability reported for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_trace.rollout.embedded.sampler import SamplingBatch, sample, uniform_stream


def batch(rows: int, *, temperature=1.0, top_p=1.0, uniform=0.5, forced=-1) -> SamplingBatch:
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return SamplingBatch(
        temperature=column(temperature, torch.float64),
        top_p=column(top_p, torch.float64),
        uniform=column(uniform, torch.float64),
        forced=column(forced, torch.int64),
    )


PROBS = [0.1, 0.4, 0.2, 0.3]
LOGITS = torch.tensor([PROBS]).log()


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 2), (0.7001, 3), (1 - 2**-53, 3)]
)
def test_inverse_cdf(uniform: float, token: int) -> None:
    tokens, logprobs = sample(LOGITS, batch(1, uniform=uniform))
    assert tokens.tolist() == [token]
    assert logprobs[0] == pytest.approx(math.log(PROBS[token]), abs=1e-6)


def test_temperature_divides_logits_and_shows_in_the_logprob() -> None:
    tempered = np.array(PROBS) ** (1 / 0.5)
    tempered /= tempered.sum()
    tokens, logprobs = sample(LOGITS, batch(1, temperature=0.5, uniform=tempered[0] + 1e-6))
    assert tokens.tolist() == [1] and logprobs[0] == pytest.approx(math.log(tempered[1]), abs=1e-6)


def test_greedy_takes_the_lowest_id_of_a_tie_and_reports_the_untempered_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    tokens, logprobs = sample(logits, batch(1, temperature=0.0, top_p=0.1, uniform=0.999))
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(2 - math.log(1 + 2 * math.e**2 + math.e), abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3}), (0.91, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_and_renormalises(top_p: float, kept: set[int]) -> None:
    grid = torch.arange(0, 1, 1 / 500, dtype=torch.float64)
    tokens, logprobs = sample(LOGITS.expand(500, 4), batch(500, top_p=top_p, uniform=grid))
    assert set(tokens.tolist()) == kept
    mass = sum(PROBS[t] for t in kept)
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(math.log(PROBS[token] / mass), abs=1e-6)
    for token in kept:
        assert tokens.eq(token).double().mean() == pytest.approx(PROBS[token] / mass, abs=5e-3)


def test_rows_keep_their_own_settings() -> None:
    rows = batch(3, temperature=[0.0, 1.0, 1.0], top_p=[1.0, 1.0, 0.1], uniform=0.95)
    tokens, logprobs = sample(LOGITS.expand(3, 4), rows)
    assert tokens.tolist() == [1, 3, 1]
    np.testing.assert_allclose(logprobs.numpy(), np.log([0.4, 0.3, 1.0]), atol=1e-6)


def test_forced_token_reports_its_logprob_under_the_same_distribution() -> None:
    tokens, logprobs = sample(LOGITS.expand(2, 4), batch(2, top_p=[1.0, 0.5], forced=[0, 0]))
    assert tokens.tolist() == [0, 0]
    assert logprobs[0] == pytest.approx(math.log(0.1), abs=1e-6) and logprobs[1] == -math.inf


def test_streams_depend_on_seed_and_sample_alone() -> None:
    expected = np.random.Generator(np.random.Philox(key=[7, 3])).random(5)
    assert uniform_stream(seed=7, sample_id=3, length=5).tolist() == expected.tolist()
    assert uniform_stream(seed=7, sample_id=3, length=9)[:5].tolist() == expected.tolist()
    others = [uniform_stream(seed=s, sample_id=i, length=5).tolist() for s, i in ((7, 4), (8, 3), (3, 7))]
    assert expected.tolist() not in others
