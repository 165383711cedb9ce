"""Parameter names and layouts of the Qwen3-MoE family: Hugging Face on one side, Megatron-core's local spec on the other.

Pure functions on dicts of tensors; one rank's share in, one rank's share out (all layers and every dense parameter, experts
``expert_ids`` only). Megatron's linear_qkv stacks, per query group, the group's q rows, then k, then v; linear_fc1 stacks gate,
up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_trace.config.model import ModelConfig


def expert_matrices(layer: int, expert: int) -> tuple[str, str, str]:
    """Hugging Face names of one expert's gate, up and down projections."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    return prefix + "gate_proj.weight", prefix + "up_proj.weight", prefix + "down_proj.weight"


def hf_shapes(model: ModelConfig, expert_ids: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face parameter of the family with its shape, for the given experts, in a fixed order."""
    hidden, inner = model.hidden_size, model.moe_intermediate_size
    q_rows, kv_rows = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (q_rows, hidden),
            p + "self_attn.k_proj.weight": (kv_rows, hidden),
            p + "self_attn.v_proj.weight": (kv_rows, hidden),
            p + "self_attn.o_proj.weight": (hidden, q_rows),
            p + "self_attn.q_norm.weight": (model.head_dim,),
            p + "self_attn.k_norm.weight": (model.head_dim,),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "mlp.gate.weight": (model.num_experts, hidden),
        }
        for expert in expert_ids:
            gate, up, down = expert_matrices(layer, expert)
            shapes |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def _direct_names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(Megatron, Hugging Face) names of the parameters whose layout is the same on both sides."""
    yield "embedding.word_embeddings.weight", "model.embed_tokens.weight"
    yield "decoder.final_layernorm.weight", "model.norm.weight"
    if not model.tie_word_embeddings:
        yield "output_layer.weight", "lm_head.weight"
    for layer in range(model.num_layers):
        m, h = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield m + "input_layernorm.weight", h + "input_layernorm.weight"
        yield m + "self_attention.linear_proj.weight", h + "self_attn.o_proj.weight"
        yield m + "self_attention.q_layernorm.weight", h + "self_attn.q_norm.weight"
        yield m + "self_attention.k_layernorm.weight", h + "self_attn.k_norm.weight"
        yield m + "pre_mlp_layernorm.weight", h + "post_attention_layernorm.weight"
        yield m + "mlp.router.weight", h + "mlp.gate.weight"


def _expert_names(layer: int, local: int) -> tuple[str, str]:
    prefix = f"decoder.layers.{layer}.mlp.experts.local_experts.{local}."
    return prefix + "linear_fc1.weight", prefix + "linear_fc2.weight"


def dense_to_hf(state: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Everything but the experts, by Hugging Face name; views of ``state`` where the layout allows."""
    out = {hf: state[mcore] for mcore, hf in _direct_names(model)}
    groups, d, hidden = model.num_key_value_heads, model.head_dim, model.hidden_size
    per_group = model.num_attention_heads // groups
    for layer in range(model.num_layers):
        qkv = state[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"].view(groups, per_group + 2, d, hidden)
        q, k, v = qkv.split([per_group, 1, 1], dim=1)
        for letter, part in (("q", q), ("k", k), ("v", v)):
            out[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] = part.reshape(-1, hidden)
    return out


def hf_to_megatron(hf: Mapping[str, torch.Tensor], model: ModelConfig, expert_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """One rank's Megatron state from Hugging Face tensors; raises KeyError naming the first missing parameter."""
    out = {mcore: hf[name] for mcore, name in _direct_names(model)}
    groups, d, hidden = model.num_key_value_heads, model.head_dim, model.hidden_size
    for layer in range(model.num_layers):
        p = f"model.layers.{layer}.self_attn."
        parts = [hf[f"{p}{letter}_proj.weight"].view(groups, -1, d, hidden) for letter in "qkv"]
        out[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).reshape(-1, hidden)
        for local, expert in enumerate(expert_ids):
            fc1, fc2 = _expert_names(layer, local)
            gate, up, down = expert_matrices(layer, expert)
            out[fc1] = torch.cat([hf[gate], hf[up]])
            out[fc2] = hf[down]
    return out


def experts_to_hf(state: Mapping[str, torch.Tensor], model: ModelConfig, expert_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """This rank's experts by Hugging Face name, unquantised."""
    out: dict[str, torch.Tensor] = {}
    for layer in range(model.num_layers):
        for local, expert in enumerate(expert_ids):
            fc1, fc2 = _expert_names(layer, local)
            gate, up, down = expert_matrices(layer, expert)
            out[gate], out[up] = state[fc1].chunk(2, dim=0)
            out[down] = state[fc2]
    return out
