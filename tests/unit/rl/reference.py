"""Brute-force oracle for policy losses: one token at a time, Python floats, derivatives written out by hand.

It shares no code and no formula layout with megatron_trace.rl.losses: the minimum of two products is resolved by the sign of A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """One kept token: its sequence, log-probabilities and advantage."""

    sequence: int
    current: float
    proximal: float
    behavior: float
    advantage: float


def bounded_exp(x: float, bound: float) -> tuple[float, float]:
    """exp of x held in [-bound, bound], and its derivative (0 outside)."""
    if x > bound:
        return math.exp(bound), 0.0
    if x < -bound:
        return math.exp(-bound), 0.0
    return math.exp(x), math.exp(x)


def surrogate(
    *,
    objective: str,
    ratio: float,
    slope: float,
    rho: float,
    advantage: float,
    clip_low: float,
    clip_high: float,
    truncation: float,
    dual_clip: float | None,
    two_sided: bool,
) -> tuple[float, float]:
    """Objective of one token and its derivative by the current log-probability (QuRL Eq. 1, 3, 4, 5, 9)."""
    weight = {"decoupled": rho, "tis": min(rho, truncation), "acr": min(rho, truncation)}.get(objective, 1.0)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    if objective == "acr":
        r = min(1.0, truncation / rho)
        high = high / r
    if advantage > 0:
        value, derivative = (ratio, slope) if ratio <= high else (high, 0.0)
    elif advantage < 0:
        value, derivative = (ratio, slope) if ratio >= low else (low, 0.0)
        if two_sided and ratio > high:
            value, derivative = high, 0.0
        if dual_clip is not None and value > dual_clip:
            value, derivative = dual_clip, 0.0
    else:
        return 0.0, 0.0
    return weight * advantage * value, weight * advantage * derivative


def reference_loss(
    tokens: list[Token],
    *,
    objective: str,
    aggregation: str,
    sequences: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    truncation: float = 2.0,
    constant_length: float | None = None,
    dual_clip: float | None = None,
    two_sided: bool = False,
    ratio_level: str = "token",
    weight_level: str = "token",
    bound: float = 20.0,
) -> tuple[float, list[float]]:
    """Loss over all kept tokens at once and its gradient by each token's current log-probability."""
    members: dict[int, list[Token]] = {}
    for token in tokens:
        members.setdefault(token.sequence, []).append(token)
    loss, gradient = 0.0, []
    for token in tokens:
        mates = members[token.sequence]

        def log_ratio(t: Token) -> float:
            return t.current - (t.behavior if objective == "naive_behavior" else t.proximal)

        x = log_ratio(token)
        if ratio_level == "sequence":
            x = sum(log_ratio(t) for t in mates) / len(mates)
        ratio, slope = bounded_exp(x, bound)
        y = token.proximal - token.behavior
        if weight_level == "sequence":
            y = sum(t.proximal - t.behavior for t in mates)
        rho, _ = bounded_exp(y, bound)
        value, derivative = surrogate(
            objective=objective,
            ratio=ratio,
            slope=slope,
            rho=rho,
            advantage=token.advantage,
            clip_low=clip_low,
            clip_high=clip_high,
            truncation=truncation,
            dual_clip=dual_clip,
            two_sided=two_sided,
        )
        if aggregation == "token_mean":
            share = 1.0 / len(tokens)
        elif aggregation == "sequence_mean":
            share = 1.0 / (len(mates) * len(members))
        else:
            assert constant_length is not None
            share = 1.0 / (constant_length * sequences)
        loss -= share * value
        gradient.append(-share * derivative)
    return loss, gradient
