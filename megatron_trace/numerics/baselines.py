"""What other methods do at an activation site, as pairs of functions: one for the rollout, one for the trainer.

Both sides of a method multiply with the same fake-quantised weights; they differ in the activation:

============= ============================================ ==========================
method        rollout                                      trainer
============= ============================================ ==========================
bf16          x                                            x
qat           Q(x)                                         Q(x), own scale
w4a16         Q(x)                                         x
quads         Q(x) + Q(R_T) on the top channels T          x  (W4A16)
resq          Q(x) + S_2:4(Q(R))                           Q(x), own scale
trace         Q(x), recorded                               guided by the record
============= ============================================ ==========================

R = x - Q(x). QUADS: arXiv 2607.15810; Rollout-ResQ: arXiv 2607.26515. Both add the correction in a second matrix product with
the same weights, which is the product with the sum returned here (float32, since the sum need not be a BF16 number). Axes: T
tokens, K channels, blocks of 16 along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import BLOCK, ScaleScope


def top_residual_channels(residual_TK: Tensor, *, ratio: float) -> Tensor:
    """Ascending indices of the ``ratio`` of channels with most residual energy over all tokens, a multiple of 16 of them.

    A whole number of blocks, so that the gathered residual can be quantised; at least one block. ValueError outside (0, 1].
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"residual channel ratio={ratio}: must be in (0, 1]")
    width = residual_TK.shape[-1]
    count = max(BLOCK, round(width * ratio / BLOCK) * BLOCK)
    energy = residual_TK.float().square().reshape(-1, width).sum(0)
    return energy.topk(count, sorted=False).indices.sort().values


@torch.no_grad()
def quads_rollout(
    x_TK: Tensor, *, ratio: float = 0.5, scale_scope: ScaleScope = "row", global_amax: Tensor | None = None, exact: bool = False
) -> Tensor:
    """QUADS' rollout activation, float32: Q(x) plus the quantised residual of the top channels.

    The residual has scales of its own per row. ``exact``: add the residual itself, the method's limit of a perfect second pass.
    """
    q = nvfp4.quantize_dequantize(x_TK.float(), scale_scope=scale_scope, global_amax=global_amax)
    residual = x_TK.float() - q
    top = top_residual_channels(residual, ratio=ratio)
    part = residual.index_select(-1, top)
    correction = part if exact else nvfp4.quantize_dequantize(part, scale_scope="row")
    return q.index_add_(-1, top, correction)


@torch.no_grad()
def resq_rollout(x_TK: Tensor, *, scale_scope: ScaleScope = "row", global_amax: Tensor | None = None) -> Tensor:
    """Rollout-ResQ's activation, float32: Q(x) plus, of each four quantised residuals, the two largest in magnitude."""
    q = nvfp4.quantize_dequantize(x_TK.float(), scale_scope=scale_scope, global_amax=global_amax)
    residual = nvfp4.quantize_dequantize(x_TK.float() - q, scale_scope="row")
    return q + keep_2_of_4(residual)


def keep_2_of_4(x: Tensor) -> Tensor:
    """Zero the two smallest magnitudes of each four neighbours; ties keep the earlier ones. K must be a multiple of 4."""
    if x.shape[-1] % 4:
        raise ValueError(f"2:4 sparsity: last dimension is {x.shape[-1]}, must be a multiple of 4")
    fours = x.reshape(*x.shape[:-1], x.shape[-1] // 4, 4)
    order = fours.abs().argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return torch.where(mask, fours, 0.0).view(x.shape)
