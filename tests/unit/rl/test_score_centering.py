"""Score Centering: with the term added, the expected score under the sampler is zero; enumerated over a tiny vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_trace.rl.losses import LossConfig, LossInputs, policy_loss
from megatron_trace.rl.score_centering import score_centering_loss

V, K = 7, 4
ADVANTAGE = -1.7


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Trainer logits with gradient, and a sampler q whose tail outside the top K is exactly proportional to p."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(V, generator=generator, dtype=torch.float64).sort(descending=True).values
    p = logits.softmax(-1)
    q = p.clone()
    q[:K] = p[:K] * torch.exp(0.5 * torch.randn(K, generator=generator, dtype=torch.float64))
    q[:K] *= 0.8 / q[:K].sum()
    q[K:] *= 0.2 / q[K:].sum()
    return logits.requires_grad_(), q


@pytest.mark.parametrize(
    ("weighting", "low", "high"), [("none", 0.0, None), ("tis", 0.0, 1.2), ("tis", 0.9, 1.1), ("tis", 0.0, 100.0)]
)
def test_expected_gradient_vanishes(weighting: str, low: float, high: float | None) -> None:
    logits, q = policies()
    log_p = logits.log_softmax(-1)
    weight = torch.ones_like(q) if weighting == "none" else (log_p.detach().exp() / q).clamp(low, high)
    centre = score_centering_loss(
        topk_logprobs=log_p[:K].expand(1, K),
        topk_behavior_logprobs=q[:K].log().expand(1, K),
        advantages=torch.tensor([ADVANTAGE], dtype=torch.float64),
        mask=torch.tensor([True]),
        weighting=weighting,
        low=low,
        high=high,
    )
    drift = torch.autograd.grad((q * -ADVANTAGE * weight * log_p).sum(), logits, retain_graph=True)[0]
    correction = torch.autograd.grad(centre.sum(), logits)[0]
    torch.testing.assert_close(drift + correction, torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-14)
    if high != 100.0:
        assert drift.abs().max() > 1e-3


def test_unused_slots_and_masked_tokens_are_ignored() -> None:
    logits, q = policies()
    log_p = logits.log_softmax(-1)
    minus, nan = -math.inf, math.nan
    padded_p = torch.cat([log_p[:K], torch.tensor([nan, nan], dtype=torch.float64)])
    padded_q = torch.cat([q[:K].log(), torch.tensor([minus, minus], dtype=torch.float64)])
    common = {"weighting": "none"}
    expected = score_centering_loss(
        topk_logprobs=log_p[None, :K],
        topk_behavior_logprobs=q[None, :K].log(),
        advantages=torch.ones(1),
        mask=torch.ones(1),
        **common,
    )
    garbage = torch.full((K + 2,), nan, dtype=torch.float64)
    got = score_centering_loss(
        topk_logprobs=torch.stack([padded_p, garbage]),
        topk_behavior_logprobs=torch.stack([padded_q, garbage]),
        advantages=torch.tensor([1.0, nan]),
        mask=torch.tensor([1, 0]),
        **common,
    )
    assert got[0].item() == pytest.approx(expected.item(), rel=1e-12) and got[1].item() == 0.0
    assert torch.isfinite(torch.autograd.grad(got.sum(), logits)[0]).all()


def test_it_enters_the_policy_loss_per_token() -> None:
    logits, q = policies()
    log_p = logits.log_softmax(-1)
    centre = score_centering_loss(
        topk_logprobs=log_p[:K].expand(1, 2, K),
        topk_behavior_logprobs=q[:K].log().expand(1, 2, K),
        advantages=torch.full((1, 2), ADVANTAGE),
        mask=torch.ones(1, 2),
        weighting="tis",
        high=2.0,
    )
    chosen = log_p[:2].expand(1, 2)
    inputs = LossInputs(chosen, None, q[:2].log().expand(1, 2), torch.full((1, 1), ADVANTAGE), torch.ones(1, 2))
    plain = policy_loss(inputs, LossConfig()).loss
    centred = policy_loss(replace(inputs, auxiliary_loss=centre), LossConfig()).loss
    assert centred.item() - plain.item() == pytest.approx(centre.mean().item(), rel=1e-12)


def test_tis_needs_its_bound() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="high=None"):
        score_centering_loss(topk_logprobs=one, topk_behavior_logprobs=one, advantages=one[0], mask=one[0], weighting="tis")
