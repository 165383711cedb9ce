"""Rounded K and V around any core attention.

K is rounded after RoPE, V raw, in blocks of 16 along head_dim with one static FP32 amax per layer; every position is rounded,
the query's own included, as the engine's packed cache is. Upstream seam: SelfAttention.core_attention.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_trace.guidance import frames
from megatron_trace.modeling.sites import round_site, token_amax


class GuidedCoreAttention(torch.nn.Module):
    """Round K and V as the current frame says, then delegate to ``inner``.

    ``static_amax`` {"k": float, "v": float} is set by the trainer per weight version; ``seen_amax`` collects the largest
    magnitudes since the trainer last took them, for the next version's static amax.
    """

    def __init__(self, inner: torch.nn.Module, *, layer: int, quantizes: bool = True) -> None:
        super().__init__()
        self.inner = inner
        self.layer = layer
        self.quantizes = quantizes
        self.static_amax: dict[str, float] = {}
        self.seen_amax: dict[str, float] = {"k": 0.0, "v": 0.0}

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``query`` [S, B, heads, d], ``key`` and ``value`` [S, B, kv_heads, d] in sequence-first order; packed: without B.

        Under tensor parallelism the heads are this rank's, under context parallelism the positions are.
        """
        if not self.quantizes:
            return self.inner(query, key, value, *args, **kwargs)
        return self.inner(query, self._round(key, "k"), self._round(value, "v"), *args, **kwargs)

    def _round(self, x_SBGD: torch.Tensor, site: str) -> torch.Tensor:
        x_TK = x_SBGD.reshape(-1, x_SBGD.shape[-2] * x_SBGD.shape[-1])
        if not frames.in_backward():
            self.seen_amax[site] = max(self.seen_amax[site], token_amax(x_TK, frames.current()))
        rounded_TK = round_site(x_TK, layer=self.layer, site=site, static_amax=self.static_amax.get(site))
        return rounded_TK.view(x_SBGD.shape)
