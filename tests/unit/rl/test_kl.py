"""KL terms against the exact KL of a tiny vocabulary, every token enumerated: values, gradients and signs."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.rl.kl import kl_loss, kl_penalised_rewards, kl_value
from megatron_trace.rl.losses import LossConfig, LossInputs, policy_loss

V = 5
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, REFERENCE, BEHAVIOR, PROXIMAL = (torch.randn(V, generator=GENERATOR, dtype=torch.float64) for _ in range(4))


def exact() -> tuple[float, torch.Tensor]:
    """KL(pi_theta || pi_ref) and its gradient by the logits."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - REFERENCE.log_softmax(-1))).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_expected_gradient_is_that_of_the_exact_kl(estimator: str, on_policy: bool) -> None:
    """Direct back-propagation gives 0 for k1 and the reverse direction for k3 (NeMo-RL pull 2506)."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    log_q = log_p.detach() if on_policy else BEHAVIOR.log_softmax(-1)
    importance = None if on_policy else (log_p - log_q).exp()
    terms = kl_loss(log_p, REFERENCE.log_softmax(-1), estimator=estimator, importance=importance)
    expected = (log_q.exp() * terms).sum()
    value, gradient = exact()
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0], gradient, rtol=1e-12, atol=1e-14)
    if estimator != "k2":
        assert expected.item() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("objective", ["naive_behavior", "decoupled"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_policy_loss_weighs_its_kl_by_the_whole_ratio(objective: str, estimator: str) -> None:
    """Tokens from the behaviour policy, proximal in between: E_behaviour of the loss gradient is the exact one."""
    logits = LOGITS.clone().requires_grad_()
    config = LossConfig(objective=objective, kl_coef=0.3, kl_estimator=estimator)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(V):
        pick = [policy.log_softmax(-1)[token].reshape(1, 1) for policy in (logits, PROXIMAL, BEHAVIOR, REFERENCE)]
        inputs = LossInputs(
            logprobs=pick[0],
            proximal_logprobs=pick[1],
            behavior_logprobs=pick[2],
            advantages=torch.zeros(1, 1),
            mask=torch.ones(1, 1, dtype=torch.bool),
            reference_logprobs=pick[3],
        )
        total = total + pick[2].exp().squeeze() * policy_loss(inputs, config).loss
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], 0.3 * exact()[1], rtol=1e-12, atol=1e-14)


def test_descending_the_loss_lowers_the_kl() -> None:
    """The sign: an old verl maximised it (RAGEN issue 58)."""
    for estimator in ("k1", "k2", "k3"):
        logits = LOGITS.clone().requires_grad_()
        start = exact()[0]
        for _ in range(200):
            log_p = logits.log_softmax(-1)
            loss = (log_p.exp().detach() * kl_loss(log_p, REFERENCE.log_softmax(-1), estimator=estimator)).sum()
            logits = (logits - 0.5 * torch.autograd.grad(loss, logits)[0]).detach().requires_grad_()
        log_p = logits.log_softmax(-1)
        assert (log_p.exp() * (log_p - REFERENCE.log_softmax(-1))).sum().item() < 0.01 * start


def test_k1_as_reward_has_the_exact_gradient_and_k3_has_not() -> None:
    gradients = {}
    for estimator in ("k1", "k3"):
        logits = LOGITS.clone().requires_grad_()
        log_p = logits.log_softmax(-1)
        reward = kl_penalised_rewards(
            torch.zeros(V, dtype=torch.float64),
            log_p,
            REFERENCE.log_softmax(-1),
            mask=torch.ones(V),
            coefficient=1.0,
            estimator=estimator,
        )
        gradients[estimator] = torch.autograd.grad((log_p.exp().detach() * reward * log_p).sum(), logits)[0]
    torch.testing.assert_close(gradients["k1"], -exact()[1], rtol=1e-12, atol=1e-14)
    assert (gradients["k3"] + exact()[1]).norm() > 0.1 * exact()[1].norm()


def test_rewards_ignore_masked_content() -> None:
    mask = torch.tensor([True, False, False])
    current = torch.tensor([-1.0, float("nan"), float("-inf")])
    reward = kl_penalised_rewards(
        torch.tensor([1.0, 5.0, float("nan")]), current, torch.tensor([-1.5, 0.0, 1.0]), mask=mask, coefficient=0.2
    )
    torch.testing.assert_close(reward, torch.tensor([0.9, 0.0, 0.0]))


def test_values_by_hand() -> None:
    current, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    torch.testing.assert_close(kl_value(current, reference, estimator="k1"), torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(kl_value(current, reference, estimator="k2"), torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(kl_value(current, reference, estimator="k3"), torch.tensor([0.36787944, 4.3890561]))
    extreme = kl_value(torch.tensor([-2000.0]), torch.tensor([0.0]), estimator="k3")
    assert torch.isfinite(extreme).all()
