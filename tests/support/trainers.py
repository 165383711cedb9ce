"""Trainers with known weights and trajectories an engine really recorded: shared by trainer, invariance and dist tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tiny import engine_of, quantized_bundle, random_weights, request, tiny_config

from megatron_trace.checkpoint import qwen3_moe
from megatron_trace.config import RunConfig, from_mapping
from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance.frames import Rounding
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.guidance.store import GuidanceStore
from megatron_trace.modeling.init import load_hf
from megatron_trace.modeling.shards import global_named_parameters, whole_state
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import guided
from megatron_trace.platform.device import megatron_context
from megatron_trace.rl.losses import LossConfig, policy_loss
from megatron_trace.rl.metrics import PolicyMetrics
from megatron_trace.rollout.protocol import Trajectory
from megatron_trace.trainer.batch import MicroBatch, Sample, micro_batch, micro_batches
from megatron_trace.trainer.megatron import MegatronTrainer, StepResult
from megatron_trace.trainer.update import loss_inputs

PAD = 0
KV_AMAX = 8.0
PROMPTS = [
    (3, 1, 4, 1, 5),
    (9, 2, 6),
    (5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3),
    (33, 7),
    (27, 9, 50, 28, 8, 41, 9, 7),
    (2, 2, 2, 2),
    (60, 1, 59, 3, 58, 5, 57, 7, 56, 9, 55),
    (12, 34),
]
FULL = GuidanceSpec(bits=4, layers=(0, 1, 2))


def run_config(model: ModelConfig | None = None, **sections: dict[str, Any]) -> RunConfig:
    """A run of the tiny model on one rank; ``sections`` are merged over it."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "test"},
        "model": (model or tiny_config()).model_dump(),
        "guidance": {"layers": "all", "bits": 4},
        "parallel": {"expert": 1},
        "rollout": {"max_new_tokens": 8, "tensor_parallel": 1, "num_pages": 64, "page_size": 4},
        "task": {"max_prompt_tokens": 24},
        "warmup": {"steps": 0},
        "algorithm": {"prompts_per_step": 8, "samples_per_prompt": 2},
        "trainer": {"steps": 1, "sequence_length": 40, "micro_batch_size": 4},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return from_mapping(values)


def trainer_of(config: RunConfig, weights: dict[str, torch.Tensor] | None = None, **settings: Any) -> MegatronTrainer:
    """A trainer that holds ``weights`` (Hugging Face names; default: ``random_weights``) and a static amax of ``KV_AMAX``.

    ``settings`` go to ``MegatronTrainer``.
    """
    trainer = MegatronTrainer(config, **settings)
    with megatron_context():
        load_hf(trainer.chunks, config.model, weights or random_weights(config.model))
        trainer.optimizer.reload_model_params()
    trainer.weights_changed()
    layers = set(range(config.model.num_layers)) - set(config.precision.bf16_layers)
    trainer.set_kv_amax({(layer, site): KV_AMAX for layer in layers for site in ("k", "v")})
    return trainer


def dtype_of(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision.compute_dtype == "bfloat16" else torch.float32


def rollout(
    config: RunConfig,
    *,
    spec: GuidanceSpec = FULL,
    tensor_parallel: int = 1,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    max_new_tokens: int = 8,
    version: int = 0,
) -> list[Trajectory]:
    """What an NVFP4 engine that serves ``random_weights`` samples and records; its bundle is not made by the trainer."""
    bundle = quantized_bundle(
        random_weights(config.model),
        config.model,
        dtype=dtype_of(config),
        version=version,
        kv_amax=KV_AMAX,
        bf16_layers=config.precision.bf16_layers,
        fingerprint=config.contract.fingerprint,
    )
    engine = engine_of(
        config.model,
        bundle,
        dtype=dtype_of(config),
        tensor_parallel=tensor_parallel,
        bf16_layers=config.precision.bf16_layers,
        contract_fingerprint=config.contract.fingerprint,
        num_pages=256,
    )
    requests = [request(i, p, max_new_tokens=max_new_tokens - i % 3) for i, p in enumerate(prompts)]
    return engine.generate(requests, capture=spec, capture_routes=True)


def store_of(config: RunConfig, trajectories: Sequence[Trajectory]) -> GuidanceStore:
    store = GuidanceStore(contract_fingerprint=config.contract.fingerprint)
    for t in trajectories:
        store.put(t.guidance, t.routes)
    return store


def samples_of(trajectories: Sequence[Trajectory]) -> list[Sample]:
    """Advantages of both signs, a function of the sample id."""
    return [Sample(t, advantage=(1.0, -0.5, 0.25, -2.0)[t.sample_id % 4]) for t in trajectories]


def batches_of(
    config: RunConfig,
    samples: Sequence[Sample],
    *,
    size: int = 4,
    rounding: Rounding = Rounding.GUIDED,
    store: GuidanceStore | None = None,
    **settings: Any,
) -> list[MicroBatch]:
    """``settings`` go to ``micro_batches``."""
    store = store or store_of(config, [s.trajectory for s in samples])
    return micro_batches(samples, size=size, store=store, rounding=rounding, pad_id=PAD, **settings)


def one_batch(config: RunConfig, trajectories: Sequence[Trajectory], rounding: Rounding = Rounding.GUIDED) -> MicroBatch:
    """All of ``trajectories`` as one micro-batch, in their order."""
    store = store_of(config, trajectories)
    return micro_batch(samples_of(trajectories), store=store, rounding=rounding, pad_id=PAD)


def tis_loss(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, tuple[float, PolicyMetrics]]:
    """The loss of the main job, summed over tokens."""
    settings = LossConfig(objective="tis", clip_low=0.2, clip_high=0.28, truncation=5.0)
    out = policy_loss(loss_inputs(logprobs, batch), settings, denominator=1.0)
    return out.loss, (float(out.loss.detach()), out.metrics)


@dataclass
class Step:
    """One optimiser step: result, gradients and new weights by Hugging Face name, whatever the parallel layout."""

    result: StepResult
    loss: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def step(
    trainer: MegatronTrainer,
    batches: Sequence[MicroBatch],
    *,
    denominator: float,
    learning_rate: float = 1e-3,
    loss: Any = tis_loss,
) -> Step:
    """``trainer.step`` with the gradients seen just before the optimiser reads them. Collective."""
    seen: dict[str, torch.Tensor] = {}
    optimizer_step = trainer.optimizer.step

    def spying_step() -> Any:
        gather_main_grads(trainer)
        seen.update(by_hf_name(trainer, lambda p: p.main_grad.clone()))
        return optimizer_step()

    trainer.optimizer.step = spying_step
    try:
        result = trainer.step(batches, loss, denominator=denominator, learning_rate=learning_rate)
    finally:
        del trainer.optimizer.step
    total = torch.tensor(sum(value for value, _ in result.collected), dtype=torch.float64)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    weights = by_hf_name(trainer, lambda p: p.detach().clone())
    return Step(result=result, loss=float(total), gradients=seen, weights=weights)


def gather_main_grads(trainer: MegatronTrainer) -> None:
    """Complete every ``main_grad``: the distributed optimiser leaves each rank the reduced values of its own shard only."""
    for group in [g for m in trainer.models for g in m.bucket_groups + m.expert_parallel_bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shards = list(bucket.grad_data.chunk(ranks.size()))
            dist.all_gather(shards, shards[ranks.rank()].clone(), group=ranks)


def by_hf_name(trainer: MegatronTrainer, what: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """``what`` of every parameter of all ranks, whole, by Hugging Face name. Collective."""
    model = trainer.config.model
    state = whole_state({name: what(p) for name, p in global_named_parameters(trainer.chunks, model).items()}, model)
    return dict(qwen3_moe.dense_to_hf(state, model)) | qwen3_moe.experts_to_hf(state, model, range(model.num_experts))


def guided_site_codes(
    trainer: MegatronTrainer, config: RunConfig, trajectory: Trajectory
) -> dict[tuple[int, str], torch.Tensor]:
    """Ladder indices int8 [n, K] that a guided forward over one sequence gives at every recorded site. Collective under EP."""
    batch = one_batch(config, [trajectory])
    probe.reset()
    probe.keep_values = True
    try:
        trainer.logprobs([batch])
    finally:
        probe.keep_values = False
    codes = {}
    for (layer, site), kept in probe.kept.items():
        record = batch.frame.record(layer, site)
        assert record is not None
        codes[layer, site] = guided.guided_codes(kept[0], record)
    probe.reset()
    return codes


def recorded_codes(trajectory: Trajectory, layer: int, site: str) -> torch.Tensor:
    """Ladder indices int8 [n, K] in a whole-code record, decoded here by hand from its bytes."""
    segment = trajectory.guidance
    assert segment is not None and segment.layout.bits == 4
    column = segment.layout.column(layer, site)
    assert column is not None
    packed = torch.from_numpy(segment.rows[:, column.start : column.start + column.code_bytes].copy())
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).to(torch.int8)
    return torch.where(codes >= 8, -(codes & 7), codes & 7)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, 0 where both are zero."""
    difference, scale = float((a.double() - b.double()).norm()), float(b.double().norm())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def assert_equal_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, relative: float = 1e-6) -> None:
    """All of ``ours`` together within ``relative`` (norms) of ``theirs``, and no single tensor farther off than ten times that.

    Ten times, because a tensor whose gradient is a small difference of large terms keeps fewer digits in FP32.
    """
    assert ours.keys() == theirs.keys()
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 10 * relative, f"{worst}: {errors[worst]:.2e}"
    flat = [torch.cat([tensors[name].double().flatten() for name in theirs]) for tensors in (ours, theirs)]
    assert relative_error(*flat) <= relative
