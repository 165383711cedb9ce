"""FP8 E4M3 (the "fn" variant: no infinity, one NaN per sign, largest value 448), used for NVFP4 block scales and QuRL's FP8.

Round to nearest, ties to even; subnormals down to 2**-9 are kept; everything beyond 448 is clamped before the cast, because
casts disagree on what lies there (saturation on CPU, NaN elsewhere).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 448.0
"""Largest finite magnitude."""
SMALLEST = 2.0**-9
"""Smallest positive magnitude (subnormal)."""


def cast(x: Tensor) -> Tensor:
    """Round float32 ``x`` to float8_e4m3fn, saturating at +-448. NaN stays NaN (byte 0x7F or 0xFF)."""
    return x.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def decode(scale: Tensor) -> Tensor:
    """float8_e4m3fn (or its bytes, uint8) to float32, exactly."""
    return (scale.view(torch.float8_e4m3fn) if scale.dtype == torch.uint8 else scale).float()
