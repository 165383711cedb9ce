"""Random initial weights that do not depend on the parallel layout: each parameter draws from a stream named after it."""

from __future__ import annotations

import hashlib
import math

import torch
from megatron.core.models.gpt import GPTModel

from megatron_trace.checkpoint import qwen3_moe
from megatron_trace.config.model import ModelConfig
from megatron_trace.modeling.parallel import local_expert_ids

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


def randomize(gpt: GPTModel, model: ModelConfig, *, seed: int) -> None:
    """Fill ``gpt`` (this rank's experts only) with weights that are a function of ``seed`` and parameter name alone."""
    experts = local_expert_ids(model)
    hf = {n: _draw(n, s, seed, model.num_layers) for n, s in qwen3_moe.hf_shapes(model, experts).items()}
    load_hf(gpt, model, hf)


def load_hf(gpt: GPTModel, model: ModelConfig, hf: dict[str, torch.Tensor]) -> None:
    """Copy Hugging Face tensors into ``gpt``; every parameter of this rank exactly once or ValueError."""
    state = qwen3_moe.hf_to_megatron(hf, model, local_expert_ids(model))
    parameters = dict(gpt.named_parameters())
    if missing := sorted(parameters.keys() ^ state.keys()):
        raise ValueError(f"parameters without a counterpart: {', '.join(missing)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
