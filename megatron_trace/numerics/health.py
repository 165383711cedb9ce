"""Counts of what can go wrong in a quantised tensor, and the check that refuses NaN and infinity. Called only where wanted.

Counts are 0-d tensors on the tensor's device: adding them up costs no synchronisation; ``as_dict`` is where one happens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import NVFP4Tensor

HISTOGRAM_BINS = 17
"""Block scales that are 0 or subnormal first, then one bin per E4M3 exponent -6..8, NaN last."""


class NonFiniteError(ValueError):
    """A tensor that must be finite holds NaN or infinity."""


def require_finite(x: Tensor, *, name: str) -> Tensor:
    """``x`` itself; raises NonFiniteError naming the tensor, how many values are bad, and the first one's place."""
    bad = ~torch.isfinite(x)
    count = int(bad.sum())
    if count:
        place = [int(i) for i in bad.nonzero()[0]]
        value = float(x[tuple(place)])
        raise NonFiniteError(
            f"{name}: {count} of {x.numel()} values are NaN or infinite, first {value} at {place}: find its source"
        )
    return x


@dataclass(frozen=True)
class Health:
    """Sums over quantised tensors, int64 0-d each.

    ``values``; ``saturated``: |x| beyond 6 scales, clipped (only under a static or reduced amax, or a scale rounded down);
    ``blocks``; ``flushed``: blocks with non-zero values whose scale became 0; ``nan``, ``infinite``: input values;
    ``scale_histogram`` int64 [17] over block scales.
    """

    values: Tensor
    saturated: Tensor
    blocks: Tensor
    flushed: Tensor
    nan: Tensor
    infinite: Tensor
    scale_histogram: Tensor

    def __add__(self, other: Health) -> Health:
        return Health(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))

    def as_dict(self) -> dict[str, int | list[int]]:
        """Plain integers, for a log line."""
        return {f: getattr(self, f).tolist() for f in self.__dataclass_fields__}


@torch.no_grad()
def measure(x: Tensor, q: NVFP4Tensor) -> Health:
    """Health of ``q``, which was quantised from ``x``."""
    x_f32 = x.float()
    amax = nvfp4.block_amax(x_f32.abs())
    scale = q.block_scale.float()
    inverse = nvfp4.inverse_scale(scale, nvfp4.encode_scale(q.global_amax, q.e4m3_max))
    blocks = x_f32.reshape(*scale.shape, nvfp4.BLOCK)
    live = (scale > 0).unsqueeze(-1)
    exponent = (q.block_scale.view(torch.uint8) & 0x7F) >> 3
    nan_scale = (q.block_scale.view(torch.uint8) & 0x7F) == 0x7F
    bins = torch.where(nan_scale, torch.full_like(exponent, HISTOGRAM_BINS - 1), exponent)
    return Health(
        values=torch.tensor(x.numel(), device=x.device),
        saturated=((blocks.abs() * inverse.unsqueeze(-1) > 6) & live).sum(),
        blocks=torch.tensor(scale.numel(), device=x.device),
        flushed=((scale == 0) & (amax > 0)).sum(),
        nan=torch.isnan(x_f32).sum(),
        infinite=torch.isinf(x_f32).sum(),
        scale_histogram=torch.bincount(bins.flatten().long(), minlength=HISTOGRAM_BINS),
    )
