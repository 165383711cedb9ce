"""Random initial weights that do not depend on the parallel layout: each parameter draws from a stream named after it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state

from megatron_trace.checkpoint import qwen3_moe
from megatron_trace.config.model import ModelConfig
from megatron_trace.modeling.parallel import local_expert_ids
from megatron_trace.modeling.shards import global_named_parameters, own_shard, renumbered

STD = 0.02
RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight")
"""Matrices that write to the residual stream start smaller by sqrt(2 L) (GPT-2's rule, Megatron's output_layer_init_method)."""


def _draw(name: str, shape: tuple[int, ...], seed: int, num_layers: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    std = STD / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_WRITERS) else STD
    return torch.randn(shape, generator=generator) * std


def randomize(chunks: torch.nn.Module | Sequence[torch.nn.Module], model: ModelConfig, *, seed: int) -> None:
    """Fill this rank's model with weights that are a function of ``seed`` and parameter name alone."""
    experts = local_expert_ids(model)
    hf = {n: _draw(n, s, seed, model.num_layers) for n, s in qwen3_moe.hf_shapes(model, experts).items()}
    load_hf(chunks, model, hf)


def load_hf(chunks: torch.nn.Module | Sequence[torch.nn.Module], model: ModelConfig, hf: Mapping[str, torch.Tensor]) -> None:
    """Copy whole Hugging Face tensors into this rank's model (one chunk or several): its layers, experts and shards.

    Every parameter of this rank exactly once, or ValueError.
    """
    chunks = [chunks] if isinstance(chunks, torch.nn.Module) else chunks
    experts = local_expert_ids(model)
    state = qwen3_moe.hf_to_megatron(hf, model, experts)
    whole = {renumbered(name, experts.start): tensor for name, tensor in state.items()}
    if model.tie_word_embeddings and not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        whole["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
    parameters = global_named_parameters(chunks, model)
    missing = parameters.keys() - whole.keys()
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        missing |= whole.keys() - parameters.keys()
    if missing:
        raise ValueError(f"parameters without a counterpart: {', '.join(sorted(missing))}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(own_shard(name, whole[name]))
