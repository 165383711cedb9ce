"""MXFP4: E2M1 codes with one power-of-two scale (E8M0) per 32 values; the format of the paper's MXFP4 variants.

OCP Microscaling Formats v1.0: scale = 2**(floor(log2(amax)) - 2), elements x / scale rounded to nearest even and saturated at 6
(``rule="floor"``). ``rule="ceil"`` takes the smallest power of two that does not saturate, 2**ceil(log2(amax / 6)), as
Transformer Engine's reference does for power-of-two scales. Exponents are clamped to E8M0's -127..127; an all-zero block has
exponent -127. Guided rounding is that of NVFP4 with this scale: a compact record takes 1.25 bit a value, a full one 4.25.

Axes: K the last dimension, in blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_trace.numerics import e2m1, guided, rounding
from megatron_trace.numerics.nvfp4 import FLOAT_DTYPES

BLOCK = 32
_BIAS = 127
_NAN = 255
Rule = Literal["floor", "ceil"]


@dataclass(frozen=True)
class MXFP4Tensor:
    """``codes`` uint8 [..., K/2], even index in the low nibble; ``block_scale`` float8_e8m0fnu [..., K/32]."""

    codes: Tensor
    block_scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """code * scale: exact in float32, then rounded to ``dtype``."""
        return _apply_scale(e2m1.unpack_values(self.codes), self.block_scale).to(dtype)


@dataclass(frozen=True)
class MXRecord:
    """What one rollout tensor was rounded to: ``payload`` as in ``GuidanceRecord``, ``block_scale`` float8_e8m0fnu [...,
    K/32].
    """

    bits: int
    payload: Tensor
    block_scale: Tensor


def quantize(x: Tensor, *, rule: Rule = "floor") -> MXFP4Tensor:
    """Quantise float ``x`` [..., K], K a multiple of 32, else ValueError. A NaN makes its block's scale NaN and its codes 0."""
    with torch.no_grad():
        x_f32, scale = _scales(x, rule)
        q = e2m1.round_to_nearest_(_scaled(x_f32, scale))
        return MXFP4Tensor(codes=e2m1.pack_values(q), block_scale=scale)


def make_record(q: MXFP4Tensor, *, bits: int = 1) -> MXRecord:
    """``bits`` 1: mantissa bits; 4: codes."""
    if bits not in (1, 4):
        raise ValueError(f"mxfp4 record bits={bits}: must be 1 (mantissa bit) or 4 (whole code)")
    payload = q.codes if bits == 4 else guided.pack_bits(q.codes)
    return MXRecord(bits=bits, payload=payload, block_scale=q.block_scale)


def fake_quantize(x: Tensor, *, record: MXRecord | None = None, rule: Rule = "floor") -> Tensor:
    """Quantise and dequantise, guided by ``record`` where given; straight-through gradient; returns ``x.dtype``."""
    return _StraightThrough.apply(x, record, rule)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, record: MXRecord | None, rule: Rule) -> Tensor:
        if record is None:
            x_f32, scale = _scales(x, rule)
            q = e2m1.round_to_nearest_(_scaled(x_f32, scale))
        else:
            _check(x)
            scale = record.block_scale
            z = _scaled(x.float(), scale)
            if record.bits == 1:
                q = rounding.compact_(z, guided.unpack_bits(record.payload))
            else:
                q = rounding.full_(z, e2m1.unpack_values(record.payload))
        return _apply_scale(q, scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _check(x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"mxfp4: x is {x.dtype}, must be float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.shape[-1] == 0:
        raise ValueError(f"mxfp4: shape {list(x.shape)}, last dimension must be a positive multiple of {BLOCK}: pad or reshape")


def _scales(x: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(x as float32, float8_e8m0fnu scales [..., K/32])."""
    _check(x)
    if rule not in ("floor", "ceil"):
        raise ValueError(f"mxfp4: rule={rule!r}, must be 'floor' or 'ceil'")
    x_f32 = x.float()
    amax = x_f32.abs().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = exponent - 3  # floor(log2(amax)) - 2
    if rule == "ceil":
        exponent = exponent + (mantissa > 0.75).int()  # 6 = 0.75 * 2**3
    exponent = exponent.masked_fill(amax == 0, -_BIAS).masked_fill(torch.isinf(amax), _BIAS).clamp(-_BIAS, _BIAS)
    byte = (exponent + _BIAS).masked_fill(torch.isnan(amax), _NAN).to(torch.uint8)
    return x_f32, byte.view(torch.float8_e8m0fnu)


def _scaled(x_f32: Tensor, scale: Tensor) -> Tensor:
    """z = clip(x / scale, +-6), exact up to float32's own underflow; -0.0 becomes 0.0."""
    inverse = scale.float().reciprocal()  # powers of two: exact, 2**-127 and 2**127 included
    z = x_f32.reshape(*scale.shape, BLOCK) * inverse.unsqueeze(-1)
    return z.add_(0.0).clamp_(-e2m1.MAX, e2m1.MAX).view(x_f32.shape)


def _apply_scale(q: Tensor, scale: Tensor) -> Tensor:
    q.view(*scale.shape, BLOCK).mul_(scale.float().unsqueeze(-1))
    return q
