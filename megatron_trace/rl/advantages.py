"""Group-relative advantages: GRPO, Dr.GRPO, RLOO. Groups are given as ids, never by order.

Axes: B samples (one reward each). All sums run in float64, so the result does not depend on sample order beyond 1e-15.
A group whose usable rewards are all *equal* (compared exactly, not by a small standard deviation: eight float32 copies of 0.1
have a non-zero one) carries no signal: its advantages are exactly 0. So are those of a group with one usable reward, whose
sample standard deviation is undefined. Such samples stay in the loss denominator unless the caller drops them with
``informative_groups`` before the denominator is computed; kept, a KL or entropy term still trains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AdvantageScale = Literal["group_std", "batch_std", "none"]


@dataclass(frozen=True)
class GroupAdvantages:
    """``advantages`` float32 [B] (0 at unusable samples); ``zero_variance`` bool [B], true where the sample's group has no
    signal."""

    advantages: Tensor
    zero_variance: Tensor
    group_mean: Tensor
    """float32 [B], mean usable reward of the sample's group (0 where the group has none)."""


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    usable: Tensor | None = None,
    scale: AdvantageScale = "group_std",
    epsilon: float = 1e-6,
) -> GroupAdvantages:
    """``(r - mean_group) / (std + epsilon)`` per sample (GRPO); ``scale="none"`` is Dr.GRPO, which leaves the division out.

    ``rewards`` [B] float; ``group_ids`` [B] integer, any values; ``usable`` [B] bool marks rewards that exist (others may be
    NaN). Standard deviations are the sample kind (n - 1): of the group, or with ``batch_std`` of all usable rewards in the
    call. A group must be complete in one call: gather rewards over data-parallel ranks first. Source: DeepSeekMath (GRPO);
    literature on Dr.GRPO.
    """
    stats = _group_statistics(rewards, group_ids, usable)
    centred = stats.rewards - stats.mean
    if scale == "group_std":
        variance = _group_sum(centred**2 * stats.usable, stats.inverse) / (stats.count - 1).clamp_min(1)
        centred = centred / (variance.sqrt() + epsilon)
    elif scale == "batch_std":
        centred = centred / (_sample_std(stats.rewards[stats.usable]) + epsilon)
    elif scale != "none":
        raise ValueError(f"scale={scale!r}: must be 'group_std', 'batch_std' or 'none'")
    return stats.finish(centred)


def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, usable: Tensor | None = None) -> GroupAdvantages:
    """Leave-one-out baseline: ``r_i`` minus the mean of the *other* usable rewards of its group (Ahmadian et al., RLOO)."""
    stats = _group_statistics(rewards, group_ids, usable)
    return stats.finish((stats.rewards - stats.mean) * stats.count / (stats.count - 1).clamp_min(1))


def informative_groups(rewards: Tensor, group_ids: Tensor, *, usable: Tensor | None = None) -> Tensor:
    """bool [B]: usable samples of groups with at least two different usable rewards (exact comparison)."""
    stats = _group_statistics(rewards, group_ids, usable)
    return stats.usable & ~stats.zero_variance


@dataclass(frozen=True)
class _GroupStatistics:
    """Everything [B], group values written back to each sample; ``rewards`` float64 with unusable entries 0."""

    rewards: Tensor
    usable: Tensor
    inverse: Tensor
    count: Tensor
    mean: Tensor
    zero_variance: Tensor

    def finish(self, advantages: Tensor) -> GroupAdvantages:
        live = self.usable & ~self.zero_variance
        return GroupAdvantages(
            advantages=torch.where(live, advantages, 0.0).float(),
            zero_variance=self.zero_variance,
            group_mean=self.mean.float(),
        )


def _group_statistics(rewards: Tensor, group_ids: Tensor, usable: Tensor | None) -> _GroupStatistics:
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)}: both must be [B], one entry per sample"
        )
    if usable is None:
        usable = torch.ones_like(rewards, dtype=torch.bool)
    elif usable.shape != rewards.shape:
        raise ValueError(f"usable of shape {tuple(usable.shape)}: must be [{rewards.numel()}], one entry per reward")
    usable = usable.bool()
    clean = torch.where(usable, rewards.detach().double(), 0.0)
    if not torch.isfinite(clean).all():
        raise ValueError("rewards: NaN or infinite at a usable sample; mark it unusable or mend the reward function")
    _, inverse = torch.unique(group_ids, return_inverse=True)
    count = _group_sum(usable.double(), inverse)
    infinity = torch.full_like(clean, float("inf"))
    highest = torch.full_like(clean, float("-inf")).scatter_reduce(0, inverse, torch.where(usable, clean, -infinity), "amax")
    lowest = infinity.scatter_reduce(0, inverse, torch.where(usable, clean, infinity), "amin")
    return _GroupStatistics(
        rewards=clean,
        usable=usable,
        inverse=inverse,
        count=count,
        mean=_group_sum(clean, inverse) / count.clamp_min(1),
        zero_variance=(highest[inverse] <= lowest[inverse]),
    )


def _group_sum(values: Tensor, inverse: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, inverse, values)[inverse]


def _sample_std(values: Tensor) -> Tensor:
    centred = values - values.mean()
    return ((centred**2).sum() / max(values.numel() - 1, 1)).sqrt()
