"""Tiny random models for engine tests: a ModelConfig, the transformers model of it, and refit bundles of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_trace.config.model import ModelConfig
from megatron_trace.numerics import nvfp4
from megatron_trace.rollout.embedded import EmbeddedEngine
from megatron_trace.rollout.protocol import GenerationRequest, QuantizedWeight, RefitBundle, SamplingParams

FINGERPRINT = "tiny-contract"


def tiny_config(**changes: Any) -> ModelConfig:
    """A model of about 60 k parameters; every width is a multiple of 16."""
    fields: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "num_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    return ModelConfig(**(fields | changes))


def random_weights(model: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """FP32 weights by Hugging Face name, scaled so that logits spread over a few units and norms differ from 1."""
    generator = torch.Generator().manual_seed(seed)
    h, i, d = model.hidden_size, model.moe_intermediate_size, model.head_dim
    q, kv = model.num_attention_heads * d, model.num_key_value_heads * d

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    weights = {"model.embed_tokens.weight": torch.randn(model.vocab_size, h, generator=generator)}
    for layer in range(model.num_layers):
        p = f"model.layers.{layer}."
        weights[f"{p}input_layernorm.weight"] = norm(h)
        weights[f"{p}post_attention_layernorm.weight"] = norm(h)
        for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            weights[f"{p}self_attn.{name}_proj.weight"] = matrix(rows, columns)
        weights[f"{p}self_attn.q_norm.weight"] = norm(d)
        weights[f"{p}self_attn.k_norm.weight"] = norm(d)
        weights[f"{p}mlp.gate.weight"] = matrix(model.num_experts, h)
        for e in range(model.num_experts):
            for name, rows, columns in (("gate", i, h), ("up", i, h), ("down", h, i)):
                weights[f"{p}mlp.experts.{e}.{name}_proj.weight"] = matrix(rows, columns)
    weights["model.norm.weight"] = norm(h)
    if not model.tie_word_embeddings:
        weights["lm_head.weight"] = 2 * matrix(model.vocab_size, h)
    return weights


def plain_bundle(
    weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, version: int = 1, fingerprint: str = FINGERPRINT
) -> RefitBundle:
    """All weights unquantised in ``dtype``."""
    plain = {name: w.to(dtype) for name, w in weights.items()}
    return RefitBundle(version=version, contract_fingerprint=fingerprint, plain=plain)


def quantized_bundle(
    weights: Mapping[str, torch.Tensor],
    model: ModelConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    version: int = 1,
    kv_amax: float = 8.0,
    bf16_layers: tuple[int, ...] = (),
    fingerprint: str = FINGERPRINT,
) -> RefitBundle:
    """Experts in NVFP4 from their BF16-rounded values (gate and up as one pair), the rest in ``dtype``."""
    layers = [layer for layer in range(model.num_layers) if layer not in bf16_layers]
    quantized: dict[str, QuantizedWeight] = {}
    for layer in layers:
        for e in range(model.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{e}."
            gate, up, down = (weights[f"{prefix}{n}_proj.weight"].to(torch.bfloat16) for n in ("gate", "up", "down"))
            pair = nvfp4.quantize(torch.cat((gate, up)), scale_scope="tensor")
            rows = len(gate)
            for name, part in (("gate", slice(0, rows)), ("up", slice(rows, None))):
                quantized[f"{prefix}{name}_proj.weight"] = QuantizedWeight(
                    codes=pair.codes[part], block_scale=pair.block_scale[part], global_amax=pair.global_amax
                )
            single = nvfp4.quantize(down, scale_scope="tensor")
            quantized[f"{prefix}down_proj.weight"] = QuantizedWeight(
                codes=single.codes, block_scale=single.block_scale, global_amax=single.global_amax
            )
    return RefitBundle(
        version=version,
        contract_fingerprint=fingerprint,
        plain={name: w.to(dtype) for name, w in weights.items() if name not in quantized},
        quantized=quantized,
        kv_amax={(layer, site): kv_amax for layer in layers for site in ("k", "v")},
    )


def engine_of(model: ModelConfig, bundle: RefitBundle | None = None, **settings: Any) -> EmbeddedEngine:
    """An engine with small defaults, serving ``bundle``; quantised when the bundle is."""
    quantized = bundle is not None and bool(bundle.quantized)
    defaults: dict[str, Any] = {
        "quantization": "nvfp4" if quantized else "none",
        "num_pages": 64,
        "page_size": 4,
        "max_batch_size": 32,
        "contract_fingerprint": FINGERPRINT,
    }
    engine = EmbeddedEngine(model, **(defaults | settings))
    if bundle is not None:
        engine.update_weights(bundle)
    return engine


def request(
    sample_id: int, prompt: tuple[int, ...], *, forced: tuple[int, ...] | None = None, **sampling: Any
) -> GenerationRequest:
    """A request with short defaults."""
    params = SamplingParams(**({"max_new_tokens": 8} | sampling))
    return GenerationRequest(sample_id=sample_id, prompt=prompt, sampling=params, forced_tokens=forced)


def hf_model(model: ModelConfig, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The transformers model with these weights, FP32, eager attention."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        moe_intermediate_size=model.moe_intermediate_size,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=model.tie_word_embeddings,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=model.max_position_embeddings,
        attn_implementation="eager",
        pad_token_id=None,
    )
    hf = Qwen3MoeForCausalLM(config).float().eval()
    state = {name: w.clone() for name, w in weights.items() if ".mlp.experts." not in name}
    for layer in range(model.num_layers):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = [[weights[f"{stem}{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(model.num_experts)]
        state[f"{stem}gate_up_proj"] = torch.stack([torch.cat((g, u)) for g, u, _ in parts])
        state[f"{stem}down_proj"] = torch.stack([d for _, _, d in parts])
    missing, unexpected = hf.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return hf
