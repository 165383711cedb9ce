"""KL to a reference policy from sampled tokens, as a loss term or as a reward, with the gradient of the exact KL.

d = log pi_theta - log pi_ref at the sampled token. Estimators of KL(pi_theta || pi_ref) for tokens drawn from pi_theta
(Schulman's note): k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. Back-propagating them directly is wrong: k1 has zero expected
gradient, k3 that of the *other* direction of the KL. The gradient of the exact KL is E[d * grad log pi_theta]; ``kl_loss``
returns the chosen estimator's value and that gradient, both times the importance weight pi_theta / pi_behaviour when tokens
came from elsewhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

_MAX_LOG = 20.0
"""Bound of the exponent in k3 (as elsewhere in this room): e^20 is 4.9e8, far beyond any useful penalty."""


def kl_value(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KLEstimator) -> Tensor:
    """The estimator itself, detached, per token. Source: J. Schulman, "Approximating KL divergence"."""
    difference = (logprobs - reference_logprobs).detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        bounded = difference.clamp(-_MAX_LOG, _MAX_LOG)
        return torch.expm1(-bounded) + bounded
    raise ValueError(f"kl_estimator={estimator!r}: must be 'k1', 'k2' or 'k3'")


def kl_loss(
    logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KLEstimator, importance: Tensor | None = None
) -> Tensor:
    """Per-token KL to *add* to a loss: value ``w * k_i``, gradient ``w * d`` with respect to ``logprobs``.

    ``importance`` (w, detached here) is pi_theta / pi_behaviour at the token, 1 when omitted. For full-support untruncated w
    the expected gradient equals that of the exact KL, for every estimator. Masked positions must be sanitised by the caller.
    """
    weight = torch.ones_like(logprobs) if importance is None else importance.detach()
    difference = (logprobs - reference_logprobs).detach()
    value = weight * kl_value(logprobs, reference_logprobs, estimator=estimator)
    carrier = weight * difference * logprobs
    return value.detach() + (carrier - carrier.detach())


def kl_penalised_rewards(
    token_rewards: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    mask: Tensor,
    coefficient: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """``reward - coefficient * k_i`` at kept tokens, 0 elsewhere; detached (KL in the reward, as PPO for language models does).

    As a reward only k1 yields the gradient of KL(pi_theta || pi_ref); k2 and k3 are offered for comparison with systems using
    them.
    """
    kept = mask.bool()
    current = torch.where(kept, logprobs, 0.0).detach()
    reference = torch.where(kept, reference_logprobs, 0.0).detach()
    penalty = kl_value(current, reference, estimator=estimator)
    return torch.where(kept, token_rewards - coefficient * penalty, 0.0)
