"""From trajectories to padded micro-batches: which position predicts which token, and which weight version it must carry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_trace.guidance.frames import Rounding
from megatron_trace.modeling.logprobs import token_logprobs
from megatron_trace.rollout.protocol import Trajectory
from megatron_trace.trainer import warmup
from megatron_trace.trainer.batch import Sample, micro_batch, micro_batches, row_request

PAD = 9


def trajectory(sample_id: int, prompt: list[int], response: list[int], versions: list[int] | None = None) -> Trajectory:
    return Trajectory(
        sample_id=sample_id,
        tokens=np.array(prompt + response),
        prompt_length=len(prompt),
        logprobs=-np.array(response, dtype=np.float32) / 10,
        token_versions=np.array(versions or [4] * len(response), dtype=np.int32),
        finish_reason="stop",
    )


SHORT, LONG = trajectory(2, [1, 2], [3]), trajectory(1, [5], [6, 7, 8])


def test_every_position_stands_beside_the_token_it_predicts() -> None:
    batch = micro_batch([Sample(LONG, 0.5), Sample(SHORT, -1.0)], store=None, rounding=Rounding.BF16, pad_id=PAD)
    assert batch.sample_ids == (1, 2)
    assert batch.tokens.tolist() == [[5, 6, 7], [1, 2, PAD]]
    assert batch.next_tokens.tolist() == [[6, 7, 8], [2, 3, PAD]]
    assert batch.mask.tolist() == [[True, True, True], [False, True, False]]
    torch.testing.assert_close(batch.behavior_logprobs, torch.tensor([[-0.6, -0.7, -0.8], [0.0, -0.3, 0.0]]))
    assert batch.advantages.tolist() == [[0.5] * 3, [-1.0] * 3]
    assert batch.frame.is_token.view(3, 2).T.tolist() == [[True, True, True], [True, True, False]]
    assert batch.frame.routes is None and batch.frame.rows is None and batch.proximal_logprobs is None
    proximal = torch.zeros(2, 3)
    assert batch.with_proximal(proximal).proximal_logprobs is proximal and batch.proximal_logprobs is None


def test_positions_that_sampled_carry_the_version_that_sampled() -> None:
    request = row_request(trajectory(3, [1, 2, 3], [4, 5, 6], versions=[7, 7, 8]))
    assert (request.sample_id, request.length, request.versions.tolist()) == (3, 5, [-1, -1, 7, 7, 8])


def test_micro_batches_hold_every_sample_once_shortest_first_and_measure_in_the_first() -> None:
    lengths = {0: 5, 1: 2, 2: 9, 3: 2, 4: 7}
    samples = [Sample(trajectory(i, [1], list(range(1, n + 1)))) for i, n in lengths.items()]
    batches = micro_batches(samples, size=2, store=None, rounding=Rounding.BF16, pad_id=PAD, measure_flips=True)
    assert [b.sample_ids for b in batches] == [(1, 3), (0, 4), (2,)]
    assert [b.tokens.shape[1] for b in batches] == [2, 7, 9]
    assert [b.frame.measure_flips for b in batches] == [True, False, False]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_log_probabilities_are_of_the_tempered_softmax_in_fp32(temperature: float) -> None:
    torch.manual_seed(0)
    logits, tokens = (10 * torch.randn(2, 5, 11)).bfloat16(), torch.randint(0, 11, (2, 5))
    found = token_logprobs(logits, tokens, temperature=temperature)
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(-1, tokens[..., None])[..., 0]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)


def test_warm_up_rate_rises_over_a_tenth_and_falls_to_a_tenth() -> None:
    rates = [warmup._rate(step, 100, 2.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) == max(rates)
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[99] == pytest.approx(0.2, abs=0.03)
    assert warmup._rate(0, 1, 2.0) == 2.0
