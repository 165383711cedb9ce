"""Exact softmax attention for the layouts that Megatron-core's local core attention refuses: context parallel and packed.

Context parallelism: every rank keeps its queries and gathers K and V of all ranks (rounded before, so that what is gathered is
what the engine's cache holds). Queries are in Megatron-core's balanced order, ``guidance.sharding.zigzag_positions``. Packed:
sequences of a micro-batch one behind another, each attending within itself.

Axis legend: Q local query positions, K key positions, B sequences, N query heads, G key/value heads, D head width, T packed
tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_trace.guidance.sharding import zigzag_positions


class ExactCoreAttention(MegatronModule):
    """Causal attention with FP32 softmax, without dropout. Takes the place of ``DotProductAttention`` in a local spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout}: must be 0, which rollouts have too")
        self.layer_number = max(1, layer_number)
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """``query`` [Q, B, N, D], ``key`` and ``value`` [K, B, G, D] -> [Q, B, N * D]; packed: [T, N, D] -> [T, N * D]."""
        size = self.config.context_parallel_size
        if packed_seq_params is not None:
            if size > 1:
                raise ValueError("packed sequences are not supported under context parallelism: pad them instead")
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        if size == 1:
            order = np.arange(query.shape[0])
            return self._attend(query, key, value, order, order)
        group = parallel_state.get_context_parallel_group()
        keys, values = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        length = keys.shape[0]
        orders = [zigzag_positions(length, cp_size=size, cp_rank=r) for r in range(size)]
        mine = orders[parallel_state.get_context_parallel_rank()]
        in_order = torch.from_numpy(np.argsort(np.concatenate(orders)))
        return self._attend(query, keys[in_order], values[in_order], mine, np.arange(length))

    def _packed(self, q_TND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        parts = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            order = np.arange(stop - start)
            q, k, v = (x[start:stop].unsqueeze(1) for x in (q_TND, k_TGD, v_TGD))
            parts.append(self._attend(q, k, v, order, order).squeeze(1))
        return torch.cat(parts)

    def _attend(
        self, q_QBND: torch.Tensor, k_KBGD: torch.Tensor, v_KBGD: torch.Tensor, q_at: np.ndarray, k_at: np.ndarray
    ) -> torch.Tensor:
        queries, batch, heads, _ = q_QBND.shape
        repeats = heads // k_KBGD.shape[2]
        q = q_QBND.permute(1, 2, 0, 3)
        k, v = (x.repeat_interleave(repeats, dim=2).permute(1, 2, 0, 3) for x in (k_KBGD, v_KBGD))
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.softmax_scale
        future = torch.from_numpy(k_at[None, :] > q_at[:, None])
        probs = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1).to(q_QBND.dtype)
        return torch.matmul(probs, v).permute(2, 0, 1, 3).reshape(queries, batch, -1)
