"""Memory of activations that one micro-batch keeps for its backward, in closed form (no torch).

Two sets of kernels: ``reference`` is what the trainer of this version runs (Megatron-core's local modules, attention scores in
memory, FP32 copies where BF16 products accumulate in FP32) and is measured by a test; ``fused`` is Transformer Engine's
modules with flash attention and sequence parallelism, estimated in the manner of Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Literal

from megatron_trace.config.model import ModelConfig
from megatron_trace.planning.layout import Layout

Kernels = Literal["reference", "fused"]


def reference_layer(model: ModelConfig, *, tokens: int, sequence_length: int, value_bytes: int) -> int:
    """Bytes one MoE layer with softmax attention keeps for ``tokens`` tokens on one rank; ``value_bytes`` 2 (BF16) or 4."""
    hidden, top_k, experts = model.hidden_size, model.num_experts_per_tok, model.num_experts
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    norms = 4 * 4 * hidden + 2 * value_bytes * hidden + 8
    head_norms = 4 * (model.num_attention_heads + model.num_key_value_heads)
    # BF16 keys are copied to FP32 for their norm; FP32 keys stay views of the joint query-key-value projection.
    head_norms += 8 * key if value_bytes == 2 else 4 * (query + 2 * key) + 4 * key
    # Softmax keeps FP32 probabilities; BF16 ones are copied to FP32 once more for the product with V.
    scores = 4 * (2 if value_bytes == 2 else 1) * model.num_attention_heads * sequence_length
    attention = 5 * 4 * query + value_bytes * query + scores
    router = experts * (8 + 4 + 1) + top_k * (8 + 4 + 4)
    expert_rows = top_k * value_bytes * (2 * hidden + 4 * model.moe_intermediate_size)
    rotary = 4 * sequence_length * model.head_dim * value_bytes
    return tokens * (norms + head_norms + attention + router + expert_rows) + rotary


def reference_head(model: ModelConfig, *, tokens: int) -> int:
    """Bytes of final norm, FP32 head and log-softmax: inputs, an FP32 copy of the head's matrix, the tempered logits."""
    return tokens * (3 * 4 * model.hidden_size + 4 * model.vocab_size + 4 + 8) + 4 * model.vocab_size * model.hidden_size


def fused_layer(model: ModelConfig, *, softmax: bool, tokens: int, layout: Layout) -> int:
    """Bytes one layer keeps for ``tokens`` tokens of one context-parallel rank, divided over the tensor-parallel ranks."""
    hidden, top_k = model.hidden_size, model.num_experts_per_tok
    if softmax:
        query = model.num_attention_heads * model.head_dim
        key_value = 2 * model.num_key_value_heads * model.head_dim
        gate = query if model.attention_output_gate else 0
        mixer = 2 * (query + gate + key_value) + 2 * query + 4 * model.num_attention_heads
    else:
        query_key = 2 * model.linear_num_key_heads * model.linear_key_head_dim
        value = model.linear_num_value_heads * model.linear_value_head_dim
        # Projection, convolved q, k, v, output before and after its gated norm; two scalars per value head.
        mixer = 2 * (query_key + 2 * value) + 2 * (query_key + value) + 4 * value + 8 * model.linear_num_value_heads
    norms_and_inputs = 2 * 2 * hidden + 2 * 2 * hidden
    shared = 2 * 3 * model.shared_expert_intermediate_size
    router = 4 * model.num_experts + 16 * top_k
    # With experts spread evenly a rank computes as many rows as it sends; each expert-tensor shard sees all rows of its group.
    expert_rows = top_k * 2 * (2 * hidden * layout.expert_tensor + 3 * model.moe_intermediate_size)
    return tokens * (mixer + norms_and_inputs + shared + router + expert_rows) // layout.tensor


def fused_head(model: ModelConfig, *, tokens: int, layout: Layout) -> int:
    """Bytes of the final norm and of FP32 logits and their gradient, divided over the tensor-parallel ranks."""
    return tokens * (4 * model.hidden_size + 2 * 4 * model.vocab_size) // layout.tensor


def in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Model chunks whose activations stage ``stage`` holds at once: 1F1B, or Megatron-core's interleaved warm-up plus one."""
    behind = layout.pipeline - stage - 1
    if layout.virtual_pipeline == 1:
        return min(behind + 1, micro_batches)
    warm_up = 2 * behind + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(warm_up + 1, micro_batches * layout.virtual_pipeline)
