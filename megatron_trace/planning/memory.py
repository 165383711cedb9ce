"""Memory of one rank by purpose, in closed form (no torch). All figures in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_trace.config.schema import RunConfig
from megatron_trace.planning import activations, guidance_traffic, parameters
from megatron_trace.planning.activations import Kernels
from megatron_trace.planning.layout import Layout

PACKED_BITS = 4 + 8 / 16
"""NVFP4: four bits a value and an E4M3 scale for each block of sixteen."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one rank of one pipeline stage; ``guidance_host`` alone lies in host memory."""

    weights: int
    gradients: int
    optimizer: int
    """FP32 master weights and two moments, the rank's shard of them."""
    quantized_experts: int
    """Fake-quant copies: packed codes and scales of the local experts and their dequantised values."""
    activations: int
    guidance: int
    """Guidance rows of the micro-batches in flight."""
    engine_weights: int
    """Zero where engines have nodes of their own."""
    engine_kv_pool: int
    guidance_host: int
    """Guidance rows of the sequences this rank trains on in one step, should all be as long as they may."""

    @property
    def device(self) -> int:
        """All that lies on the device."""
        return sum(value for name, value in self.parts() if name != "guidance_host")

    def parts(self) -> Iterable[tuple[str, int]]:
        """(purpose, bytes) in field order."""
        return vars(self).items()


def value_bytes(config: RunConfig) -> int:
    """Bytes of one working weight or activation."""
    return 2 if config.precision.compute_dtype == "bfloat16" else 4


def micro_batches(config: RunConfig, layout: Layout) -> int:
    """Micro-batches of one replica in one optimiser step."""
    algorithm = config.algorithm
    sequences = algorithm.prompts_per_step * algorithm.samples_per_prompt
    return max(1, sequences // (layout.data * config.trainer.micro_batch_size * algorithm.updates_per_rollout))


def rank_memory(config: RunConfig, layout: Layout, stage: int, *, kernels: Kernels) -> RankMemory:
    """What one rank of ``stage`` holds; optimiser states are sharded over the replicas of what they belong to."""
    count = parameters.stage(config.model, layout, stage)
    working = value_bytes(config)
    master = 12 if working == 2 else 8
    shards = layout.data * layout.context
    engine_weights, kv_pool = (0, 0) if config.cluster.rollout_nodes else engine_memory(config)
    tokens = config.trainer.micro_batch_size * config.trainer.sequence_length // layout.context
    row = guidance_traffic.row_bytes(config, layers=layout.stage_layers(stage, config.model.num_layers))
    held = activations.in_flight(layout, stage, micro_batches(config, layout))
    return RankMemory(
        weights=count.total * working,
        gradients=count.total * 4,
        optimizer=-(-count.dense * master // shards) + -(-count.expert * master // layout.expert_data),
        quantized_experts=_quantized_experts(config, layout, stage),
        activations=_activations(config, layout, stage, kernels=kernels),
        guidance=row * tokens * -(-held // layout.virtual_pipeline),
        engine_weights=engine_weights,
        engine_kv_pool=kv_pool,
        guidance_host=row * guidance_traffic.tokens_per_step(config) // (layout.data * layout.context),
    )


def _quantized_experts(config: RunConfig, layout: Layout, stage: int) -> int:
    """Packed bytes plus dequantised values of this rank's experts in layers that are quantised."""
    if config.trainer_forward == "bf16" and config.precision.rollout == "bf16":
        return 0
    layers = set(layout.stage_layers(stage, config.model.num_layers)) - set(config.precision.bf16_layers)
    per_layer = config.model.num_experts // layout.expert * parameters.expert_matrices(config.model) // layout.expert_tensor
    return int(len(layers) * per_layer * (PACKED_BITS / 8 + value_bytes(config)))


def _activations(config: RunConfig, layout: Layout, stage: int, *, kernels: Kernels) -> int:
    """MTP layers are carried along and not computed: the policy objective has no use for them."""
    model, length = config.model, config.trainer.sequence_length
    tokens = config.trainer.micro_batch_size * length // layout.context
    last = stage == layout.pipeline - 1
    layers = layout.stage_layers(stage, model.num_layers)
    if kernels == "reference":
        per_layer = [
            activations.reference_layer(model, tokens=tokens, sequence_length=length, value_bytes=value_bytes(config))
            for _ in layers
        ]
        head = activations.reference_head(model, tokens=tokens) if last else 0
    else:
        per_layer = [
            activations.fused_layer(model, softmax=model.has_kv_cache(layer), tokens=tokens, layout=layout) for layer in layers
        ]
        head = activations.fused_head(model, tokens=tokens, layout=layout) if last else 0
    held = activations.in_flight(layout, stage, micro_batches(config, layout))
    chunks = held / layout.virtual_pipeline
    if config.trainer.recompute == "full":
        inputs = len(layers) * tokens * model.hidden_size * value_bytes(config) // layout.tensor
        return int(inputs * chunks) + max(per_layer, default=0) + head
    return int(sum(per_layer) * chunks) + head


def engine_layout(config: RunConfig) -> Layout:
    """One engine's ranks as a layout. The embedded engine emulates its tensor-parallel ranks inside one process."""
    rollout = config.rollout
    if rollout.engine == "embedded":
        return parameters.SINGLE
    return Layout(
        world_size=rollout.tensor_parallel,
        tensor=rollout.tensor_parallel,
        context=1,
        pipeline=1,
        virtual_pipeline=1,
        expert=rollout.expert_parallel,
        expert_tensor=rollout.tensor_parallel // rollout.expert_parallel,
    )


def engine_memory(config: RunConfig) -> tuple[int, int]:
    """(weights, KV pool) bytes of one engine rank."""
    layout = engine_layout(config)
    tokens = config.rollout.num_pages * config.rollout.page_size
    return engine_weight_bytes(config, layout), int(tokens * kv_bytes_per_token(config, tensor=layout.tensor))


def engine_weight_bytes(config: RunConfig, layout: Layout) -> int:
    """Bytes of the weights that one engine rank of ``layout`` holds: packed routed experts, all else in the working type."""
    model = config.model.model_copy(update={"mtp_num_layers": 0})
    count = parameters.stage(model, layout, 0)
    quantized = 0
    if config.precision.rollout == "nvfp4":
        quantized = count.expert * (model.num_layers - len(set(config.precision.bf16_layers))) // model.num_layers
    return int((count.total - quantized) * value_bytes(config) + quantized * PACKED_BITS / 8)


def kv_bytes_per_token(config: RunConfig, *, tensor: int) -> float:
    """Bytes of K and V that one engine rank caches for a token, over all layers with a cache; heads are replicated, not split
    below one."""
    model = config.model
    values = 2 * -(-model.num_key_value_heads // tensor) * model.head_dim
    quantized = set(model.kv_layers) if config.precision.rollout == "nvfp4" else set()
    quantized -= set(config.precision.bf16_layers)
    plain = len(model.kv_layers) - len(quantized)
    return values * (len(quantized) * PACKED_BITS / 8 + plain * value_bytes(config))
