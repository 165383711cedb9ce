"""Forward pass of the Qwen3-MoE family over paged KV, op for op what Megatron-core's local modules do.

All tensors have the engine's dtype; matrix products run in FP32 on FP32 weight copies and are rounded once to that dtype,
except router logits and vocabulary logits, which stay FP32. Upstream: megatron/core/transformer/dot_product_attention.py,
models/common/embeddings/rope_utils.py, fusions/fused_softmax.py, transformer/moe/{router,moe_utils}.py.

Axis legend: T flattened new tokens of all sequences, B sequences, Q new tokens of one sequence (padded), S context slots
(padded), N query heads, G KV heads, M query heads per KV head, D head_dim, W = G x D, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_trace.config.model import ModelConfig
from megatron_trace.platform.compute import linear
from megatron_trace.rollout.embedded.experts import moe
from megatron_trace.rollout.embedded.kv_cache import PackedPages, Pages
from megatron_trace.rollout.embedded.recorder import Recorder
from megatron_trace.rollout.embedded.weights import LayerWeights, Weights

MASKED_SCORE = -10000.0
"""Megatron-core's fill value; exp() of it is 0 beside any real score."""


@dataclass(frozen=True)
class ForwardBatch:
    """What one forward computes: the new tokens of B sequences, flattened, and where their context lies."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    """KV slot that each new token is written to."""
    context_BS: torch.Tensor
    """KV slot of each position of each sequence, from 0; past its end any valid slot."""
    row_BQ: torch.Tensor
    """Row in T of each new token of each sequence; padding repeats the last one."""
    last_B: torch.Tensor
    """Row in T of each sequence's last new token, the one whose logits are wanted."""
    cell_T: torch.Tensor | None
    """Cell of the flattened [B, Q] grid that each row of T came from; None when Q is 1."""


class Qwen3MoeModel:
    """Stateless but for the RoPE tables: weights, pages and recorder are passed in."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = model
        self.dtype = dtype
        steps = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device)
        frequency = 1.0 / (model.rope_theta ** (steps / model.head_dim))
        angle = torch.outer(torch.arange(model.max_position_embeddings, dtype=torch.float32, device=device), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self._cos, self._sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, batch: ForwardBatch, weights: Weights, pages: list[Pages], recorder: Recorder) -> torch.Tensor:
        """FP32 logits [B, V] after each sequence's last new token; writes K, V and records of all new tokens."""
        recorder.begin(batch.slots_T, weights.version)
        rope = (self._cos[batch.positions_T].unsqueeze(1), self._sin[batch.positions_T].unsqueeze(1))
        query_position_BQ = batch.positions_T[batch.row_BQ]
        future_BQS = torch.arange(batch.context_BS.shape[1], device=query_position_BQ.device) > query_position_BQ.unsqueeze(-1)
        amax_index = recorder.amax_index(batch.context_BS.flatten())
        hidden_TH = weights.embedding[batch.tokens_T]
        for layer, layer_weights in enumerate(weights.layers):
            x_TH = self._norm(hidden_TH, layer_weights.input_norm)
            context_TH = self._attention(
                x_TH, layer, layer_weights, batch, rope, future_BQS, amax_index, pages[layer], recorder
            )
            hidden_TH = hidden_TH + row_parallel(context_TH, layer_weights.o)
            x_TH = self._norm(hidden_TH, layer_weights.post_norm)
            routed_TH = moe(x_TH, layer_weights, layer=layer, top_k=self.config.num_experts_per_tok, recorder=recorder)
            hidden_TH = hidden_TH + routed_TH
        recorder.commit()
        last_BH = self._norm(hidden_TH[batch.last_B], weights.final_norm)
        # FP32 logits: near 10, BF16 values lie 0.06 apart, more than the mismatch this project measures.
        return F.linear(last_BH.float(), weights.head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _attention(
        self,
        x_TH: torch.Tensor,
        layer: int,
        weights: LayerWeights,
        batch: ForwardBatch,
        rope: tuple[torch.Tensor, torch.Tensor],
        future_BQS: torch.Tensor,
        amax_index: torch.Tensor | None,
        pages: Pages,
        recorder: Recorder,
    ) -> torch.Tensor:
        """Context vectors [T, N * D]. New K and V go to the pages first and are read back from there, their own included.

        Rows are read with the static amax of the weight version they were written under.
        """
        c = self.config
        heads, kv_heads, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qk_TD, v_TW = linear(x_TH, weights.qkv).split(((heads + kv_heads) * d, kv_heads * d), dim=-1)
        qk_TND = rotate(head_norm(qk_TD.view(-1, heads + kv_heads, d), weights.qk_norm, eps=c.rms_norm_eps), *rope)
        kv_T2W = torch.stack((qk_TND[:, heads:].flatten(1), v_TW), dim=1)
        slots = batch.context_BS.flatten()
        if isinstance(pages, PackedPages):
            assert weights.kv_amax is not None
            stored = pages.write(batch.slots_T, kv_T2W, weights.kv_amax)
            recorder.site(layer, "k", stored, kv_T2W, part=0)
            recorder.site(layer, "v", stored, kv_T2W, part=1)
            amax = weights.kv_amax if amax_index is None else recorder.amax_of(layer)[amax_index]
            kv_N2W = pages.read(slots, amax, self.dtype)
        else:
            pages.write(batch.slots_T, kv_T2W)
            kv_N2W = pages.read(slots)
        q_BQND = qk_TND[:, :heads][batch.row_BQ]
        k_BSGD, v_BSGD = kv_N2W.view(*batch.context_BS.shape, 2, kv_heads, d).unbind(2)
        context_BQND = attend(q_BQND, k_BSGD, v_BSGD, future_BQS)
        context = context_BQND.reshape(-1, heads * d)
        return context if batch.cell_T is None else context[batch.cell_T]


def head_norm(x_TND: torch.Tensor, weight_ND: torch.Tensor, *, eps: float) -> torch.Tensor:
    """RMSNorm of each head with its own FP32 weight row, bit for bit ``F.rms_norm``; one call for all q and k heads."""
    x32 = x_TND.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight_ND).to(x_TND.dtype)


def rotate(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on two halves (not interleaved): both products and their sum are rounded to the dtype, as upstream."""
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D


def attend(q_BQND: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, future_BQS: torch.Tensor) -> torch.Tensor:
    """Grouped-query softmax attention [B, Q, N, D]; scores and probabilities rounded to the dtype, softmax in FP32."""
    dtype, (b, q, heads, d), (_, s, kv_heads, _) = q_BQND.dtype, q_BQND.shape, k_BSGD.shape
    m = heads // kv_heads
    grouped = q_BQND.view(b, q, kv_heads, m, d).permute(0, 2, 3, 1, 4).reshape(b * kv_heads, m * q, d).float()
    keys = k_BSGD.permute(0, 2, 3, 1).reshape(b * kv_heads, d, s).float()
    values = v_BSGD.transpose(1, 2).reshape(b * kv_heads, s, d).float()
    # beta=0: the first operand is never read. alpha inside the product, before the rounding, as upstream.
    empty = grouped.new_empty(b * kv_heads, m * q, s)
    scores = torch.baddbmm(empty, grouped, keys, beta=0.0, alpha=1.0 / math.sqrt(d)).to(dtype).float()
    scores.view(b, kv_heads, m, q, s).masked_fill_(future_BQS[:, None, None], MASKED_SCORE)
    probs = torch.softmax(scores, dim=-1).to(dtype)
    context = torch.bmm(probs.float(), values).to(dtype)
    return context.view(b, kv_heads, m, q, d).permute(0, 3, 1, 2, 4).reshape(b, q, heads, d)


def row_parallel(x_TK: torch.Tensor, shards: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``x @ W.T`` with W's input columns cut over ranks: each rank's product is rounded, then added in rank order.

    This is what a BF16 all-reduce over the ranks gives; with one shard it is a plain product.
    """
    total: torch.Tensor | None = None
    for x, shard in zip(x_TK.chunk(len(shards), dim=-1), shards, strict=True):
        partial = linear(x, shard)
        total = partial if total is None else total + partial
    assert total is not None
    return total
