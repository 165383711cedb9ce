"""Policy losses on three log-probabilities per token: behaviour (engine), proximal (trainer, before the update), current.

Notation (QuRL, arXiv 2602.13953): R = pi_theta / pi_prox, rho = pi_prox / pi_behav, C the truncation, A the advantage.

    naive_behavior  Eq. 3   min(R^ A, clip(R^, 1-lo, 1+hi) A),        R^ = pi_theta / pi_behav
    naive_proximal  Eq. 1   min(R A, clip(R, 1-lo, 1+hi) A)
    decoupled       Eq. 4   rho * (as Eq. 1)
    tis             Eq. 5   min(rho, C) * (as Eq. 1)
    acr             Eq. 9   min(rho, C) * min(R A, clip(R, 1-lo, (1+hi) / r) A),   r = min(1, C / rho)

The loss is minus the objective. Weights, r and advantages carry no gradient. Axes: N = [batch, time] or packed [tokens].

Invariance: the total is divided by ``denominator``, which the caller sums over all micro-batches and ranks with
``loss_denominator`` *after* rejection masks were applied. The losses of the parts then add up to the loss of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_trace.rl.kl import KLEstimator, kl_loss
from megatron_trace.rl.metrics import PolicyMetrics, policy_metrics
from megatron_trace.rl.sequences import count_sequences, sequence_sum

Objective = Literal["naive_behavior", "naive_proximal", "decoupled", "tis", "acr"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]

OBJECTIVES: tuple[str, ...] = ("naive_behavior", "naive_proximal", "decoupled", "tis", "acr")
AGGREGATIONS: tuple[str, ...] = ("token_mean", "sequence_mean", "constant")
QURL_TRUNCATION = 2.0
"""C of the QuRL presets: the paper names none and follows FlashRL, whose usual value is 2."""
TRACE_TRUNCATION = 5.0
"""C of the TRACE presets: token-level truncation 5 (TRACE, arXiv 2610.07767, setup)."""


@dataclass(frozen=True)
class LossConfig:
    """Everything that decides the loss; every field is a number or a name, none is looked up elsewhere."""

    objective: Objective = "tis"
    clip_low: float = 0.2
    """Lower clip distance: R is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip distance: 1 + clip_high (DAPO: 0.28)."""
    truncation: float = QURL_TRUNCATION
    """C of ``tis`` and ``acr``."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``: over kept tokens. ``sequence_mean``: mean over sequences of their token means. ``constant``: Dr.GRPO,
    the sum over tokens divided by ``constant_length`` times the number of sequences, whatever is masked."""
    constant_length: float | None = None
    """Divisor per sequence of ``constant`` (usually the maximum response length); required by it, refused otherwise."""
    dual_clip: float | None = None
    """c > 1: for A < 0 the surrogate is not let below c * A (dual-clip PPO)."""
    two_sided: bool = False
    """Also clip from above where A < 0 (TBPO of QaRL): the surrogate is clip(R) A there."""
    ratio_level: Literal["token", "sequence"] = "token"
    """``sequence``: GSPO, R is the geometric mean over the sequence, with the gradient of GSPO-token (equal for equal A)."""
    weight_level: Literal["token", "sequence"] = "token"
    """``sequence``: rho is the product over the sequence (in ``decoupled``, ``tis``, ``acr``)."""
    kl_coef: float = 0.0
    """Weight of the KL to ``reference_logprobs`` as a loss term."""
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; needs ``LossInputs.entropy`` with gradient."""
    max_log_ratio: float = 20.0
    """Bound of every exponent: ratios stay in [e^-20, e^20] and finite; beyond it the gradient of the ratio is 0."""

    def __post_init__(self) -> None:
        _one_of("objective", self.objective, OBJECTIVES)
        _one_of("aggregation", self.aggregation, AGGREGATIONS)
        _one_of("ratio_level", self.ratio_level, ("token", "sequence"))
        _one_of("weight_level", self.weight_level, ("token", "sequence"))
        _one_of("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low}: must lie in [0, 1], since R is clipped at 1 - clip_low")
        if self.clip_high < 0.0:
            raise ValueError(f"clip_high={self.clip_high}: must not be negative")
        if not self.truncation > 0.0:
            raise ValueError(f"truncation={self.truncation}: must be positive (QuRL presets 2, TRACE presets 5)")
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise ValueError(
                f"constant_length={self.constant_length} with aggregation={self.aggregation!r}: is for 'constant' only"
            )
        if self.constant_length is not None and not self.constant_length > 0:
            raise ValueError(f"constant_length={self.constant_length}: must be positive")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip={self.dual_clip}: must exceed 1, or be None to leave it off")
        if not 0.0 < self.max_log_ratio <= 80.0:
            raise ValueError(f"max_log_ratio={self.max_log_ratio}: must lie in (0, 80] so that exp() stays finite in float32")


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of tokens; all tensors have the shape N of ``logprobs`` unless said otherwise.

    ``mask`` (bool or 0/1) marks response tokens that are trained; anything else may hold inf, NaN or garbage. Log-probabilities
    are at the sampling temperature on all three sides (DESIGN.md 3.9). ``proximal_logprobs=None`` means one optimiser step per
    batch: the current ones, detached. ``advantages`` may also be [batch, 1].
    """

    logprobs: Tensor
    proximal_logprobs: Tensor | None
    behavior_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor | None = None
    """int64: which sequence a packed token is of; negative is padding. Needed for packed [tokens] and sequence-level
    choices."""
    reference_logprobs: Tensor | None = None
    """Needed where ``kl_coef`` > 0."""
    entropy: Tensor | None = None
    """Per-token entropy of the current policy: reported, and a bonus where ``entropy_coef`` > 0."""
    auxiliary_loss: Tensor | None = None
    """Added to each kept token's loss before aggregation, with its gradient: e.g. ``rl.score_centering``."""
    sequence_token_count: Tensor | None = None
    """Kept tokens of the token's whole sequence. Needed only where a sequence is split over calls (context parallelism)."""
    sequence_log_ratio: Tensor | None = None
    """Mean log R over the token's whole sequence, for ``ratio_level="sequence"`` under such a split."""
    sequence_log_weight: Tensor | None = None
    """Sum of log rho over the token's whole sequence, for ``weight_level="sequence"`` under such a split."""

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for name in _SAME_SHAPE:
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)}: must have the shape {tuple(shape)} of logprobs")
        if self.advantages.shape not in (shape, (*shape[:-1], 1)):
            raise ValueError(
                f"advantages of shape {tuple(self.advantages.shape)}: must be {tuple(shape)} as logprobs, or [batch, 1]"
            )

    def with_mask(self, mask: Tensor) -> LossInputs:
        """The same tokens with a smaller mask, e.g. that of ``rl.rejection``."""
        return replace(self, mask=mask)


_SAME_SHAPE = (
    "proximal_logprobs",
    "behavior_logprobs",
    "mask",
    "sequence_ids",
    "reference_logprobs",
    "entropy",
    "auxiliary_loss",
    "sequence_token_count",
    "sequence_log_ratio",
    "sequence_log_weight",
)


@dataclass(frozen=True)
class LossOutput:
    """``loss`` scalar (float32, or float64 for float64 inputs), always attached to ``logprobs``; ``metrics`` mergeable,
    detached.

    With no kept token the loss is 0 and every gradient 0; ``metrics.total("tokens") == 0`` over all ranks tells the caller to
    skip.
    """

    loss: Tensor
    metrics: PolicyMetrics


def loss_denominator(inputs: LossInputs, config: LossConfig) -> Tensor:
    """This micro-batch's share of the denominator (float64 scalar); add it up over micro-batches and ranks.

    Kept tokens for ``token_mean``; sequences with a kept token for ``sequence_mean`` (as a sum of 1/n over tokens, so that a
    split sequence counts once); ``constant_length`` times all sequences for ``constant`` (there, count a split sequence
    yourself).
    """
    mask = inputs.mask.bool()
    if config.aggregation == "token_mean":
        return mask.sum().double()
    if config.aggregation == "sequence_mean":
        return (mask.double() / _tokens_in_sequence(inputs, mask)).sum()
    assert config.constant_length is not None
    return config.constant_length * count_sequences(mask, sequence_ids=inputs.sequence_ids).double()


def policy_loss(inputs: LossInputs, config: LossConfig, *, denominator: Tensor | float | None = None) -> LossOutput:
    """Loss of one micro-batch: the sum over its kept tokens divided by ``denominator``.

    ``denominator`` is the sum of ``loss_denominator`` over everything that makes up the optimiser step (this call alone when
    omitted). Masked positions are replaced before any exp(), so their content reaches neither loss nor gradient.
    """
    mask = inputs.mask.bool()
    tokens = _sanitised(inputs, mask)
    surrogate, parts = _surrogate(tokens, inputs, mask, config)
    token_loss = -surrogate
    kl = None
    if config.kl_coef != 0.0:
        kl = _reference_kl(inputs, tokens, mask, parts.importance, config)
        token_loss = token_loss + config.kl_coef * kl
    if config.entropy_coef != 0.0:
        if tokens.entropy is None:
            raise ValueError(
                f"entropy=None with entropy_coef={config.entropy_coef}: pass per-token entropies or set the coefficient to 0"
            )
        token_loss = token_loss - config.entropy_coef * tokens.entropy
    if inputs.auxiliary_loss is not None:
        token_loss = token_loss + torch.where(mask, inputs.auxiliary_loss.to(token_loss.dtype), 0.0)
    token_loss = torch.where(mask, token_loss, 0.0)
    if config.aggregation == "sequence_mean":
        token_loss = token_loss / _tokens_in_sequence(inputs, mask).to(token_loss.dtype)
    if denominator is None:
        denominator = loss_denominator(inputs, config)
    metrics = policy_metrics(
        proximal_logprobs=tokens.proximal,
        behavior_logprobs=tokens.behavior,
        mask=mask,
        log_ratio=parts.log_ratio,
        counts=parts.counts,
        entropy=tokens.entropy,
        kl_reference=kl,
    )
    return LossOutput(loss=_divide(token_loss.sum(), denominator), metrics=metrics)


@dataclass(frozen=True)
class _Tokens:
    """Inputs in at least float32, with masked positions replaced by 0."""

    logprobs: Tensor
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class _Parts:
    log_ratio: Tensor
    importance: Tensor
    counts: dict[str, Tensor]


def _sanitised(inputs: LossInputs, mask: Tensor) -> _Tokens:
    def clean(tensor: Tensor) -> Tensor:
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        return torch.where(mask, wide, 0.0)

    logprobs = clean(inputs.logprobs)
    proximal = logprobs if inputs.proximal_logprobs is None else clean(inputs.proximal_logprobs)
    return _Tokens(
        logprobs=logprobs,
        proximal=proximal.detach(),
        behavior=clean(inputs.behavior_logprobs).detach(),
        advantages=clean(inputs.advantages.expand_as(inputs.logprobs)).detach(),
        entropy=None if inputs.entropy is None else clean(inputs.entropy),
    )


def _surrogate(tokens: _Tokens, inputs: LossInputs, mask: Tensor, config: LossConfig) -> tuple[Tensor, _Parts]:
    """Weighted clipped surrogate per token, and what the metrics and the KL term need of it."""
    anchor = tokens.behavior if config.objective == "naive_behavior" else tokens.proximal
    token_log_ratio = _bounded(tokens.logprobs - anchor, config)
    log_ratio = token_log_ratio
    if config.ratio_level == "sequence":
        log_ratio = _sequence_log_ratio(tokens.logprobs, anchor, inputs, mask, config)
    ratio = log_ratio.exp()
    rho = _weight_ratio(tokens, inputs, config).exp()
    weight = torch.ones_like(rho)
    upper = torch.full_like(rho, 1.0 + config.clip_high)
    if config.objective == "decoupled":
        weight = rho
    elif config.objective in ("tis", "acr"):
        weight = rho.clamp_max(config.truncation)
    if config.objective == "acr":
        upper = upper * (rho / config.truncation).clamp_min(1.0)
    lower = torch.full_like(rho, 1.0 - config.clip_low)
    advantages = tokens.advantages
    # clamp, not minimum: at R exactly on a bound its gradient stays whole instead of being split between the two arguments
    clipped = torch.clamp(ratio, lower, upper) * advantages
    surrogate = torch.minimum(ratio * advantages, clipped)
    if config.two_sided:
        surrogate = torch.where(advantages < 0, clipped, surrogate)
    dual = torch.zeros_like(mask)
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        dual = mask & (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    above = (advantages > 0) | (config.two_sided & (advantages < 0))
    counts = {
        "truncated": mask & (rho > config.truncation) & (config.objective in ("tis", "acr")),
        "clipped_high": mask & above & (ratio > upper),
        "clipped_low": mask & (advantages < 0) & (ratio < lower),
        "dual_clipped": dual,
    }
    return weight * surrogate, _Parts(log_ratio=log_ratio, importance=(weight * token_log_ratio.exp()).detach(), counts=counts)


def _bounded(log_ratio: Tensor, config: LossConfig) -> Tensor:
    return log_ratio.clamp(-config.max_log_ratio, config.max_log_ratio)


def _sequence_log_ratio(logprobs: Tensor, anchor: Tensor, inputs: LossInputs, mask: Tensor, config: LossConfig) -> Tensor:
    """Mean log-ratio of the sequence at every token, bounded, with gradient 1 to that token's log-probability (GSPO-token)."""
    if inputs.sequence_log_ratio is not None:
        mean = torch.where(mask, inputs.sequence_log_ratio.to(logprobs.dtype), 0.0).detach()
    else:
        total = sequence_sum((logprobs - anchor).detach(), sequence_ids=inputs.sequence_ids)
        mean = total / _tokens_in_sequence(inputs, mask).to(total.dtype)
    # value: the mean; gradient: that of the token. Bounding the sum keeps both finite and cuts the gradient outside.
    return _bounded(mean + (logprobs - logprobs.detach()), config)


def _weight_ratio(tokens: _Tokens, inputs: LossInputs, config: LossConfig) -> Tensor:
    log_rho = tokens.proximal - tokens.behavior
    if config.weight_level == "sequence":
        if inputs.sequence_log_weight is not None:
            log_rho = torch.where(inputs.mask.bool(), inputs.sequence_log_weight.to(log_rho.dtype), 0.0).detach()
        else:
            log_rho = sequence_sum(log_rho, sequence_ids=inputs.sequence_ids)
    return _bounded(log_rho, config)


def _reference_kl(inputs: LossInputs, tokens: _Tokens, mask: Tensor, importance: Tensor, config: LossConfig) -> Tensor:
    if inputs.reference_logprobs is None:
        raise ValueError(f"reference_logprobs=None with kl_coef={config.kl_coef}: pass them or set the coefficient to 0")
    reference = torch.where(mask, inputs.reference_logprobs.to(tokens.logprobs.dtype), 0.0).detach()
    return kl_loss(tokens.logprobs, reference, estimator=config.kl_estimator, importance=importance)


def _tokens_in_sequence(inputs: LossInputs, mask: Tensor) -> Tensor:
    """Kept tokens of each token's sequence, at least 1 (float64, shape N)."""
    if inputs.sequence_token_count is not None:
        return inputs.sequence_token_count.double().clamp_min(1.0)
    return sequence_sum(mask.double(), sequence_ids=inputs.sequence_ids).clamp_min(1.0)


def _divide(total: Tensor, denominator: Tensor | float) -> Tensor:
    """``total / denominator``; an empty step (denominator 0, total 0) stays 0 with its graph instead of becoming 0/0."""
    divisor = torch.as_tensor(denominator, device=total.device).to(total.dtype)
    return total / torch.where(divisor > 0, divisor, torch.ones_like(divisor))


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
