"""Mismatch metrics against numpy on the kept tokens, and their merging."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_trace.rl.losses import LossConfig, LossInputs, policy_loss
from megatron_trace.rl.metrics import PolicyMetrics, policy_metrics


def sample(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(size, generator=generator) * 3
    proximal = behavior + 0.1 * torch.randn(size, generator=generator)
    return proximal, behavior, torch.rand(size, generator=generator) < 0.8


def test_every_figure_against_numpy() -> None:
    proximal, behavior, mask = sample(0, 4000)
    entropy = torch.rand(4000)
    got = policy_metrics(proximal_logprobs=proximal, behavior_logprobs=behavior, mask=mask, entropy=entropy).finalize()
    delta = (proximal.double() - behavior.double())[mask].numpy()
    rho = np.exp(delta)
    expected = {
        "tokens": len(delta),
        "dlogp_mean": np.abs(delta).mean(),
        "dlogp_max": np.abs(delta).max(),
        "kl_k1": (-delta).mean(),
        "kl_k3": (rho - 1 - delta).mean(),
        "rho_mean": rho.mean(),
        "rho_max": rho.max(),
        "chi_square": (rho**2).mean() - 1,
        "ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "asymmetry": -delta[delta < 0].sum() / delta[delta > 0].sum(),
        "entropy": entropy[mask].double().mean().item(),
        "nonfinite_tokens": 0,
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-9), name
    assert got["dlogp_p95"] == pytest.approx(np.quantile(np.abs(delta), 0.95), rel=0.024)


def test_kl_estimators_recover_the_exact_kl() -> None:
    """Tokens in exact proportion to the behaviour policy: k1 and k3 are then the exact KL(behaviour || proximal)."""
    counts = torch.tensor([500, 300, 150, 50])
    behavior = (counts.double() / 1000).log()
    proximal = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    tokens = torch.repeat_interleave(torch.arange(4), counts)
    got = policy_metrics(
        proximal_logprobs=proximal[tokens], behavior_logprobs=behavior[tokens], mask=torch.ones(1000)
    ).finalize()
    exact = float((behavior.exp() * (behavior - proximal)).sum())
    assert got["kl_k1"] == pytest.approx(exact, rel=1e-9) and got["kl_k3"] == pytest.approx(exact, rel=1e-9)


def test_merge_equals_the_whole() -> None:
    proximal, behavior, mask = sample(1, 900)
    whole = policy_metrics(proximal_logprobs=proximal, behavior_logprobs=behavior, mask=mask)
    merged = PolicyMetrics.empty()
    for rows in torch.arange(900).split([100, 0, 500, 300]):
        merged = policy_metrics(proximal_logprobs=proximal[rows], behavior_logprobs=behavior[rows], mask=mask[rows]).merge(
            merged
        )
    assert merged.finalize() == pytest.approx(whole.finalize(), rel=1e-12)
    assert torch.equal(merged.maxima, whole.maxima)


def test_observation_tokens_do_not_count() -> None:
    """Multi-turn: tool-output tokens carry a dummy log-probability of 0 (SkyRL pull 354)."""
    proximal = torch.tensor([[-1.0, -2.0, -7.0, -9.0, -1.5]])
    behavior = torch.tensor([[-1.1, -2.0, 0.0, 0.0, -1.5]])
    mask = torch.tensor([[1, 1, 0, 0, 1]])
    got = policy_metrics(proximal_logprobs=proximal, behavior_logprobs=behavior, mask=mask).finalize()
    assert got["tokens"] == 3
    assert got["dlogp_mean"] == pytest.approx(0.1 / 3, rel=1e-5)
    assert got["dlogp_max"] == pytest.approx(0.1, rel=1e-5)


def test_identical_policies_report_zero_mismatch() -> None:
    same = -torch.rand(50)
    got = policy_metrics(proximal_logprobs=same, behavior_logprobs=same, mask=torch.ones(50)).finalize()
    assert (got["dlogp_mean"], got["dlogp_p95"], got["dlogp_max"], got["kl_k3"]) == (0.0, 0.0, 0.0, 0.0)
    assert got["ess"] == 1.0 and got["rho_max"] == 1.0 and "asymmetry" not in got


def test_clip_and_truncation_fractions() -> None:
    ratio = torch.tensor([[1.5, 1.1, 0.5, 1.5, 0.5, 2.1]], dtype=torch.float64)
    rho = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 4.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, 1.0]])
    behavior = torch.full((1, 6), -4.0, dtype=torch.float64)
    proximal = behavior + rho.log()
    inputs = LossInputs(proximal + ratio.log(), proximal, behavior, advantages, torch.ones(1, 6, dtype=torch.bool))
    tis = policy_loss(inputs, LossConfig(objective="tis")).metrics.finalize()
    assert (tis["clip_fraction_high"], tis["clip_fraction_low"]) == pytest.approx((2 / 6, 1 / 6))
    assert tis["truncated_fraction"] == pytest.approx(1 / 6) and tis["ratio_max"] == pytest.approx(2.1)
    acr = policy_loss(inputs, LossConfig(objective="acr")).metrics.finalize()
    assert acr["clip_fraction_high"] == pytest.approx(1 / 6)
    dual = policy_loss(inputs, LossConfig(objective="tis", dual_clip=1.2)).metrics.finalize()
    assert dual["dual_clip_fraction"] == pytest.approx(1 / 6)


def test_extreme_and_nonfinite_tokens() -> None:
    proximal = torch.tensor([-1.0, 999.0, math.nan, -1.0])
    behavior = torch.tensor([-1.0, -1.0, -1.0, -math.inf])
    metrics = policy_metrics(proximal_logprobs=proximal, behavior_logprobs=behavior, mask=torch.ones(4))
    got = metrics.finalize()
    assert got["nonfinite_tokens"] == 2
    assert got["dlogp_max"] == 1000.0
    assert torch.isfinite(metrics.sums).all()
