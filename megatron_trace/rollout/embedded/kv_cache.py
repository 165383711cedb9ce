"""Keys and values of one layer, by slot: packed NVFP4 pages, or dense pages where the layer is not quantised.

Axis legend: T new tokens, N rows being read, 2 = (K, V), W = kv_heads x head_dim values of K (or of V) per token.
"""

from __future__ import annotations

import torch

from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import BLOCK, NVFP4Tensor


class PackedPages:
    """K and V of one layer at 4.5 bits per value: ``rows`` uint8 [slots, W + W/8] = codes of K, of V, block scales of K, of V.

    Blocks run along head_dim. The static amax of K and V, FP32 [2, 1], belongs to the weight version, not to the pages, so
    readers and writers pass it in.
    """

    def __init__(self, *, num_slots: int, width: int, device: torch.device) -> None:
        self.width = width
        self.rows = torch.zeros(num_slots, width + 2 * (width // BLOCK), dtype=torch.uint8, device=device)

    def write(self, slots_T: torch.Tensor, kv_T2W: torch.Tensor, amax_21: torch.Tensor) -> NVFP4Tensor:
        """Round to nearest on the static scale and store; returns what was stored, for the recorder."""
        kv = nvfp4.quantize(kv_T2W, scale_scope="static", global_amax=amax_21)
        self.rows[slots_T] = torch.cat((kv.codes.flatten(1), kv.block_scale.view(torch.uint8).flatten(1)), dim=-1)
        return kv

    def read(self, slots_N: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values [N, 2, W] of the stored bytes, in ``dtype``; ``amax`` [2, 1], or [N, 2, 1] for rows of several versions."""
        rows = self.rows.index_select(0, slots_N)
        codes, scales = rows[:, : self.width], rows[:, self.width :].contiguous().view(torch.float8_e4m3fn)
        stored = NVFP4Tensor(codes=codes.reshape(len(rows), 2, -1), block_scale=scales.view(len(rows), 2, -1), global_amax=amax)
        return stored.dequantize(dtype)


class DensePages:
    """K and V of one layer in the compute dtype: ``rows`` [slots, 2, W]."""

    def __init__(self, *, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(num_slots, 2, width, dtype=dtype, device=device)

    def write(self, slots_T: torch.Tensor, kv_T2W: torch.Tensor) -> None:
        """Store K and V as they are."""
        self.rows[slots_T] = kv_T2W

    def read(self, slots_N: torch.Tensor) -> torch.Tensor:
        """Values [N, 2, W]."""
        return self.rows.index_select(0, slots_N)


Pages = PackedPages | DensePages


def copy_slots(pages: Pages, source_N: torch.Tensor, target_N: torch.Tensor) -> None:
    """Copy whole rows, so that a forked sequence owns its own last, partly filled page."""
    pages.rows[target_N] = pages.rows[source_N]
