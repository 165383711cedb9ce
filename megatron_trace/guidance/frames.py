"""Guidance frames: what the rounding sites of one micro-batch look up.

An immutable frame per micro-batch holds the gathered rows, in the trainer's token order (sequence-first: token ``s * B + b``),
and says how each site rounds. ``make_current`` is called by forward_step; ``kept_for_backward`` makes the frame current again
when backward reaches the tensors of its micro-batch, so that a recomputation sees its own frame whatever the schedule. The
holder is one per process, not per thread, because autograd may run a recompute on another thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from megatron_trace.guidance import syndrome
from megatron_trace.guidance.errors import LayerError
from megatron_trace.guidance.spec import KV_SITES, Column, RecordLayout
from megatron_trace.numerics.guided import GuidanceRecord


class Rounding(Enum):
    """How a forward rounds; each name is one row of the method tables."""

    BF16 = "bf16"
    """Nothing is quantised."""
    WEIGHTS_ONLY = "w4a16"
    """Expert weights only (QUADS's trainer)."""
    NEAREST = "qat"
    """Weights, activations and KV to nearest on the trainer's own scales (plain QAT)."""
    NEAREST_ON_ROLLOUT_SCALE = "rtn_rollout_scale"
    """To nearest, on the recorded scales where there is a record."""
    GUIDED = "guided"
    """Toward the recorded codeword on the recorded scale where there is a record, to nearest elsewhere."""

    @property
    def quantizes_weights(self) -> bool:
        return self is not Rounding.BF16

    @property
    def quantizes_activations(self) -> bool:
        return self not in (Rounding.BF16, Rounding.WEIGHTS_ONLY)

    @property
    def uses_record(self) -> bool:
        return self in (Rounding.NEAREST_ON_ROLLOUT_SCALE, Rounding.GUIDED)


@dataclass
class DecodeCounts:
    """Checksummed chunks of syndrome records of real, valid tokens: all, those put right by a retry, those left unverified."""

    chunks: int = 0
    retried: int = 0
    unverified: int = 0


@dataclass(frozen=True)
class HeadShare:
    """The KV heads a tensor-parallel rank computes: ``count`` from ``first`` on, each ``head_dim`` values wide."""

    first: int
    count: int
    head_dim: int


@dataclass(frozen=True)
class GuidanceFrame:
    """Everything one micro-batch needs at its rounding sites. T = tokens of the micro-batch, in sequence-first order.

    ``rows`` uint8 [T, layout.row_bytes] and ``valid`` bool [T] (False: no record, round to nearest); ``static_amax`` float32
    [T] per (layer, site) without an amax of its own; ``routes`` integers [T, L, k], as narrow as recorded, with
    ``routes_valid`` bool [T] and ``route_layers`` the global layers of axis L (None: all);
    ``is_token`` bool [T], False for padding. ``heads``: records of K and V are cut to these (None: all). ``sequence_part``
    (start, stop): tokens that sequence parallelism leaves this rank at sites other than K and V (None: all).
    """

    rounding: Rounding
    is_token: torch.Tensor | None = None
    layout: RecordLayout | None = None
    rows: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    static_amax: Mapping[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    routes: torch.Tensor | None = None
    routes_valid: torch.Tensor | None = None
    route_layers: tuple[int, ...] | None = None
    measure_flips: bool = False
    """Whether sites count code flips in this micro-batch (costs one more rounding)."""
    decode_counts: DecodeCounts = field(default_factory=DecodeCounts)
    """Grows whenever a syndrome record is decoded, recomputation included."""
    heads: HeadShare | None = None
    sequence_part: tuple[int, int] | None = None

    def take(self, index_T: torch.Tensor) -> GuidanceFrame:
        """The frame of the tokens ``index_T`` int64 [T'], in that order; -1 is padding that has no row of its own."""
        safe = index_T.clamp(min=0)
        real = index_T >= 0

        def picked(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.index_select(0, safe)

        def masked(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.index_select(0, safe) & real

        return replace(
            self,
            is_token=real if self.is_token is None else masked(self.is_token),
            rows=picked(self.rows),
            valid=masked(self.valid),
            static_amax={key: amax.index_select(0, safe) for key, amax in self.static_amax.items()},
            routes=picked(self.routes),
            routes_valid=masked(self.routes_valid),
        )

    @property
    def record_bits(self) -> int:
        """Bits a value of the records that ``record`` returns: syndromes are decoded to mantissa bits."""
        return self.layout.bits if self.layout is not None and self.layout.bits != "syndrome" else 1

    def at(self, site: str) -> GuidanceFrame:
        """The frame with the tokens this rank has at ``site``: K and V see every token, other sites the sequence part."""
        return self if self.sequence_part is None or site in KV_SITES else self._part

    @cached_property
    def _part(self) -> GuidanceFrame:
        assert self.sequence_part is not None
        part = slice(*self.sequence_part)

        def cut(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[part]

        return replace(
            self,
            is_token=cut(self.is_token),
            rows=cut(self.rows),
            valid=cut(self.valid),
            static_amax={key: amax[part] for key, amax in self.static_amax.items()},
            routes=cut(self.routes),
            routes_valid=cut(self.routes_valid),
            sequence_part=None,
        )

    def record(self, layer: int, site: str, x_TK: torch.Tensor | None = None) -> GuidanceRecord | None:
        """The record of ``site`` in global ``layer`` [T, K] for this micro-batch, or None where nothing was recorded.

        [T, heads, head_dim] where each KV head has an amax of its own. A syndrome record is decoded against the trainer's own
        values ``x_TK``; TypeError without them.
        """
        column = self.layout.column(layer, site) if self.layout is not None else None
        if column is None or self.rows is None or self.layout is None:
            return None
        if self.layout.bits == "syndrome":
            return self._decoded(column, x_TK)
        codes_end = column.start + column.code_bytes
        scales_end = codes_end + column.scale_bytes
        if column.amax_bytes:
            amax = self.rows[:, scales_end : scales_end + column.amax_bytes].contiguous().view(torch.float32)
        else:
            amax = self.static_amax[(layer, site)].unsqueeze(-1)
        payload, scale = self.rows[:, column.start : codes_end], self.rows[:, codes_end:scales_end]
        if self.heads is not None and site in KV_SITES:
            payload, scale = self._own_heads(column, payload), self._own_heads(column, scale)
            amax = self._own_heads(column, amax) if amax.shape[-1] > 1 else amax
        valid = self.valid
        if amax.shape[-1] > 1:  # one row per head: x is looked at as [T, heads, head_dim]
            heads = amax.shape[-1]
            payload, scale = (part.reshape(len(part), heads, -1) for part in (payload, scale))
            amax = amax.unsqueeze(-1)
            valid = None if valid is None else valid.unsqueeze(-1).expand(-1, heads)
        return GuidanceRecord(
            bits=self.layout.bits,
            payload=payload,
            block_scale=scale.view(torch.float8_e4m3fn),
            global_amax=amax,
            valid=valid,
        )

    def _own_heads(self, column: Column, values: torch.Tensor) -> torch.Tensor:
        """The part of ``values`` [T, n], n in proportion to the heads held, that belongs to this rank's heads."""
        assert self.heads is not None
        held, per_head = column.width // self.heads.head_dim, values.shape[-1] * self.heads.head_dim // column.width
        first = self.heads.first - column.first // self.heads.head_dim
        if first < 0 or first + self.heads.count > held:
            raise LayerError(
                f"{column.site} of layer {column.layer}: heads {self.heads.first} to "
                f"{self.heads.first + self.heads.count - 1} are needed, {held} from {self.heads.first - first} on are held"
            )
        return values[:, first * per_head : (first + self.heads.count) * per_head].contiguous()

    def _decoded(self, column: Column, x_TK: torch.Tensor | None) -> GuidanceRecord:
        if x_TK is None:
            raise TypeError(
                f"record of {column.site} in layer {column.layer} is a syndrome: pass the values it is decoded against"
            )
        if self.heads is not None and column.site in KV_SITES and self.heads.count * self.heads.head_dim != column.width:
            raise LayerError(
                f"syndrome record of {column.site} in layer {column.layer} spans all heads and cannot be cut for tensor "
                "parallelism: use guidance.bits 1 or 4, or parallel.tensor=1"
            )
        assert self.rows is not None
        static = None if column.amax_bytes else self.static_amax[(column.layer, column.site)].unsqueeze(-1)
        decoded = syndrome.decode(x_TK.detach(), self.rows[:, column.start : column.stop], column, static_amax=static)
        real = torch.ones(len(x_TK), dtype=torch.bool) if self.is_token is None else self.is_token
        real = real if self.valid is None else real & self.valid
        self.decode_counts.chunks += int(real.sum()) * decoded.unverified.shape[-1]
        self.decode_counts.retried += int(decoded.retried[real].sum())
        self.decode_counts.unverified += int(decoded.unverified[real].sum())
        return replace(decoded.record, valid=self.valid)

    def raw_values(self, layer: int, site: str) -> torch.Tensor:
        """The BF16 values [T, K] the rollout rounded; KeyError where the record did not keep them."""
        column = self.layout.column(layer, site) if self.layout is not None else None
        if column is None or not column.raw_bytes or self.rows is None:
            raise KeyError(f"raw values of {site} in layer {layer} were not recorded")
        return self.rows[:, column.stop - column.raw_bytes : column.stop].contiguous().view(torch.bfloat16)

    def routes_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replayed experts int64 [T, k] of ``layer`` and their validity bool [T], or None when routes are live."""
        if self.routes is None or self.routes_valid is None:
            return None
        index = layer if self.route_layers is None else self.route_layers.index(layer)
        return self.routes[:, index].long(), self.routes_valid


_BF16_FRAME = GuidanceFrame(rounding=Rounding.BF16)
_current: GuidanceFrame = _BF16_FRAME
_in_backward = False


def current() -> GuidanceFrame:
    """The frame of the micro-batch being computed; before any is made current nothing is quantised."""
    return _current


def in_backward() -> bool:
    """Whether the current frame was restored for a backward: what runs now is a recomputation, already counted once."""
    return _in_backward


def make_current(frame: GuidanceFrame | None) -> None:
    """Make ``frame`` current until the next call; None ends the step. Called by forward_step, once per micro-batch."""
    global _current, _in_backward
    _current, _in_backward = _BF16_FRAME if frame is None else frame, False


def kept_for_backward(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, with a node in the graph that makes the frame current now current again when backward comes by."""
    return _KeepFrame.apply(x, _current) if x.requires_grad and torch.is_grad_enabled() else x  # type: ignore[no-any-return, no-untyped-call]


class _KeepFrame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, frame: GuidanceFrame) -> torch.Tensor:
        ctx.frame = frame
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        global _current, _in_backward
        _current, _in_backward = ctx.frame, True
        return grads[0], None
