"""Architecture facts of a model, as the trainer, the engines, the planner and the converters all read them (no torch)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_trace.config.base import Section


class ModelConfig(Section):
    """Shape of one decoder-only Mixture-of-Experts model; field meanings follow Hugging Face's ``Qwen3MoeConfig``."""

    family: Literal["qwen3_moe"] = "qwen3_moe"
    """Model family: decides layer order, norms, router convention and parameter names."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding; the tokenizer may use fewer."""
    hidden_size: int = Field(gt=0)
    """Width H of the residual stream; a multiple of 16 so that no NVFP4 block is ragged."""
    num_layers: int = Field(gt=0)
    """Number of decoder layers L; every one is a MoE layer in this family."""
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
    rope_theta: float = Field(default=1_000_000.0, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of every RMSNorm."""
    max_position_embeddings: int = Field(default=4096, gt=0)
    """Longest sequence the model is run at."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""
