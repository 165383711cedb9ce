"""Counters at the rounding sites: coverage, code flips, and (on request) the values themselves. Off the compute path."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from megatron_trace.guidance.frames import GuidanceFrame
from megatron_trace.guidance.spec import KV_SITES
from megatron_trace.numerics import guided
from megatron_trace.numerics.guided import GuidanceRecord


@dataclass
class FlipCount:
    """Values compared with the rollout's record at one site: how many, how many differ without and with guidance.

    ``basis``: what was compared, the whole "code" or its "mantissa bit". A recorded bit cannot tell how often guidance leaves a
    code wrong, since guided rounding reproduces that bit by construction: ``with_guidance`` is then None.
    """

    values: int = 0
    without_guidance: int = 0
    with_guidance: int | None = None
    basis: str | None = None


@dataclass
class SiteProbe:
    """Accumulates over the forwards since ``reset``; plain numbers, merged over ranks by the trainer."""

    guided_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    fallback_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    flip_counts: dict[str, FlipCount] = field(default_factory=lambda: defaultdict(FlipCount))
    counts_kv: bool = True
    """Whether this rank counts tokens at K and V: tensor-parallel ranks see the same tokens there, one of them counts."""
    keep_values: bool = False
    kept: dict[tuple[int, str], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    """(layer, site) -> values before rounding of the real tokens of each micro-batch, in order, while ``keep_values``."""

    def reset(self) -> None:
        self.guided_tokens.clear()
        self.fallback_tokens.clear()
        self.flip_counts.clear()
        self.kept.clear()

    def coverage(self, frame: GuidanceFrame, site: str, has_record: bool) -> None:
        """Count real tokens that had a valid record at ``site`` and those rounded to nearest for want of one."""
        if not frame.rounding.uses_record or frame.is_token is None or (site in KV_SITES and not self.counts_kv):
            return
        tokens = int(frame.is_token.sum())
        guided_tokens = int((frame.is_token & frame.valid).sum()) if has_record and frame.valid is not None else 0
        self.guided_tokens[site] += guided_tokens
        if has_record:
            self.fallback_tokens[site] += tokens - guided_tokens

    def flips(self, frame: GuidanceFrame, layer: int, site: str, x_TK: torch.Tensor, record: GuidanceRecord) -> None:
        """Count values whose code differs from the recorded one under nearest and under guided rounding, same scale."""
        rows = record.valid if frame.is_token is None else record.valid & frame.is_token  # type: ignore[operator]
        nearest, total = guided.nearest_codes(x_TK, record)[rows], self.flip_counts[site]
        if record.bits == 4:
            rollout, total.basis = guided.record_codes(record)[rows], "code"
            flips = int((guided.guided_codes(x_TK, record)[rows] != rollout).sum())
            total.with_guidance = (total.with_guidance or 0) + flips
        else:  # only the mantissa bit is known: a code counts as flipped when its own mantissa bit, its index's parity, differs
            rollout, total.basis = guided.unpack_bits(record.payload)[rows].to(torch.int8), "mantissa bit"
            nearest = nearest & 1
        total.values += rollout.numel()
        total.without_guidance += int((nearest != rollout).sum())

    def values(self, frame: GuidanceFrame, layer: int, site: str, before: torch.Tensor) -> None:
        if self.keep_values:
            rows = slice(None) if frame.is_token is None else frame.is_token
            self.kept[(layer, site)].append(before.detach()[rows])


probe = SiteProbe()
"""This process's probe; sites write to it, the trainer reads and resets it once a step."""
