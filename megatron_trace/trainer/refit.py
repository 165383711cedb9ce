"""Hand a weight version to the engine: complete, with exactly the bytes the trainer computes on, verified by digest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_trace.checkpoint import qwen3_moe
from megatron_trace.config.model import ModelConfig
from megatron_trace.modeling.build import moe_layers
from megatron_trace.modeling.parallel import local_expert_ids
from megatron_trace.modeling.shards import gather_named, global_named_parameters, is_expert, union, whole_state
from megatron_trace.rollout.protocol import QuantizedWeight, RefitAck, RefitBundle, RolloutEngine
from megatron_trace.rollout.refit_digest import digest_bundle
from megatron_trace.trainer.megatron import MegatronTrainer


class RefitError(RuntimeError):
    """The engine does not hold what the trainer sent. Ends the run: every later ratio would be of another policy."""


def build_bundle(trainer: MegatronTrainer, *, quantized: bool, contract_fingerprint: str) -> RefitBundle:
    """Every parameter of the current version, whole, gathered over all model-parallel groups. Collective."""
    model = trainer.config.model
    packed_layers = set(range(model.num_layers)) - set(trainer.config.precision.bf16_layers) if quantized else set()
    local = {
        name: p.detach().clone()
        for name, p in global_named_parameters(trainer.chunks, model).items()
        if not (is_expert(name) and _decoder_layer(name) in packed_layers)
    }
    whole = whole_state(local, model)
    plain = dict(qwen3_moe.dense_to_hf(whole, model))
    plain |= _plain_experts(whole, model, set(range(model.num_layers)) - packed_layers)
    packed = _all_quantized(_local_quantized(trainer, model, packed_layers))
    return RefitBundle(
        version=trainer.version,
        contract_fingerprint=contract_fingerprint,
        plain=plain,
        quantized=_unflatten_quantized(packed, model, packed_layers),
        kv_amax=trainer.kv_amax() if quantized else {},
    )


def refit(engine: RolloutEngine, bundle: RefitBundle) -> RefitAck:
    """Send ``bundle`` to this rank's engine and compare digests of sent and stored bytes, here and across ranks. Collective.

    Raises RefitError when the engine refuses, stores other bytes or another version, or when ranks hold different weights.
    """
    ack = engine.update_weights(bundle)
    sent = digest_bundle(bundle)
    if not ack.success:
        raise RefitError(f"refit to version {bundle.version} was refused: {ack.message}")
    if ack.version != bundle.version:
        raise RefitError(f"engine serves version {ack.version} after a refit to version {bundle.version}")
    if ack.digest != sent:
        raise RefitError(f"engine stores bytes with digest {ack.digest[:16]}, the trainer sent {sent[:16]}")
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, ack.digest)
    if len(set(digests)) != 1:
        raise RefitError(f"engines hold different weights at version {bundle.version}: {[str(d)[:16] for d in digests]}")
    return ack


def _local_quantized(trainer: MegatronTrainer, model: ModelConfig, layers: set[int]) -> dict[str, torch.Tensor]:
    """This rank's packed experts as tensors ``<name>|codes``, ``<name>|scale``, ``<name>|amax``; gate and up split by rows.

    Under expert-tensor parallelism they are shards.
    """
    out: dict[str, torch.Tensor] = {}
    inner = model.moe_intermediate_size // trainer.layout.expert_tensor
    for layer in (m for m in moe_layers(trainer.gpt) if m.layer_number - 1 in layers):
        for (fc1, fc2), expert in zip(layer.experts.quantized, local_expert_ids(model), strict=True):
            gate, up, down = qwen3_moe.expert_matrices(layer.layer_number - 1, expert)
            halves = (
                (gate, fc1.packed, slice(0, inner)),
                (up, fc1.packed, slice(inner, None)),
                (down, fc2.packed, slice(None)),
            )
            for name, packed, rows in halves:
                out[f"{name}|codes"] = packed.codes[rows]
                out[f"{name}|scale"] = packed.block_scale[rows]
                out[f"{name}|amax"] = packed.global_amax
    return out


def _unflatten_quantized(
    tensors: Mapping[str, torch.Tensor], model: ModelConfig, layers: set[int]
) -> dict[str, QuantizedWeight]:
    names = (n for layer in sorted(layers) for e in range(model.num_experts) for n in qwen3_moe.expert_matrices(layer, e))
    return {
        n: QuantizedWeight(codes=tensors[f"{n}|codes"], block_scale=tensors[f"{n}|scale"], global_amax=tensors[f"{n}|amax"])
        for n in names
    }


def _all_quantized(local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every packed expert tensor, whole, by name: shards joined, then expert- and pipeline-parallel ranks together."""
    parts = gather_named(local, parallel_state.get_expert_tensor_parallel_group())
    whole = {name: _joined(name, [part[name] for part in parts]) for name in parts[0]}
    for group in (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        whole = union(gather_named(whole, group))
    return whole


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith("|amax"):
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise RefitError(f"{name.removesuffix('|amax')}: shards were quantised with different scales")
        return parts[0]
    return torch.cat(parts, dim=1 if "down_proj" in name else 0) if len(parts) > 1 else parts[0]


def _plain_experts(whole: Mapping[str, torch.Tensor], model: ModelConfig, layers: set[int]) -> dict[str, torch.Tensor]:
    """Unquantised experts of ``layers`` by Hugging Face name."""
    out: dict[str, torch.Tensor] = {}
    for layer in sorted(layers):
        for expert in range(model.num_experts):
            prefix = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
            gate, up, down = qwen3_moe.expert_matrices(layer, expert)
            out[gate], out[up] = (half.clone() for half in whole[f"{prefix}linear_fc1.weight"].chunk(2))
            out[down] = whole[f"{prefix}linear_fc2.weight"]
    return out


def _decoder_layer(name: str) -> int:
    return int(name.split("decoder.layers.", 1)[1].split(".", 1)[0])
