"""Mismatch metrics between behaviour, proximal and current policy as mergeable sums and maxima.

Notation: delta = log pi_proximal - log pi_behaviour, rho = exp(delta); only tokens under the loss mask count, so dummy
log-probabilities of prompt, padding or tool-output tokens cannot inflate a figure. Merging over micro-batches and ranks is
one sum and one maximum: all-reduce ``sums`` with SUM and ``maxima`` with MAX, then ``finalize`` once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SUM_FIELDS = (
    "tokens",
    "nonfinite",
    "delta_abs",
    "k1",
    "k3",
    "rho",
    "rho_sq",
    "delta_negative",
    "delta_positive",
    "truncated",
    "clipped_high",
    "clipped_low",
    "dual_clipped",
    "ratio",
    "kl_reference",
    "kl_reference_tokens",
    "entropy",
    "entropy_tokens",
)
MAX_FIELDS = ("delta_abs", "log_rho", "log_ratio")

_BINS_PER_DECADE = 100
_LOWEST_DECADE, _HIGHEST_DECADE = -7, 3
_BINS = _BINS_PER_DECADE * (_HIGHEST_DECADE - _LOWEST_DECADE)
_MAX_LOG = 80.0
"""exp() of more would overflow the squares even in float64 sums over many tokens; a maximum this large is reported as it is."""


@dataclass(frozen=True)
class PolicyMetrics:
    """``sums`` float64 [len(SUM_FIELDS) + bins]: the named sums, then a log-spaced histogram of \\|delta\\| for its quantiles.

    ``maxima`` float64 [len(MAX_FIELDS)], -inf where no token counted.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, *, device: torch.device | str | None = None) -> PolicyMetrics:
        """The neutral element of ``merge``."""
        return cls(
            sums=torch.zeros(len(SUM_FIELDS) + _BINS, dtype=torch.float64, device=device),
            maxima=torch.full((len(MAX_FIELDS),), float("-inf"), dtype=torch.float64, device=device),
        )

    def merge(self, other: PolicyMetrics) -> PolicyMetrics:
        """Metrics of both token sets together; associative and commutative."""
        return PolicyMetrics(sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def total(self, name: str) -> float:
        """One named sum, e.g. ``total("tokens")``."""
        return float(self.sums[SUM_FIELDS.index(name)])

    def finalize(self) -> dict[str, float]:
        """Averages and quantiles by name. With no kept token only the counts are there: an average of nothing is not a number.

        ``kl_k1`` and ``kl_k3`` estimate KL(behaviour || proximal); ``chi_square`` is E[rho^2] - 1; ``ess`` the effective sample
        size over the token count; ``asymmetry`` the mass of negative delta over that of positive (1 when balanced, grows before
        collapse; absent when no delta is positive); ``dlogp_p95`` comes from a histogram of 100 bins per decade (error < 2.4%).
        """
        sums = dict(zip(SUM_FIELDS, self.sums.tolist(), strict=False))
        tokens = sums["tokens"]
        result = {"tokens": tokens, "nonfinite_tokens": sums["nonfinite"]}
        if tokens == 0:
            return result
        maxima = dict(zip(MAX_FIELDS, self.maxima.tolist(), strict=True))
        result |= {
            "dlogp_mean": sums["delta_abs"] / tokens,
            "dlogp_p95": min(self._quantile(0.95), maxima["delta_abs"]),
            "dlogp_max": maxima["delta_abs"],
            "kl_k1": sums["k1"] / tokens,
            "kl_k3": sums["k3"] / tokens,
            "rho_mean": sums["rho"] / tokens,
            "rho_max": _exp(maxima["log_rho"]),
            "chi_square": sums["rho_sq"] / tokens - 1.0,
            "ess": sums["rho"] ** 2 / (tokens * sums["rho_sq"]) if sums["rho_sq"] > 0 else 0.0,
            "truncated_fraction": sums["truncated"] / tokens,
            "clip_fraction": (sums["clipped_high"] + sums["clipped_low"]) / tokens,
            "clip_fraction_high": sums["clipped_high"] / tokens,
            "clip_fraction_low": sums["clipped_low"] / tokens,
            "dual_clip_fraction": sums["dual_clipped"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": _exp(maxima["log_ratio"]),
        }
        if sums["delta_positive"] > 0:
            result["asymmetry"] = sums["delta_negative"] / sums["delta_positive"]
        for name in ("kl_reference", "entropy"):
            if sums[f"{name}_tokens"] > 0:
                result[name] = sums[name] / sums[f"{name}_tokens"]
        return result

    def _quantile(self, fraction: float) -> float:
        histogram = self.sums[len(SUM_FIELDS) :]
        cumulative = histogram.cumsum(0)
        index = int(torch.searchsorted(cumulative, fraction * cumulative[-1]).clamp_max(_BINS - 1))
        if index == 0:
            return 0.0 if float(self.maxima[0]) == 0.0 else 10.0**_LOWEST_DECADE
        return math.pow(10.0, _LOWEST_DECADE + (index + 0.5) / _BINS_PER_DECADE)


def policy_metrics(
    *,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    log_ratio: Tensor | None = None,
    counts: dict[str, Tensor] | None = None,
    entropy: Tensor | None = None,
    kl_reference: Tensor | None = None,
) -> PolicyMetrics:
    """Metrics of one micro-batch. All tensors share one shape; nothing carries gradient.

    ``log_ratio`` is log pi_current - log of the clipping denominator (0 when omitted); ``counts`` holds bool masks for
    SUM_FIELDS entries (``truncated``, ``clipped_high``, ...), already confined to kept tokens. Tokens with a non-finite
    difference are counted as ``nonfinite`` and left out of the ratio and delta sums.
    """
    kept = mask.bool()
    delta = (proximal_logprobs.detach().double() - behavior_logprobs.detach().double())[kept]
    log_ratio_kept = torch.zeros_like(delta) if log_ratio is None else log_ratio.detach().double()[kept]
    finite = torch.isfinite(delta) & torch.isfinite(log_ratio_kept)
    nonfinite = (~finite).sum()
    delta, log_ratio_kept = delta[finite], log_ratio_kept[finite]
    rho = delta.clamp(-_MAX_LOG, _MAX_LOG).exp()
    values: dict[str, Tensor] = {
        "tokens": kept.sum(),
        "nonfinite": nonfinite,
        "delta_abs": delta.abs().sum(),
        "k1": -delta.sum(),
        "k3": (rho - 1.0 - delta).sum(),
        "rho": rho.sum(),
        "rho_sq": (rho**2).sum(),
        "delta_negative": (-delta).clamp_min(0).sum(),
        "delta_positive": delta.clamp_min(0).sum(),
    }
    values |= {name: flag.sum() for name, flag in (counts or {}).items()}
    values["ratio"] = log_ratio_kept.clamp(-_MAX_LOG, _MAX_LOG).exp().sum()
    for name, extra in (("entropy", entropy), ("kl_reference", kl_reference)):
        if extra is not None:
            values[name] = extra.detach().double()[kept].sum()
            values[f"{name}_tokens"] = kept.sum()
    named = torch.stack([values.get(name, delta.new_zeros(())).double() for name in SUM_FIELDS])
    maxima = torch.stack([_max(delta.abs()), _max(delta), _max(log_ratio_kept)])
    return PolicyMetrics(sums=torch.cat([named, _histogram(delta.abs())]), maxima=maxima)


def _histogram(magnitude: Tensor) -> Tensor:
    position = (magnitude.clamp_min(10.0**_LOWEST_DECADE).log10() - _LOWEST_DECADE) * _BINS_PER_DECADE
    index = position.floor().clamp(0, _BINS - 1).long()
    return torch.bincount(index, minlength=_BINS).double()


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_full((), float("-inf"))


def _exp(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).exp())
