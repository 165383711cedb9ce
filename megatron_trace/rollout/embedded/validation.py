"""Refusals of the embedded engine: each names the field, its value, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.numerics.nvfp4 import BLOCK
from megatron_trace.rollout.protocol import GenerationRequest


def check_engine(
    model: ModelConfig,
    *,
    quantization: str,
    dtype: torch.dtype,
    tensor_parallel: int,
    positive: Mapping[str, int],
    bf16_layers: Sequence[int],
) -> None:
    """Raise ValueError unless an engine can be built from these settings."""
    if quantization not in ("nvfp4", "none"):
        raise ValueError(f"quantization={quantization!r}: must be 'nvfp4' or 'none'")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={dtype}: must be torch.bfloat16 or torch.float32")
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if model.num_attention_heads % model.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads={model.num_key_value_heads}: must divide num_attention_heads={model.num_attention_heads}"
        )
    if model.num_experts_per_tok > model.num_experts:
        raise ValueError(f"num_experts_per_tok={model.num_experts_per_tok}: must not exceed num_experts={model.num_experts}")
    outside = [layer for layer in bf16_layers if not 0 <= layer < model.num_layers]
    if outside:
        raise ValueError(f"bf16_layers={list(bf16_layers)}: layer {outside[0]} is outside 0..{model.num_layers - 1}")
    if quantization == "nvfp4":
        for name in ("hidden_size", "head_dim", "moe_intermediate_size"):
            if getattr(model, name) % BLOCK:
                raise ValueError(f"{name}={getattr(model, name)}: must be a multiple of {BLOCK}, the NVFP4 block")
    check_tensor_parallel(model, tensor_parallel)


def check_tensor_parallel(model: ModelConfig, n: int) -> None:
    """Raise ValueError unless N ranks can each hold whole heads and whole blocks of the expert width."""
    heads, kv_heads, width = model.num_attention_heads, model.num_key_value_heads, model.moe_intermediate_size
    if n < 1:
        raise ValueError(f"tensor_parallel={n}: must be at least 1")
    if heads % n:
        raise ValueError(f"tensor_parallel={n}: must divide num_attention_heads={heads}")
    if kv_heads % n and n % kv_heads:
        raise ValueError(f"tensor_parallel={n}: must divide num_key_value_heads={kv_heads}, or be a multiple to replicate them")
    if width % (n * BLOCK):
        raise ValueError(
            f"tensor_parallel={n}: moe_intermediate_size={width} must be a multiple of {n * BLOCK}, "
            f"so that no block of {BLOCK} is split; choose a smaller tensor_parallel"
        )


def check_capture(spec: GuidanceSpec | None, quantized_layers: frozenset[int]) -> None:
    """Raise ValueError for guidance that there would be nothing to record of, or nobody to read."""
    if spec is None:
        return
    if "fc2_in" in spec.sites:
        raise ValueError(
            "guidance.sites: fc2_in is rounded after dispatch, by expert, and the trainer guides before dispatch only; "
            "leave fc2_in out (both sides round it to nearest)"
        )
    other_scope = (spec.row_scaled ^ {"fc1_in"}) & set(spec.sites)
    if other_scope:
        raise ValueError(
            f"guidance.row_scaled={sorted(spec.row_scaled)}: this engine scales fc1_in by row and K and V statically; "
            f"{sorted(other_scope)} cannot be recorded otherwise"
        )
    plain = [layer for layer in spec.layers if layer not in quantized_layers]
    if plain:
        raise ValueError(
            f"guidance.layers: layer {plain[0]} is not quantised in this engine; quantised are {sorted(quantized_layers)}"
        )


def check_request(request: GenerationRequest, *, model: ModelConfig, max_slots: int) -> None:
    """Raise ValueError for a request that could never be served, naming the sample."""
    sampling, forced, who = request.sampling, request.forced_tokens, f"sample {request.sample_id}"
    if request.sample_id < 0 or sampling.seed < 0:
        raise ValueError(f"{who}: sample_id and seed={sampling.seed} key the random stream and must not be negative")
    if not request.prompt:
        raise ValueError(f"{who}: prompt is empty; give at least one token")
    for name, tokens in (("prompt", request.prompt), ("forced_tokens", forced or ())):
        bad = next((t for t in tokens if not 0 <= t < model.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{who}: {name} holds token {bad}, outside 0..{model.vocab_size - 1}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"{who}: max_new_tokens={sampling.max_new_tokens}: must be at least 1")
    if not sampling.temperature >= 0:
        raise ValueError(f"{who}: temperature={sampling.temperature}: must be 0 (greedy) or positive")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"{who}: top_p={sampling.top_p}: must be in (0, 1]")
    if forced is not None and not 0 < len(forced) <= sampling.max_new_tokens:
        raise ValueError(f"{who}: {len(forced)} forced_tokens: must be 1 to max_new_tokens={sampling.max_new_tokens}")
    length = len(request.prompt) + (sampling.max_new_tokens if forced is None else len(forced))
    if length > model.max_position_embeddings:
        raise ValueError(
            f"{who}: prompt of {len(request.prompt)} and up to {length - len(request.prompt)} new tokens exceed "
            f"max_position_embeddings={model.max_position_embeddings}"
        )
    if length - 1 > max_slots:
        raise ValueError(
            f"{who}: needs {length - 1} KV slots, the engine has {max_slots}; raise num_pages or lower max_new_tokens"
        )
