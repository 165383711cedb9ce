"""Architecture facts of a model, as the trainer, the engines, the planner and the converters all read them (no torch)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_trace.config.base import Section


class ModelConfig(Section):
    """Shape of one decoder-only Mixture-of-Experts model; field meanings follow Hugging Face's ``Qwen3MoeConfig``."""

    family: Literal["qwen3_moe", "qwen3_5_moe", "qwen4_exp"] = "qwen3_moe"
    """Model family (Hugging Face's ``model_type``): layer order, norms, router convention and parameter names.

    ``qwen3_5_moe`` and ``qwen4_exp`` are hybrid stacks of linear and softmax attention.
    """
    vocab_size: int = Field(gt=0)
    """Rows of the embedding; the tokenizer may use fewer."""
    hidden_size: int = Field(gt=0)
    """Width H of the residual stream; a multiple of 16 so that no NVFP4 block is ragged."""
    num_layers: int = Field(gt=0)
    """Number of decoder layers L; every one is a MoE layer."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Key/value heads (grouped-query attention); divides ``num_attention_heads``."""
    head_dim: int = Field(gt=0)
    """Width of one head; a multiple of 16, since K and V blocks run along it."""
    num_experts: int = Field(gt=0)
    """Routed experts per MoE layer."""
    num_experts_per_tok: int = Field(gt=0)
    """Experts each token is routed to (top-k)."""
    moe_intermediate_size: int = Field(gt=0)
    """Width of one expert's SwiGLU intermediate; a multiple of 16."""
    rope_theta: float = Field(default=1_000_000.0, gt=1)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of every RMSNorm."""
    max_position_embeddings: int = Field(default=4096, gt=0)
    """Longest sequence the model is run at."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""
    full_attention_interval: int = Field(default=1, gt=0)
    """Size of a group of layers of which the last has softmax attention and a KV cache, and the others linear attention."""
    attention_output_gate: bool = False
    """Whether the query projection also makes a gate, as wide as the attention output."""
    linear_num_key_heads: int = Field(default=0, ge=0)
    """Query and key heads of linear attention (gated delta net)."""
    linear_num_value_heads: int = Field(default=0, ge=0)
    """Value heads of linear attention; a multiple of ``linear_num_key_heads``."""
    linear_key_head_dim: int = Field(default=0, ge=0)
    """Width of one query or key head of linear attention."""
    linear_value_head_dim: int = Field(default=0, ge=0)
    """Width of one value head of linear attention."""
    linear_conv_kernel_dim: int = Field(default=0, ge=0)
    """Taps of the causal convolution in linear attention."""
    shared_expert_intermediate_size: int = Field(default=0, ge=0)
    """Width of the shared expert's SwiGLU intermediate; 0 where there is none. It has a gate of its own."""
    mtp_num_layers: int = Field(default=0, ge=0)
    """Multi-token prediction layers behind the decoder; never quantised or guided."""
    other_parameters: int = Field(default=0, ge=0)
    """Parameters outside the modules described here (such as n-gram tables); the planner puts them on the first stage, split
    over tensor-parallel ranks."""

    def has_kv_cache(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (0-based) is softmax attention and so has keys and values to cache."""
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Decoder layers (0-based, ascending) with softmax attention and a KV cache."""
        return tuple(layer for layer in range(self.num_layers) if self.has_kv_cache(layer))
