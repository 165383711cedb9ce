"""Expert weights are quantised once per optimiser step; forward, refit and checkpoint all use those same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import NVFP4Tensor


class _ForwardThroughQuantized(torch.autograd.Function):
    """Forward sees the dequantised weight, the gradient goes to the master weight unchanged (straight-through)."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dequantized: torch.Tensor) -> torch.Tensor:
        return dequantized.view_as(dequantized)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


@dataclass(frozen=True)
class QuantizedExpertWeight:
    """One expert matrix: ``packed`` NVFP4 (fc1: gate and up as a pair with one FP32 scale) and its values in compute dtype."""

    packed: NVFP4Tensor
    dequantized: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> QuantizedExpertWeight:
        """Quantise ``weight`` [out, in] from its BF16-rounded values, whatever the master precision (DESIGN.md 3.2)."""
        packed = nvfp4.quantize(weight.detach().to(torch.bfloat16), scale_scope="tensor")
        return cls(packed=packed, dequantized=packed.dequantize(weight.dtype))

    def applied_to(self, weight: torch.Tensor) -> torch.Tensor:
        """The dequantised values as a function of the master ``weight``: dgrad uses the values, wgrad goes to the master."""
        return _ForwardThroughQuantized.apply(weight, self.dequantized)
