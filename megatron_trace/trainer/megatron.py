"""The Megatron-core side of a run: model, optimiser, forward and backward of micro-batches on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_trace.config.model import ModelConfig
from megatron_trace.config.schema import OptimizerSection, RunConfig
from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, HeadShare
from megatron_trace.guidance.spec import RecordLayout
from megatron_trace.modeling import parallel
from megatron_trace.modeling.build import (
    ModelOptions,
    all_modules,
    build_chunks,
    check_sites,
    core_attentions,
    local_layers,
    moe_layers,
    refresh_expert_weights,
)
from megatron_trace.modeling.guided_attention import GuidedCoreAttention
from megatron_trace.modeling.init import randomize
from megatron_trace.modeling.logprobs import sharded_token_logprobs
from megatron_trace.modeling.parallel import Layout
from megatron_trace.modeling.site_probe import probe
from megatron_trace.platform.device import megatron_context
from megatron_trace.rl.logprobs import token_logprobs
from megatron_trace.trainer.batch import MicroBatch
from megatron_trace.trainer.feed import feed_of, to_batch

TokenLoss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Any]]
"""(log-probabilities [B, S] of the next tokens, micro-batch) -> (loss *summed* over its tokens, anything to collect)."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimiser step: what the loss collected per micro-batch, global gradient norm, whether it was applied.

    ``finite`` is False where a gradient was not; the norm is then NaN.
    """

    collected: list[Any]
    grad_norm: float
    applied: bool
    finite: bool = True


class MegatronTrainer:
    """One rank's model and optimiser. Every method is collective over all ranks.

    ``version`` counts the optimiser steps that changed the weights; expert weights are quantised once per version. ``layout``
    and ``options`` default to what ``config`` says; ``changes`` are fields of Megatron's config that it has no word for.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        layout: Layout | None = None,
        options: ModelOptions | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.version = 0
        self.layout = layout or Layout.of(config.parallel)
        self.options = options or ModelOptions(
            recompute=config.trainer.recompute, whole_row_scale=config.precision.fc2_row_scale == "max_reduced"
        )
        dtype = torch.bfloat16 if config.precision.compute_dtype == "bfloat16" else torch.float32
        with megatron_context():
            parallel.initialize(self.layout, seed=config.run.seed)
            self.chunks = build_chunks(
                config.model,
                layout=self.layout,
                options=self.options,
                dtype=dtype,
                bf16_layers=config.precision.bf16_layers,
                changes=changes,
            )
            self.gpt: Any = all_modules(self.chunks)
            randomize(self.chunks, config.model, seed=config.run.seed)
            self.models = [self._data_parallel_model(chunk, first=i == 0) for i, chunk in enumerate(self.chunks)]
        self._denominator = 1.0
        megatron = self.chunks[0].config
        megatron.grad_scale_func = lambda loss: loss / self._denominator
        no_sync = [model.no_sync for model in self.models]
        megatron.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        megatron.finalize_model_grads_func = _finalize_without_scaling
        self._heads = _head_share(config.model, self.layout)
        self._checked: RecordLayout | None = None
        self._kv_amax: dict[tuple[int, str], float] = {}
        probe.counts_kv = parallel_state.get_tensor_model_parallel_rank() == 0
        self.reset_optimizer(config.optimizer)
        self.weights_changed()

    def _data_parallel_model(self, chunk: GPTModel, *, first: bool) -> DistributedDataParallel:
        wrapped = Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        return DistributedDataParallel(chunk.config, ddp_config, wrapped, disable_bucketing=not first)

    @property
    def model(self) -> DistributedDataParallel:
        """The wrapped model, where this rank has one chunk."""
        (model,) = self.models
        return model

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Global layers of this rank: the only ones whose records its frames need."""
        return local_layers(self.gpt)

    def reset_optimizer(self, settings: OptimizerSection) -> None:
        """Start with fresh optimiser moments (between warm-up and reinforcement learning)."""
        with megatron_context():
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=settings.learning_rate,
                    adam_beta1=settings.beta1,
                    adam_beta2=settings.beta2,
                    adam_eps=settings.eps,
                    weight_decay=settings.weight_decay,
                    clip_grad=settings.clip_grad,
                    bf16=self.chunks[0].config.bf16,
                    params_dtype=self.chunks[0].config.params_dtype,
                    use_distributed_optimizer=True,
                ),
                self.models,
            )

    def weights_changed(self) -> None:
        """Quantise every local expert from the current weights; forward and refit use these bytes until the next change."""
        with megatron_context(), torch.no_grad():
            refresh_expert_weights(self.gpt)

    @contextmanager
    def load_balancing(self, coefficient: float) -> Iterator[None]:
        """Add Megatron's auxiliary load-balancing loss for the enclosed steps (supervised warm-up of a random router)."""
        config = self.chunks[0].config
        previous = config.moe_aux_loss_coeff, [r.routing_type for r in self._routers()]
        config.moe_aux_loss_coeff = coefficient
        for router in self._routers():
            router.routing_type = "aux_loss"
        try:
            yield
        finally:
            config.moe_aux_loss_coeff = previous[0]
            for router, kind in zip(self._routers(), previous[1], strict=True):
                router.routing_type = kind

    def _routers(self) -> list[Any]:
        return [layer.router for layer in moe_layers(self.gpt)]

    def step(self, batches: Sequence[MicroBatch], loss: TokenLoss, *, denominator: float, learning_rate: float) -> StepResult:
        """One optimiser step on ``batches``.

        The gradient is that of the summed loss over all ranks divided by ``denominator`` (a global figure, the same on every
        rank), so it does not depend on how tokens are split. With ``denominator`` 0, or where the gradient of any rank is not
        finite, nothing changes and ``applied`` is False. ``collected`` is the same on all ranks that share the micro-batches.
        """
        if denominator == 0:
            return StepResult(collected=[], grad_norm=0.0, applied=False)
        self._denominator = denominator
        with megatron_context():
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            collected = self._run(batches, loss, forward_only=False)
            if not self._finite_gradients():
                return StepResult(collected=collected, grad_norm=float("nan"), applied=False, finite=False)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            applied, grad_norm, _ = self.optimizer.step()
        if applied:
            self.version += 1
            self.weights_changed()
        return StepResult(collected=collected, grad_norm=float(grad_norm or 0.0), applied=bool(applied))

    def _finite_gradients(self) -> bool:
        """Whether every gradient on every rank is a number; BF16 training has no loss scaler that would look."""
        buffers = [b.grad_data for model in self.models for b in (*model.buffers, *model.expert_parallel_buffers)]
        finite = torch.tensor(float(all(torch.isfinite(values).all() for values in buffers)))
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities [B, S] of the next tokens of each micro-batch, without gradient, at the rollout temperature."""

        def keep(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            return logprobs.sum(), logprobs.detach().clone()

        with megatron_context(), torch.no_grad():
            return self._run(batches, keep, forward_only=True)

    def _run(self, batches: Sequence[MicroBatch], loss: TokenLoss, *, forward_only: bool) -> list[Any]:
        if self.layout.virtual_pipeline > 1 and len(batches) % self.layout.pipeline:
            raise ValueError(
                f"{len(batches)} micro-batches: parallel.virtual_pipeline={self.layout.virtual_pipeline} needs a multiple of "
                f"parallel.pipeline={self.layout.pipeline}"
            )
        try:
            collected = get_forward_backward_func()(
                forward_step_func=lambda iterator, model: self._forward_step(next(iterator), model, loss),
                data_iterator=[iter(batches) for _ in self.models] if len(self.models) > 1 else iter(batches),
                model=list(self.models),
                num_microbatches=len(batches),
                seq_length=max(b.tokens.shape[1] for b in batches),
                micro_batch_size=max(b.tokens.shape[0] for b in batches),
                forward_only=forward_only,
            )
        finally:
            frames.make_current(None)
        return _from_last_stage(collected)

    def _forward_step(
        self, batch: MicroBatch, model: torch.nn.Module, loss: TokenLoss
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        feed = feed_of(batch, self.layout, heads=self._heads)
        self._check_record(feed.frame)
        frames.make_current(feed.frame)
        own_mask = self.layout.context > 1 or self.options.packed_sequences
        if batch.packed and not self.options.packed_sequences:
            raise ValueError("a packed micro-batch needs a model built with ModelOptions(packed_sequences=True)")
        output = model(**feed.model_inputs(own_mask=own_mask))
        if unwrapped(model).post_process:
            logprobs = sharded_token_logprobs(
                output,
                feed.next_tokens,
                temperature=self.config.rollout.temperature,
                vocab_size=self.config.model.vocab_size,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
            output = to_batch(logprobs, feed, batch, self.layout)

        def loss_func(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            total, collected = loss(logprobs, batch)
            return total, batch.mask.sum().int(), collected

        return frames.kept_for_backward(output), loss_func

    def _check_record(self, frame: GuidanceFrame) -> None:
        if frame.layout is not None and frame.layout is not self._checked and frame.layout != self._checked:
            check_sites(self.gpt, frame.layout)
            self._checked = frame.layout

    def _calibrated(self) -> list[GuidedCoreAttention]:
        """This rank's attentions whose K and V are quantised, by layer."""
        return sorted((a for a in core_attentions(self.gpt) if a.quantizes), key=lambda a: a.layer)

    def kv_amax(self) -> dict[tuple[int, str], float]:
        """The static amax of K and V in force, keyed (layer, site), of all layers."""
        return dict(self._kv_amax)

    def set_kv_amax(self, amax: dict[tuple[int, str], float]) -> None:
        """Put ``amax`` (of all layers) in force, with a new weight version or from a checkpoint."""
        for attention in self._calibrated():
            attention.static_amax = {site: amax[(attention.layer, site)] for site in ("k", "v")}
        self._kv_amax = dict(amax)

    def forget_kv_range(self) -> None:
        """Start collecting the range of K and V anew."""
        for attention in self._calibrated():
            attention.seen_amax = {"k": 0.0, "v": 0.0}

    def calibrate_kv(self) -> dict[tuple[int, str], float]:
        """Headroom times the largest K and V any rank saw since the last call; puts it in force and returns it.

        A site that saw nothing keeps its amax.
        """
        seen = torch.zeros(self.config.model.num_layers, 2, dtype=torch.float32)
        for attention in self._calibrated():
            seen[attention.layer] = torch.tensor([attention.seen_amax["k"], attention.seen_amax["v"]])
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        wanted = (seen * self.config.precision.kv_amax_headroom).tolist()
        amax = self.kv_amax()
        for layer, values in enumerate(wanted):
            amax |= {(layer, site): value for site, value in zip(("k", "v"), values, strict=True) if value > 0}
        for attention in self._calibrated():
            own = {site: amax[attention.layer, site] for site in ("k", "v") if (attention.layer, site) in amax}
            attention.static_amax = own
        self._kv_amax = amax
        self.forget_kv_range()
        return self.kv_amax()


def next_token_logprobs(model: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """log p(next token) [B, S] FP32 of the tempered softmax by a ``model`` that is whole on this rank; padding included."""
    seq_len = batch.tokens.shape[1]
    positions = torch.arange(seq_len).expand_as(batch.tokens)
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)[None, None]
    return token_logprobs(model(batch.tokens, positions, causal), batch.next_tokens, temperature=temperature)


def unwrapped(model: torch.nn.Module) -> Any:
    """The GPTModel below Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _head_share(model: ModelConfig, layout: Layout) -> HeadShare | None:
    if layout.tensor == 1:
        return None
    if model.num_key_value_heads % layout.tensor:
        raise ValueError(
            f"parallel.tensor={layout.tensor}: must divide model.num_key_value_heads={model.num_key_value_heads}, "
            "because guidance of K and V is cut by head"
        )
    count = model.num_key_value_heads // layout.tensor
    rank = parallel_state.get_tensor_model_parallel_rank()
    return HeadShare(first=rank * count, count=count, head_dim=model.head_dim)


def _from_last_stage(collected: list[Any]) -> list[Any]:
    """What the last pipeline stage collected, on all stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return collected
    box = [collected]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0]


def _finalize_without_scaling(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over ranks as sums: the loss is already divided by its global denominator."""
    finalize_model_grads(model, None, **kwargs)


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this process in the data-parallel group."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
