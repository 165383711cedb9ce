"""Seconds, from bytes and the cluster's bandwidths: lower bounds, printed as computed and never as measured (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.config.schema import RunConfig
from megatron_trace.planning import guidance_traffic, memory, parameters
from megatron_trace.planning.layout import Layout

GIGA = 10**9


@dataclass(frozen=True)
class Rates:
    """Sizes and least times of one step; None where the cluster section lacks what the figure needs."""

    tokens_per_step: int
    guidance_bytes_per_step: int
    guidance_bytes_per_step_full: int
    guidance_wire_bytes_per_step: int
    """Row amaxes included."""
    guidance_seconds_storage: float
    """Writing one step's guidance to ``cluster.storage_gb_s``."""
    guidance_full_seconds_storage: float
    guidance_bytes_per_second: float | None
    """While decoding, over all engines."""
    refit_bytes: int
    """Weights that each engine receives for one version."""
    refit_seconds: float | None
    """Each node receiving its engines' weights once over ``cluster.network_gb_s``."""
    decode_tokens_per_second: float | None
    """Of all engines: weights and half-full KV read once per decoding step at ``cluster.device_bandwidth_gb_s``."""
    rollout_seconds: float | None
    """All tokens of a step at that rate."""
    train_seconds: float | None
    """Forward, backward (twice the work, thrice when recomputed), and a proximal forward with several updates per rollout."""


def rates(config: RunConfig, layout: Layout) -> Rates:
    """Figures of one step."""
    tokens = guidance_traffic.tokens_per_step(config)
    per_token = guidance_traffic.bytes_per_token(config)
    wire = guidance_traffic.wire_bytes_per_token(config)
    full = guidance_traffic.bytes_per_token_full(config)
    storage = config.cluster.storage_gb_s * GIGA
    decode = _decode_rate(config, layout)
    engine_bytes = memory.engine_weight_bytes(config, parameters.SINGLE)
    return Rates(
        tokens_per_step=tokens,
        guidance_bytes_per_step=tokens * per_token,
        guidance_bytes_per_step_full=tokens * full,
        guidance_wire_bytes_per_step=tokens * wire,
        guidance_seconds_storage=tokens * wire / storage,
        guidance_full_seconds_storage=tokens * full / storage,
        guidance_bytes_per_second=None if decode is None else decode * wire,
        refit_bytes=engine_bytes,
        refit_seconds=_refit_seconds(config, engine_bytes),
        decode_tokens_per_second=decode,
        rollout_seconds=None if decode is None else tokens / decode,
        train_seconds=_train_seconds(config, layout, tokens),
    )


def engines(config: RunConfig, layout: Layout) -> int:
    """Engines of the run: one for each group of ``rollout.tensor_parallel`` devices, or one in each rank when embedded."""
    if config.rollout.engine == "embedded":
        return layout.world_size
    devices = layout.world_size
    if config.cluster.rollout_nodes:
        per_node = config.cluster.devices_per_node or layout.world_size // config.cluster.nodes
        devices = config.cluster.rollout_nodes * per_node
    return max(1, devices // config.rollout.tensor_parallel)


def _refit_seconds(config: RunConfig, engine_bytes: int) -> float | None:
    network = config.cluster.network_gb_s
    if network is None:
        return None
    per_node = config.cluster.devices_per_node
    # Engines smaller than a node share one transfer; one that spans nodes brings each its share only.
    share = 1.0 if per_node is None else min(1.0, per_node / config.rollout.tensor_parallel)
    return engine_bytes * share / (network * GIGA)


def _decode_rate(config: RunConfig, layout: Layout) -> float | None:
    bandwidth = config.cluster.device_bandwidth_gb_s
    if bandwidth is None:
        return None
    engine = memory.engine_layout(config)
    weights, _ = memory.engine_memory(config)
    context: float = (config.task.max_prompt_tokens + config.rollout.max_new_tokens) / 2
    kv = memory.kv_bytes_per_token(config, tensor=engine.tensor)
    room = config.rollout.num_pages * config.rollout.page_size / context
    batch = max(1.0, min(config.rollout.max_batch_size, room))
    touched: float = 1 - (1 - config.model.num_experts_per_tok / config.model.num_experts) ** batch
    count = parameters.stage(config.model.model_copy(update={"mtp_num_layers": 0}), engine, 0)
    dense = count.dense * memory.value_bytes(config)
    read = dense + (weights - dense) * touched + batch * context * kv
    return engines(config, layout) * batch / (read / (bandwidth * GIGA))


def _train_seconds(config: RunConfig, layout: Layout, tokens: int) -> float | None:
    tflops = config.cluster.device_tflops
    if tflops is None:
        return None
    model = config.model
    # Two operations per weight, and two products over half the (causal) sequence in each softmax layer.
    attention = 2 * config.trainer.sequence_length * model.num_attention_heads * model.head_dim * len(model.kv_layers)
    forward = 2 * parameters.active_per_token(model) + attention
    passes = (4 if config.trainer.recompute == "full" else 3) + (1 if config.algorithm.updates_per_rollout > 1 else 0)
    return passes * forward * tokens / (layout.world_size * tflops * 10**12)
