"""Whether a layout can exist: every rule that needs no machine and no model, one line for each that is broken (no torch).

Rules of Megatron-core: megatron/core/transformer/transformer_config.py, parallel_state.py. What is wrong whatever the cluster
(``config.validation``) was checked when the configuration was loaded; what this version cannot run is not illegal.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_trace.config.errors import ConfigError
from megatron_trace.config.schema import RunConfig
from megatron_trace.config.validation import BLOCK, validate_world_size
from megatron_trace.planning import memory
from megatron_trace.planning.layout import Layout

GEMM_ALIGNMENT = 128
"""Rows and columns that grouped FP4 and FP8 kernels work in; other widths are padded."""


def errors(config: RunConfig, layout: Layout) -> list[str]:
    """One line for each thing that rules the layout out."""
    found: list[str] = []
    try:
        validate_world_size(config, layout.world_size)
    except ConfigError as error:
        found += error.problems
    found += _tensor(config)
    found += _pipeline(config, layout, sizes_fit=not found)
    found += _context(config)
    found += _expert_tensor(config)
    found += _cluster(config, layout)
    return found


def warnings(config: RunConfig, layout: Layout) -> list[str]:
    """One line for each thing that works and costs more than it need."""
    return [*_alignment(config), *_across_nodes(config), *_bubble(config, layout)]


def _tensor(config: RunConfig) -> Iterator[str]:
    tensor, model = config.parallel.tensor, config.model
    if tensor == 1:
        return
    divided = {
        "num_attention_heads": model.num_attention_heads,
        "vocab_size": model.vocab_size,
        "shared_expert_intermediate_size": model.shared_expert_intermediate_size,
    }
    if model.full_attention_interval > 1:
        divided |= {
            "linear_num_key_heads": model.linear_num_key_heads,
            "linear_num_value_heads": model.linear_num_value_heads,
        }
    for name, value in divided.items():
        if value % tensor:
            yield f"parallel.tensor={tensor}: must divide model.{name}={value}; use a divisor of {value}"
    groups = model.num_key_value_heads
    if groups % tensor and tensor % groups:
        yield (
            f"parallel.tensor={tensor}: must divide or be a multiple of model.num_key_value_heads={groups}; "
            f"use a divisor or a multiple of {groups}"
        )
    length = config.trainer.sequence_length
    if length % tensor:
        yield (
            f"trainer.sequence_length={length}: must be a multiple of parallel.tensor={tensor} (sequence parallelism, which "
            f"MoE training needs beside tensor parallelism); use {-(-length // tensor) * tensor}"
        )


def _pipeline(config: RunConfig, layout: Layout, *, sizes_fit: bool) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if layers % chunks:
        divisors = ", ".join(str(d) for d in range(1, layers + 1) if layers % d == 0)
        yield (
            f"parallel.pipeline={parallel.pipeline}: {chunks} chunks (pipeline {parallel.pipeline} x virtual_pipeline "
            f"{parallel.virtual_pipeline}) must divide model.num_layers={layers}; use a product among {divisors}"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield f"parallel.virtual_pipeline={parallel.virtual_pipeline}: needs parallel.pipeline of 2 or more; use 1"
    elif parallel.virtual_pipeline > 1 and sizes_fit:
        micro_batches = memory.micro_batches(config, layout)
        if micro_batches % parallel.pipeline:
            yield (
                f"parallel.virtual_pipeline={parallel.virtual_pipeline}: the interleaved schedule needs the {micro_batches} "
                f"micro-batches of a step to be a multiple of parallel.pipeline={parallel.pipeline}; change "
                f"trainer.micro_batch_size={config.trainer.micro_batch_size} or one of the parallel sizes"
            )


def _context(config: RunConfig) -> Iterator[str]:
    context, length = config.parallel.context, config.trainer.sequence_length
    if context == 1:
        return
    if config.model.full_attention_interval > 1:
        yield (
            f"parallel.context={context}: linear-attention layers keep a state along the sequence that Megatron-core does not "
            f"split; use 1"
        )
    if length % (2 * context):
        yield (
            f"trainer.sequence_length={length}: must be a multiple of 2 x parallel.context={context} (each rank holds two "
            f"chunks); use {-(-length // (2 * context)) * 2 * context}"
        )


def _expert_tensor(config: RunConfig) -> Iterator[str]:
    shards, width = config.parallel.expert_tensor, config.model.moe_intermediate_size
    if width % (shards * BLOCK):
        yield (
            f"parallel.expert_tensor={shards}: model.moe_intermediate_size={width} must be a multiple of {shards} x {BLOCK} "
            f"for shards of whole NVFP4 blocks; use a smaller parallel.expert_tensor"
        )


def _cluster(config: RunConfig, layout: Layout) -> Iterator[str]:
    cluster = config.cluster
    if cluster.devices_per_node is not None and layout.world_size != cluster.nodes * cluster.devices_per_node:
        yield (
            f"cluster.nodes={cluster.nodes}: {cluster.nodes} nodes x cluster.devices_per_node {cluster.devices_per_node} = "
            f"{cluster.nodes * cluster.devices_per_node} devices, but the world size is {layout.world_size}; make them equal"
        )
    if cluster.rollout_nodes and cluster.devices_per_node is not None:
        devices = cluster.rollout_nodes * cluster.devices_per_node
        if devices % config.rollout.tensor_parallel:
            yield (
                f"rollout.tensor_parallel={config.rollout.tensor_parallel}: must divide the {devices} devices of the "
                f"{cluster.rollout_nodes} rollout nodes; use a divisor of {devices}"
            )


def _alignment(config: RunConfig) -> Iterator[str]:
    model = config.model
    widths = {"model.hidden_size": model.hidden_size}
    for name, shards in (
        ("parallel.expert_tensor", config.parallel.expert_tensor),
        ("the engine's expert shards", _engine_shards(config)),
    ):
        widths[f"model.moe_intermediate_size / {name} {shards}"] = model.moe_intermediate_size // shards
    for name, width in widths.items():
        if width % GEMM_ALIGNMENT:
            yield f"{name} = {width}: not a multiple of {GEMM_ALIGNMENT}; grouped FP4 kernels pad it to a multiple"


def _engine_shards(config: RunConfig) -> int:
    return config.rollout.tensor_parallel // config.rollout.expert_parallel


def _across_nodes(config: RunConfig) -> Iterator[str]:
    per_node = config.cluster.devices_per_node
    if per_node is None:
        return
    for name, size in (
        ("parallel.tensor", config.parallel.tensor),
        ("rollout.tensor_parallel", config.rollout.tensor_parallel),
    ):
        if size > per_node:
            yield f"{name}={size}: spans nodes of {per_node} devices and runs at the network's speed; use at most {per_node}"


def bubble(config: RunConfig, layout: Layout) -> float:
    """Share of a step that a pipeline stage waits: (p - 1) / (v m + p - 1) (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    waiting = layout.pipeline - 1
    return waiting / (layout.virtual_pipeline * memory.micro_batches(config, layout) + waiting)


def _bubble(config: RunConfig, layout: Layout) -> Iterator[str]:
    share, micro_batches = bubble(config, layout), memory.micro_batches(config, layout)
    if share > 0.2:
        yield (
            f"parallel.pipeline={layout.pipeline}: stages wait {share:.0%} of a step (only {micro_batches} "
            f"micro-batches); use fewer stages, smaller micro-batches or parallel.virtual_pipeline"
        )
