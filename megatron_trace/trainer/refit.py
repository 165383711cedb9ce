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
from megatron_trace.rollout.protocol import QuantizedWeight, RefitAck, RefitBundle, RolloutEngine
from megatron_trace.rollout.refit_digest import digest_bundle
from megatron_trace.trainer.megatron import MegatronTrainer


class RefitError(RuntimeError):
    """The engine does not hold what the trainer sent. Ends the run: every later ratio would be of another policy."""


def build_bundle(trainer: MegatronTrainer, *, quantized: bool, contract_fingerprint: str) -> RefitBundle:
    """Every parameter of the current version, gathered over the expert-parallel group. Collective."""
    model = trainer.config.model
    state = {name: p.detach() for name, p in trainer.gpt.named_parameters()}
    plain = {name: t.clone() for name, t in qwen3_moe.dense_to_hf(state, model).items()}
    packed_layers = set(range(model.num_layers)) - set(trainer.config.precision.bf16_layers) if quantized else set()
    experts = qwen3_moe.experts_to_hf(state, model, local_expert_ids(model))
    plain |= _all_expert_tensors({n: t for n, t in experts.items() if _layer_of(n) not in packed_layers}, model)
    packed = _all_expert_tensors(_local_quantized(trainer, model, packed_layers), model)
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
    """This rank's packed experts as tensors ``<name>|codes``, ``<name>|scale``, ``<name>|amax``; gate and up split by rows."""
    out: dict[str, torch.Tensor] = {}
    inner = model.moe_intermediate_size
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


def _all_expert_tensors(local: dict[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Every rank's experts by name: one all-gather of one byte buffer, since all ranks hold equally many experts."""
    if not local:
        return {}
    local = {name: t.contiguous() for name, t in local.items()}
    group = parallel_state.get_expert_model_parallel_group()
    size = parallel_state.get_expert_model_parallel_world_size()
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in local.values()])
    gathered = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(gathered, flat, group=group)
    per_rank = model.num_experts // size
    mine = local_expert_ids(model).start
    out: dict[str, torch.Tensor] = {}
    for rank, buffer in enumerate(gathered):
        offset = 0
        for name, tensor in local.items():
            count = tensor.numel() * tensor.element_size()
            part = buffer[offset : offset + count].clone().view(tensor.dtype).view(tensor.shape)
            renamed = _rename_expert(name, rank * per_rank - mine)
            if renamed in out:
                raise RefitError(f"{renamed} was gathered twice")
            out[renamed] = part
            offset += count
    return out


def _layer_of(name: str) -> int:
    return int(name.removeprefix("model.layers.").split(".", 1)[0])


def _rename_expert(name: str, shift: int) -> str:
    """The same matrix of the expert ``shift`` ids further on."""
    head, tail = name.split(".mlp.experts.")
    expert, rest = tail.split(".", 1)
    return f"{head}.mlp.experts.{int(expert) + shift}.{rest}"
