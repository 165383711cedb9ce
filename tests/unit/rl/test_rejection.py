"""Rejection rules by hand-made ratios; the veto; the denominator after rejection."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_trace.rl.losses import LossConfig, LossInputs, loss_denominator, policy_loss
from megatron_trace.rl.rejection import RejectionConfig, icepop, kpop, rejection_mask

RHO = torch.tensor([[1.0, 2.5, 0.3, 1.0], [1.2, 1.2, 1.2, 99.0], [1.0, 1.0, 1e-5, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)


def kept(config: RejectionConfig) -> list[list[bool]]:
    behavior = torch.where(MASK, torch.full_like(RHO, -2.0), math.nan)
    proximal = torch.where(MASK, -2.0 + RHO.log(), math.inf)
    return rejection_mask(proximal_logprobs=proximal, behavior_logprobs=behavior, mask=MASK, config=config).mask.tolist()


def rows(*text: str) -> list[list[bool]]:
    return [[letter == "x" for letter in row] for row in text]


def test_levels_and_veto() -> None:
    assert kept(RejectionConfig()) == MASK.tolist()
    assert kept(RejectionConfig(level="token", high=2.0)) == rows("x..x", "xxx.", "xx.x")
    assert kept(icepop()) == rows("xx.x", "xxx.", "xx.x")
    # products: 0.75, 1.728, 1e-5; geometric means 0.93, 1.2, 0.056
    assert kept(RejectionConfig(level="sequence", high=1.7)) == rows("xxxx", "....", "....")
    assert kept(RejectionConfig(level="geometric", high=1.1)) == rows("xxxx", "....", "....")
    assert kept(RejectionConfig(level="geometric", high=1.25)) == rows("xxxx", "xxx.", "....")
    assert kept(RejectionConfig(veto=1e-4)) == rows("xxxx", "xxx.", "....")
    assert kept(RejectionConfig(level="token", high=2.0, veto=1e-4)) == rows("x..x", "xxx.", "....")


def test_kpop_band_adapts_to_the_probability() -> None:
    """Ratio 3 passes for a rare token and fails for a likely one; a fixed band cannot do both."""
    q = torch.tensor([[0.001, 0.3, 0.9, 0.9, 0.9, 0.99]], dtype=torch.float64)
    p = torch.tensor([[0.003, 0.9, 0.95, 0.5, 0.99, 0.9]], dtype=torch.float64)  # the last two fail in one direction only
    result = rejection_mask(
        proximal_logprobs=p.log(), behavior_logprobs=q.log(), mask=torch.ones_like(p), config=kpop(threshold=0.1)
    )

    def divergence(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    expected = [max(divergence(a, b), divergence(b, a)) <= 0.1 for a, b in zip(p[0].tolist(), q[0].tolist(), strict=True)]
    assert result.mask[0].tolist() == expected == [True, False, True, False, False, False]
    certain = rejection_mask(
        proximal_logprobs=torch.zeros(1, 1), behavior_logprobs=torch.zeros(1, 1), mask=torch.ones(1, 1), config=kpop()
    )
    assert certain.mask.item() is True


def test_probability_gap() -> None:
    q = torch.tensor([[0.5, 0.5, 0.01]], dtype=torch.float64)
    p = torch.tensor([[0.79, 0.15, 0.2]], dtype=torch.float64)
    result = rejection_mask(
        proximal_logprobs=p.log(),
        behavior_logprobs=q.log(),
        mask=torch.ones_like(p),
        config=RejectionConfig(level="probability", threshold=0.3),
    )
    assert result.mask.tolist() == [[True, False, True]]
    assert result.rejected_tokens.item() == 1 and result.vetoed_tokens.item() == 0


def test_rejected_tokens_leave_the_denominator() -> None:
    """slime pull 657: with one of two tokens rejected the other counts whole, not half."""
    behavior = torch.full((1, 2), -2.0, dtype=torch.float64)
    proximal = behavior + torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    inputs = LossInputs(
        proximal.clone().requires_grad_(), proximal, behavior, torch.ones(1, 1), torch.ones(1, 2, dtype=torch.bool)
    )
    result = rejection_mask(proximal_logprobs=proximal, behavior_logprobs=behavior, mask=inputs.mask, config=icepop())
    smaller = inputs.with_mask(result.mask)
    assert loss_denominator(smaller, LossConfig()).item() == 1.0
    assert policy_loss(smaller, LossConfig(objective="decoupled")).loss.item() == -1.0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"level": "token"}, "high=None"),
        ({"level": "none", "high": 2.0}, "high=2.0"),
        ({"level": "binary_kl"}, "threshold=None"),
        ({"level": "token", "high": 2.0, "low": 3.0}, "low=3.0"),
        ({"level": "geometric", "high": 0.5}, "high=0.5"),
        ({"veto": 2.0}, "veto=2.0"),
        ({"level": "batch", "high": 2.0}, "level='batch'"),
    ],
)
def test_bad_rules_name_the_field(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RejectionConfig(**arguments)
