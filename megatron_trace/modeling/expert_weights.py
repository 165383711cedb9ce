"""Expert weights are quantised once per optimiser step; forward, refit and checkpoint all use those same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import NVFP4Tensor
from megatron_trace.platform.compute import linear

WeightBackward = Literal["dequantized", "straight_through"]
"""What the gradient to an expert's input is computed with: the values the forward used, or the master weights."""


class _ForwardThroughQuantized(torch.autograd.Function):
    """Forward sees the dequantised weight, the gradient goes to the master weight unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dequantized: torch.Tensor) -> torch.Tensor:
        return dequantized.view_as(dequantized)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _LinearWithMasterBackward(torch.autograd.Function):
    """``x @ dequantized.T`` whose backward is that of ``x @ weight.T``."""

    @staticmethod
    def forward(ctx: Any, x_RK: torch.Tensor, weight: torch.Tensor, dequantized: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_RK, weight)
        return linear(x_RK, dequantized)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (grad_RN,), (x_RK, weight) = grads, ctx.saved_tensors
        return linear(grad_RN, weight.t()), linear(grad_RN.t(), x_RK.t()).to(weight.dtype), None


@dataclass(frozen=True)
class QuantizedExpertWeight:
    """One expert matrix: ``packed`` NVFP4 (fc1: gate and up as a pair with one FP32 scale) and its values in compute dtype."""

    packed: NVFP4Tensor
    dequantized: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, *, amax: torch.Tensor | None = None) -> QuantizedExpertWeight:
        """Quantise ``weight`` [out, in] from its BF16-rounded values, whatever the master precision (DESIGN.md 3.2).

        ``amax`` float32 []: of the whole matrix, where ``weight`` is a shard of it.
        """
        packed = nvfp4.quantize(_source(weight), scale_scope="tensor", global_amax=amax)
        return cls(packed=packed, dequantized=packed.dequantize(weight.dtype))

    def applied_to(self, weight: torch.Tensor) -> torch.Tensor:
        """The dequantised values as a function of the master ``weight``: dgrad uses the values, wgrad goes to the master."""
        return _ForwardThroughQuantized.apply(weight, self.dequantized)

    def linear_with_master_backward(self, x_RK: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x_RK`` times the dequantised values; both gradients as if it had been the master ``weight``."""
        return _LinearWithMasterBackward.apply(x_RK, weight, self.dequantized)


def quantize_shards(weights: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[QuantizedExpertWeight]:
    """Quantise this rank's shards of expert matrices, each with the amax of the whole matrix. Collective over ``group``."""
    if group.size() == 1:
        return [QuantizedExpertWeight.of(weight) for weight in weights]
    amax = torch.stack([nvfp4.global_amax_of(_source(weight), scale_scope="tensor") for weight in weights])
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return [QuantizedExpertWeight.of(weight, amax=a) for weight, a in zip(weights, amax.unbind(), strict=True)]


def _source(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to(torch.bfloat16)
