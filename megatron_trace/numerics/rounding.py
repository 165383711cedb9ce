"""Rules that round z = clip(x / s, +-6) to an E2M1 value. Each takes and returns float32 of one shape.

``{q-, q+}`` is the bracket of z (``e2m1.bracket``). The functions whose names end in ``_`` overwrite their arguments; the
others leave them alone. A zero takes z's sign. Rules A, B and C of the compact record are compared in docs/numerics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_trace.numerics import e2m1

nearest = e2m1.round_to_nearest
"""Nearest grid value, ties to the even code: the rule of every unguided site."""


def full_(z: Tensor, q_roll: Tensor) -> Tensor:
    """argmin over the bracket of |q - q_roll| (TRACE, full guidance), in place.

    The endpoints are neighbours on the grid, so the argmin is ``q_roll`` clamped to the bracket.
    """
    step = e2m1.steps(z)
    t = z.div_(step)
    high = torch.ceil(t).mul_(step)
    low = t.floor_()  # same sign as z
    q = torch.minimum(q_roll, high, out=q_roll)
    return torch.maximum(q, step.mul_(low), out=q).copysign_(low)


def compact_(z: Tensor, bit: Tensor) -> Tensor:
    """The endpoint of the bracket whose mantissa bit is ``bit`` (0.0 or 1.0), in place; z itself where it is on the grid.

    Rule A, bracket parity. In units of the bracket's width endpoints are integers whose parity is the mantissa bit: take the
    largest integer <= ceil(t) of that parity, but no less than floor(t), which matters on the grid only.
    """
    step = e2m1.steps(z)
    t = z.div_(step)
    half = torch.ceil(t).sub_(bit).mul_(0.5).floor_()
    q = bit.add_(half, alpha=2)
    low = t.floor_()  # same sign as z
    return torch.maximum(q, low, out=q).mul_(step).copysign_(low)


def full(z: Tensor, q_roll: Tensor) -> Tensor:
    """``full_`` on copies."""
    return full_(z.clone(), q_roll.clone())


def compact(z: Tensor, bit: Tensor) -> Tensor:
    """``compact_`` on copies."""
    return compact_(z.clone(), bit.clone())


def nearest_cell(z: Tensor, bit: Tensor) -> Tensor:
    """Rule C: guess the rollout's value as the grid value of mantissa bit ``bit`` whose nearest-rounding cell lies closest to
    z.

    Then as ``full``. Safer than ``compact`` when the two sides differ by half a bracket or more, since a guess two steps off
    falls back to the near endpoint; equal for small differences.
    """
    cells = _cells(z.device)
    candidates, lows, highs = cells[:, 0], cells[:, 1], cells[:, 2]
    distance = torch.maximum(lows - z.unsqueeze(-1), z.unsqueeze(-1) - highs).clamp_(min=0.0)
    wrong_parity = _parity(z.device) != bit.unsqueeze(-1)
    guess = candidates[distance.masked_fill_(wrong_parity, torch.inf).argmin(-1)]
    return full(z, guess)


def stochastic(z: Tensor, uniform: Tensor) -> Tensor:
    """q+ with probability (z - q-) / (q+ - q-), else q-: unbiased. ``uniform`` float32 in [0, 1), so the caller owns the
    seed.
    """
    step = e2m1.steps(z)
    t = z / step
    low = t.floor()
    return torch.add(low, (uniform < t - low).float()).mul_(step).copysign_(z)


def _cells(device: torch.device) -> Tensor:
    """float32 [15, 3]: grid value, lower and upper edge of its nearest-rounding cell, ascending."""
    grid = torch.tensor([*(-m for m in reversed(e2m1.MAGNITUDES[1:])), *e2m1.MAGNITUDES], device=device)
    middles = (grid[1:] + grid[:-1]) * 0.5
    edge = torch.tensor([torch.inf], device=device)
    return torch.stack((grid, torch.cat((-edge, middles)), torch.cat((middles, edge))), dim=-1)


def _parity(device: torch.device) -> Tensor:
    """float32 [15]: mantissa bits along the ascending signed grid."""
    return ((torch.arange(15, device=device) + 1) % 2).float()
