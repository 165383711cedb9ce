"""Eight-bit formats with absmax scales: INT8 and FP8 E4M3 per row (QuRL), FP8 in blocks of 128 (DeepSeek's recipe).

``row``: one FP32 scale per last dimension, which is per output channel for a weight [out, in] and per token for an activation
[tokens, in], QuRL's choice (arXiv 2602.13953, section 5). ``1x128``: per row and 128 values; ``128x128``: per tile of a matrix.
Ragged edges of the blocked forms get a scale of their own, over what is there. scale = amax / max (127 or 448), 1 where that
is 0; code = round(x / scale), half to even, saturated (INT8: -127..127, symmetric); one IEEE division each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_trace.numerics import e4m3

Format = Literal["int8", "fp8"]
Granularity = Literal["row", "1x128", "128x128"]
_MAX = {"int8": 127.0, "fp8": e4m3.MAX}
BLOCK = 128


@dataclass(frozen=True)
class Scaled8Tensor:
    """``codes`` int8 or float8_e4m3fn [..., K]; ``scale`` float32 [..., 1], [..., ceil(K/128)] or [..., ceil(M/128),
    ceil(K/128)].
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """code * scale in float32, then rounded to ``dtype``."""
        return (self.codes.float() * _spread(self.scale, self.codes.shape, self.granularity)).to(dtype)


@torch.no_grad()
def quantize(x: Tensor, *, format: Format, granularity: Granularity = "row") -> Scaled8Tensor:
    """Quantise float ``x`` [..., K]; raises ValueError for an unknown format or granularity, or 128x128 of a vector."""
    if format not in _MAX or granularity not in ("row", "1x128", "128x128"):
        raise ValueError(f"scaled8: format={format!r}, granularity={granularity!r}: must be int8|fp8 and row|1x128|128x128")
    if granularity == "128x128" and x.ndim < 2:
        raise ValueError(f"scaled8: granularity 128x128 needs a matrix, got shape {list(x.shape)}")
    x_f32 = x.float()
    amax = _amax(x_f32, granularity)
    scale = torch.div(amax, torch.full_like(amax, _MAX[format]))
    scale = torch.where(scale == 0, 1.0, scale)
    t = torch.div(x_f32, _spread(scale, x.shape, granularity))
    codes = t.round_().clamp_(-127, 127).to(torch.int8) if format == "int8" else e4m3.cast(t)
    return Scaled8Tensor(codes=codes, scale=scale, granularity=granularity)


def fake_quantize(x: Tensor, *, format: Format, granularity: Granularity = "row") -> Tensor:
    """Quantise and dequantise with straight-through gradient; returns ``x.dtype``."""
    return _StraightThrough.apply(x, format, granularity)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format, granularity: Granularity) -> Tensor:
        return quantize(x, format=format, granularity=granularity).dequantize(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _amax(x_f32: Tensor, granularity: Granularity) -> Tensor:
    magnitude = x_f32.abs()
    if granularity == "row":
        return magnitude.amax(-1, keepdim=True)
    magnitude = torch.nn.functional.pad(magnitude, (0, -magnitude.shape[-1] % BLOCK))
    amax = magnitude.reshape(*magnitude.shape[:-1], magnitude.shape[-1] // BLOCK, BLOCK).amax(-1)
    if granularity == "1x128":
        return amax
    amax = torch.nn.functional.pad(amax, (0, 0, 0, -amax.shape[-2] % BLOCK))
    return amax.reshape(*amax.shape[:-2], amax.shape[-2] // BLOCK, BLOCK, amax.shape[-1]).amax(-2)


def _spread(scale: Tensor, shape: torch.Size, granularity: Granularity) -> Tensor:
    """Scales broadcastable to ``shape``."""
    if granularity == "row":
        return scale
    wide = scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    return wide if granularity == "1x128" else wide.repeat_interleave(BLOCK, -2)[..., : shape[-2], :]
