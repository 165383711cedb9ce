"""Which tokens are left out because trainer and engine disagree on them: a mask, apart from any importance weight.

rho = pi_proximal / pi_behaviour of a token. A rejected token leaves the mask *and so the loss denominator*: apply the
returned mask with ``LossInputs.with_mask`` before ``loss_denominator`` is called. Every rule looks at one token or one whole
sequence, never at the rest of the batch, so its decision cannot change with the micro-batch split. Sequences must be whole
within a call.

    token        low <= rho_t <= high                                   (MIS; IcePop with [0.5, 5])
    sequence     low <= prod rho_t <= high
    geometric    low <= (prod rho_t)^(1/n) <= high                      (typical high 1.0001 to 1.001)
    binary_kl    both binary KLs between the two probabilities of the sampled token <= threshold     (KPop, 0.1)
    probability  |pi_proximal - pi_behaviour| <= threshold              (IPO of prime-rl, 0.3)
    veto         besides any of these: the whole sequence goes if any of its rho_t < veto

Sources: verl docs/algo/rollout_corr_math.md; IcePop (arXiv 2510.18855); KPop (ringtech.notion.site/kpop, May 2026): a fixed
ratio band is loose for likely tokens and tight for rare ones, the binary KL adapts the band to the token's probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_trace.rl.sequences import sequence_sum

RejectionLevel = Literal["none", "token", "sequence", "geometric", "binary_kl", "probability"]
_RATIO_LEVELS = ("token", "sequence", "geometric")
_DIVERGENCE_LEVELS = ("binary_kl", "probability")
_PROBABILITY_FLOOR = 1e-6
"""Probabilities are held in [1e-6, 1 - 1e-6] before the binary KL, whose complement terms would otherwise be infinite."""


@dataclass(frozen=True)
class RejectionConfig:
    """One rule and, independently, a veto. ``low`` defaults to ``1 / high`` as in verl."""

    level: RejectionLevel = "none"
    high: float | None = None
    low: float | None = None
    threshold: float | None = None
    """Bound of ``binary_kl`` and ``probability``."""
    veto: float | None = None
    """Typically 1e-4 to 1e-6."""

    def __post_init__(self) -> None:
        if self.level not in ("none", *_RATIO_LEVELS, *_DIVERGENCE_LEVELS):
            raise ValueError(f"level={self.level!r}: must be none, {', '.join(_RATIO_LEVELS + _DIVERGENCE_LEVELS)}")
        if (self.level in _RATIO_LEVELS) != (self.high is not None):
            raise ValueError(f"high={self.high} with level={self.level!r}: set it for {', '.join(_RATIO_LEVELS)} only")
        if (self.level in _DIVERGENCE_LEVELS) != (self.threshold is not None):
            raise ValueError(
                f"threshold={self.threshold} with level={self.level!r}: set it for {', '.join(_DIVERGENCE_LEVELS)} only"
            )
        if self.low is not None and self.high is None:
            raise ValueError(f"low={self.low} with level={self.level!r}: a ratio band needs high as well")
        if self.high is not None and not 0.0 <= self.resolved_low <= self.high:
            raise ValueError(f"low={self.low}, high={self.high}: need 0 <= low <= high")
        if self.high is not None and self.low is None and self.high < 1.0:
            raise ValueError(f"high={self.high}: must be at least 1 when low is left to be 1 / high")
        if self.threshold is not None and not self.threshold > 0.0:
            raise ValueError(f"threshold={self.threshold}: must be positive")
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise ValueError(f"veto={self.veto}: must lie in (0, 1); typical 1e-4 to 1e-6")

    @property
    def resolved_low(self) -> float:
        """``low``, or ``1 / high``; 0 where there is no ratio band."""
        if self.low is not None:
            return self.low
        return 0.0 if self.high is None else 1.0 / self.high


def icepop(*, low: float = 0.5, high: float = 5.0) -> RejectionConfig:
    """IcePop's two-sided token mask; pair it with ``objective="decoupled"``, whose weight is the untruncated rho."""
    return RejectionConfig(level="token", low=low, high=high)


def kpop(*, threshold: float = 0.1) -> RejectionConfig:
    """KPop's mask by binary KL in both directions."""
    return RejectionConfig(level="binary_kl", threshold=threshold)


@dataclass(frozen=True)
class Rejection:
    """``mask`` bool, the tokens that stay; counts int64 scalars, to be summed over micro-batches and ranks."""

    mask: Tensor
    rejected_tokens: Tensor
    """Tokens taken out, vetoed ones included."""
    vetoed_tokens: Tensor
    """Tokens of sequences that the veto dropped."""


def rejection_mask(
    *,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    config: RejectionConfig,
    sequence_ids: Tensor | None = None,
) -> Rejection:
    """The kept part of ``mask``. Tensors share one shape ([batch, time] or packed [tokens] with ``sequence_ids``); no gradient.

    Content at masked positions is ignored. A kept token whose rho is not finite is rejected by every rule but ``none``.
    """
    kept = mask.bool()
    proximal = torch.where(kept, proximal_logprobs.detach().double(), 0.0)
    behavior = torch.where(kept, behavior_logprobs.detach().double(), 0.0)
    log_rho = proximal - behavior
    stays = kept & _accepted(proximal, behavior, log_rho, kept, config, sequence_ids)
    vetoed = torch.zeros_like(kept)
    if config.veto is not None:
        catastrophic = kept & (log_rho.exp() < config.veto)
        vetoed = kept & (sequence_sum(catastrophic.double(), sequence_ids=sequence_ids) > 0)
    stays = stays & ~vetoed
    return Rejection(mask=stays, rejected_tokens=(kept & ~stays).sum(), vetoed_tokens=vetoed.sum())


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two coins with head probabilities ``p`` and ``q`` (held in [1e-6, 1 - 1e-6])."""
    p = p.clamp(_PROBABILITY_FLOOR, 1.0 - _PROBABILITY_FLOOR)
    q = q.clamp(_PROBABILITY_FLOOR, 1.0 - _PROBABILITY_FLOOR)
    return p * (p / q).log() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).log()


def _accepted(
    proximal: Tensor,
    behavior: Tensor,
    log_rho: Tensor,
    kept: Tensor,
    config: RejectionConfig,
    sequence_ids: Tensor | None,
) -> Tensor:
    if config.level == "none":
        return kept
    if config.threshold is not None:
        p, q = proximal.exp(), behavior.exp()
        if config.level == "probability":
            return (p - q).abs() <= config.threshold
        return (binary_kl(p, q) <= config.threshold) & (binary_kl(q, p) <= config.threshold)
    assert config.high is not None
    if config.level != "token":
        log_rho = sequence_sum(log_rho, sequence_ids=sequence_ids)
    if config.level == "geometric":
        log_rho = log_rho / sequence_sum(kept.double(), sequence_ids=sequence_ids).clamp_min(1.0)
    ratio = log_rho.exp()
    return (ratio >= config.resolved_low) & (ratio <= config.high)
