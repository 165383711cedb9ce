"""GAE against its defining double sum, value loss against per-token arithmetic, whitening over merged moments."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_trace.rl.critic import gae, masked_moments, value_loss, value_report, whiten


def reference_gae(rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l} over the kept steps only."""
    following = [*values, bootstrap][1:]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_skips_masked_positions(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(4, 7, generator=generator) < 0.6
    mask[3] = False
    bootstrap = torch.tensor([0.0, 0.7, -0.3, 5.0], dtype=torch.float64)
    dirty = [torch.where(mask, t, math.nan) for t in (rewards, values)]
    advantages, returns = gae(rewards=dirty[0], values=dirty[1], mask=mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap)
    for i in range(4):
        expected = reference_gae(rewards[i][mask[i]].tolist(), values[i][mask[i]].tolist(), bootstrap[i].item(), gamma, lam)
        assert advantages[i][mask[i]].tolist() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_gae_with_lambda_one_is_the_monte_carlo_return() -> None:
    rewards = torch.tensor([[0.0, 0.0, 2.0]])
    advantages, returns = gae(
        rewards=rewards, values=torch.tensor([[0.5, 1.0, 1.5]]), mask=torch.ones(1, 3), gamma=0.5, lam=1.0
    )
    torch.testing.assert_close(returns, torch.tensor([[0.5, 1.0, 2.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.5]]))


def test_value_loss_by_hand_and_split() -> None:
    old = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0], dtype=torch.float64)
    values = torch.tensor([0.1, 0.5, 0.5, -0.5, math.nan], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 0.0, 1.0, math.inf], dtype=torch.float64)
    mask = torch.tensor([1, 1, 1, 1, 0])
    output = value_loss(values=values, old_values=old, returns=returns, mask=mask, clip=0.2)
    # errors .81, .25 -> clipped to .2 gives .64, .25 (clipped .04 is smaller), 2.25 (clipped 1.44 is smaller)
    assert output.loss.item() == pytest.approx(0.5 * (0.81 + 0.64 + 0.25 + 2.25) / 4, rel=1e-12)
    gradient = torch.autograd.grad(output.loss, values)[0]
    torch.testing.assert_close(gradient, torch.tensor([-0.9, 0.0, 0.5, -1.5, 0.0], dtype=torch.float64) / 4)
    parts = [
        value_loss(values=values[r], old_values=old[r], returns=returns[r], mask=mask[r], clip=0.2, denominator=4)
        for r in (slice(0, 1), slice(1, 5))
    ]
    assert sum(part.loss for part in parts).item() == pytest.approx(output.loss.item(), rel=1e-12)
    report = value_report(parts[0].sums + parts[1].sums)
    assert report == pytest.approx(value_report(output.sums))
    assert report["value_clip_fraction"] == 0.25
    mean_error = (0.81 + 0.25 + 0.25 + 2.25) / 4
    assert report["explained_variance"] == pytest.approx(1 - mean_error / (3 / 16))


def test_value_loss_of_nothing_is_zero() -> None:
    values = torch.full((3,), math.nan, requires_grad=True)
    output = value_loss(values=values, old_values=values, returns=values, mask=torch.zeros(3), clip=None)
    assert output.loss.item() == 0.0 and not torch.autograd.grad(output.loss, values)[0].any()
    assert value_report(output.sums) == {"value_tokens": 0.0}


def test_whitening_uses_global_moments() -> None:
    values = torch.randn(3, 50, dtype=torch.float64) * 4 + 2
    mask = torch.rand(3, 50) < 0.7
    moments = sum(masked_moments(values[i], mask=mask[i]) for i in range(3))
    white = torch.cat([whiten(values[i : i + 1], mask=mask[i : i + 1], moments=moments) for i in range(3)])
    kept = values[mask]
    torch.testing.assert_close(white[mask], (kept - kept.mean()) / kept.std(), rtol=1e-7, atol=1e-9)
    assert not white[~mask].any()
