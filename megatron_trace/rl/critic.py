"""PPO with a critic: generalised advantage estimation, whitening, clipped value loss.

Axes: B sequences, T positions. Only positions under the mask (response tokens the policy chose) are steps of the decision
process: observation tokens between turns are skipped, the step before them bootstraps from the step after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each [B, T] and 0 outside the mask; returns are advantages + values. No gradient.

    ``rewards`` [B, T]: put each reward on a kept token, others are ignored. ``bootstrap_values`` [B]: the value after the
    last kept token, for truncated sequences; 0 (the episode ended) when omitted. Source: Schulman et al., GAE (arXiv
    1506.02438).
    """
    if values.dim() != 2 or rewards.shape != values.shape or mask.shape != values.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, mask {tuple(mask.shape)}: all must be [B, T]"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name}={number}: must lie in [0, 1]")
    kept = mask.bool()
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    reward = torch.where(kept, rewards.detach().to(dtype), 0.0)
    value = torch.where(kept, values.detach().to(dtype), 0.0)
    running = torch.zeros_like(value[:, 0])
    following = torch.zeros_like(running) if bootstrap_values is None else bootstrap_values.detach().to(dtype)
    advantages = torch.zeros_like(value)
    for t in range(value.shape[1] - 1, -1, -1):
        step = reward[:, t] + gamma * following - value[:, t] + gamma * lam * running
        running = torch.where(kept[:, t], step, running)
        following = torch.where(kept[:, t], value[:, t], following)
        advantages[:, t] = torch.where(kept[:, t], step, 0.0)
    return advantages, torch.where(kept, advantages + value, 0.0)


def masked_moments(values: Tensor, *, mask: Tensor) -> Tensor:
    """(count, sum, sum of squares) over kept entries, float64 [3]: add over micro-batches and ranks, then ``whiten``."""
    kept = values.detach().double()[mask.bool()]
    return torch.stack(
        [torch.tensor(float(kept.numel()), dtype=torch.float64, device=kept.device), kept.sum(), (kept**2).sum()]
    )


def whiten(values: Tensor, *, mask: Tensor, moments: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Zero mean, unit (sample) standard deviation by the given global moments; 0 outside the mask, dtype of ``values``."""
    count, total, squares = moments.tolist()
    mean = total / max(count, 1.0)
    std = math.sqrt(max(squares - count * mean**2, 0.0) / max(count - 1.0, 1.0))
    clean = torch.where(mask.bool(), values.double(), mean)
    whitened: Tensor = (clean - mean) / (std + epsilon)
    return whitened.to(values.dtype)


@dataclass(frozen=True)
class ValueLossOutput:
    """``loss`` scalar with gradient to ``values``; ``sums`` float64 [5], to be added over micro-batches and ranks."""

    loss: Tensor
    sums: Tensor
    """tokens, clipped tokens, sum of squared error, sum of returns, sum of squared returns."""


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None,
    denominator: Tensor | float | None = None,
) -> ValueLossOutput:
    """Half the squared error, the larger of the plain one and that of values clipped to ``old_values +- clip`` (PPO).

    All tensors share one shape. The sum over kept tokens is divided by ``denominator``, the number of kept tokens over all
    micro-batches and ranks (this call's when omitted); with none the loss and its gradient are 0. ``clip=None``: no clipping.
    """
    kept = mask.bool()

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(kept, tensor if tensor.dtype == torch.float64 else tensor.float(), 0.0)

    current, old, target = clean(values), clean(old_values).detach(), clean(returns).detach()
    error = (current - target) ** 2
    worst = error
    if clip is not None:
        if not clip > 0.0:
            raise ValueError(f"clip={clip}: must be positive, or None for no value clipping")
        worst = torch.maximum(error, (torch.clamp(current, old - clip, old + clip) - target) ** 2)
    divisor = torch.as_tensor(kept.sum() if denominator is None else denominator, device=worst.device).to(worst.dtype)
    loss = 0.5 * worst.sum() / torch.where(divisor > 0, divisor, torch.ones_like(divisor))
    clipped = (worst > error).sum()
    sums = [kept.sum(), clipped, error.detach().double().sum(), target.double().sum(), (target.double() ** 2).sum()]
    return ValueLossOutput(loss=loss, sums=torch.stack([entry.double() for entry in sums]))


def value_report(sums: Tensor) -> dict[str, float]:
    """Mean squared error, clip fraction and explained variance from merged ``ValueLossOutput.sums``; only the count if empty.

    Explained variance is 1 - mean squared error / variance of returns; absent where returns do not vary.
    """
    tokens, clipped, squared_error, total, squares = sums.tolist()
    if tokens == 0:
        return {"value_tokens": 0.0}
    variance = squares / tokens - (total / tokens) ** 2
    result = {"value_tokens": tokens, "value_clip_fraction": clipped / tokens, "value_error": squared_error / tokens}
    if variance > 0:
        result["explained_variance"] = 1.0 - squared_error / tokens / variance
    return result
