"""DAPO's parts beside its loss (decoupled clip 0.2 / 0.28, token mean, no KL: ``LossConfig``): sampling and length shaping.

Source: DAPO (arXiv 2503.14476). Axes: B samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_trace.rl.advantages import informative_groups

CLIP_LOW = 0.2
CLIP_HIGH = 0.28


@dataclass(frozen=True)
class DynamicSample:
    """``keep`` bool [B]; ``groups_kept`` of ``groups_found`` informative groups; ``groups_missing`` still to be sampled."""

    keep: Tensor
    groups_kept: int
    groups_found: int
    groups_missing: int


def dynamic_sampling(scores: Tensor, group_ids: Tensor, *, groups_wanted: int, usable: Tensor | None = None) -> DynamicSample:
    """Keep whole groups with differing ``scores`` until ``groups_wanted``, in ascending id; the rest is surplus.

    ``scores`` [B] are what the dispersion is judged on: the accuracy, before length shaping. Exact comparison, see
    ``advantages``.
    """
    if groups_wanted <= 0:
        raise ValueError(f"groups_wanted={groups_wanted}: must be positive")
    informative = informative_groups(scores, group_ids, usable=usable)
    found = torch.unique(group_ids[informative])
    kept = found[:groups_wanted]
    return DynamicSample(
        keep=informative & torch.isin(group_ids, kept),
        groups_kept=kept.numel(),
        groups_found=found.numel(),
        groups_missing=groups_wanted - kept.numel(),
    )


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Reward to add for length (DAPO Eq. 13, soft overlong punishment): float32 [B].

    0 up to ``max_length - buffer`` response tokens, then falling linearly to ``-penalty`` at ``max_length`` and constant
    beyond.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}, max_length={max_length}: need 0 < buffer <= max_length")
    excess = lengths.double() - (max_length - buffer)
    return -(penalty * (excess / buffer).clamp(0.0, 1.0)).float()
