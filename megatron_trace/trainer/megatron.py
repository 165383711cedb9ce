"""The Megatron-core side of a run: model, optimiser, forward and backward of micro-batches on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_trace.config.schema import OptimizerSection, RunConfig
from megatron_trace.guidance import frames
from megatron_trace.modeling import parallel
from megatron_trace.modeling.build import build_model, core_attentions, refresh_expert_weights
from megatron_trace.modeling.guided_attention import GuidedCoreAttention
from megatron_trace.modeling.init import randomize
from megatron_trace.platform.device import megatron_context
from megatron_trace.trainer.batch import MicroBatch

TokenLoss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Any]]
"""(log-probabilities [B, S] of the next tokens, micro-batch) -> (loss *summed* over its tokens, anything to collect)."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimiser step: what the loss collected per micro-batch, global gradient norm, whether it was applied."""

    collected: list[Any]
    grad_norm: float
    applied: bool


class MegatronTrainer:
    """One rank's model and optimiser. Every method is collective over the data-parallel group.

    ``version`` counts the optimiser steps that changed the weights; expert weights are quantised once per version.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.version = 0
        dtype = torch.bfloat16 if config.precision.compute_dtype == "bfloat16" else torch.float32
        with megatron_context():
            parallel.initialize(expert_parallel=config.parallel.expert, seed=config.run.seed)
            self.gpt = build_model(
                config.model,
                expert_parallel=config.parallel.expert,
                dtype=dtype,
                bf16_layers=config.precision.bf16_layers,
            )
            randomize(self.gpt, config.model, seed=config.run.seed)
            wrapped = Float16Module(self.gpt.config, self.gpt) if dtype is torch.bfloat16 else self.gpt
            ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self.model = DistributedDataParallel(self.gpt.config, ddp_config, wrapped)
        self._denominator = 1.0
        self.gpt.config.grad_scale_func = lambda loss: loss / self._denominator
        self.gpt.config.no_sync_func = self.model.no_sync
        self.gpt.config.finalize_model_grads_func = _finalize_without_scaling
        self.reset_optimizer(config.optimizer)
        self.weights_changed()

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
                    bf16=self.gpt.config.bf16,
                    params_dtype=self.gpt.config.params_dtype,
                    use_distributed_optimizer=True,
                ),
                [self.model],
            )

    def weights_changed(self) -> None:
        """Quantise every local expert from the current weights; forward and refit use these bytes until the next change."""
        with megatron_context(), torch.no_grad():
            refresh_expert_weights(self.gpt)

    @contextmanager
    def load_balancing(self, coefficient: float) -> Iterator[None]:
        """Add Megatron's auxiliary load-balancing loss for the enclosed steps (supervised warm-up of a random router)."""
        config = self.gpt.config
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
        return [layer.mlp.router for layer in self.gpt.decoder.layers]

    def step(self, batches: Sequence[MicroBatch], loss: TokenLoss, *, denominator: float, learning_rate: float) -> StepResult:
        """One optimiser step on ``batches``.

        The gradient is that of the summed loss over all ranks divided by ``denominator`` (a global figure, the same on every
        rank), so it does not depend on how tokens are split. With ``denominator`` 0 nothing changes and ``applied`` is False.
        """
        if denominator == 0:
            return StepResult(collected=[], grad_norm=0.0, applied=False)
        self._denominator = denominator
        with megatron_context():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            collected = self._run(batches, loss, forward_only=False)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            applied, grad_norm, _ = self.optimizer.step()
        if applied:
            self.version += 1
            self.weights_changed()
        return StepResult(collected=collected, grad_norm=float(grad_norm or 0.0), applied=bool(applied))

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities [B, S] of the next tokens of each micro-batch, without gradient, at the rollout temperature."""

        def keep(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            return logprobs.sum(), logprobs.detach().clone()

        with megatron_context(), torch.no_grad():
            return self._run(batches, keep, forward_only=True)

    def _run(self, batches: Sequence[MicroBatch], loss: TokenLoss, *, forward_only: bool) -> list[Any]:
        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(iterator)
            frames.make_current(batch.frame)
            output = next_token_logprobs(model, batch, temperature=self.config.rollout.temperature)

            def loss_func(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                total, collected = loss(logprobs, batch)
                return total, batch.mask.sum().int(), collected

            return output, loss_func

        try:
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=max(b.tokens.shape[1] for b in batches),
                micro_batch_size=max(b.tokens.shape[0] for b in batches),
                forward_only=forward_only,
            )
        finally:
            frames.make_current(None)

    def _calibrated(self) -> list[GuidedCoreAttention]:
        """Attentions whose K and V are quantised, by layer."""
        return sorted((a for a in core_attentions(self.gpt) if a.quantizes), key=lambda a: a.layer)

    def kv_amax(self) -> dict[tuple[int, str], float]:
        """The static amax of K and V in force, keyed (layer, site)."""
        return {(a.layer, site): amax for a in self._calibrated() for site, amax in a.static_amax.items()}

    def set_kv_amax(self, amax: dict[tuple[int, str], float]) -> None:
        """Put ``amax`` in force (with a new weight version, or from a checkpoint)."""
        for attention in self._calibrated():
            attention.static_amax = {site: amax[(attention.layer, site)] for site in ("k", "v")}

    def forget_kv_range(self) -> None:
        """Start collecting the range of K and V anew."""
        for attention in self._calibrated():
            attention.seen_amax = {"k": 0.0, "v": 0.0}

    def calibrate_kv(self) -> dict[tuple[int, str], float]:
        """Headroom times the largest K and V any rank saw since the last call; puts it in force and returns it.

        A site that saw nothing keeps its amax.
        """
        attentions = self._calibrated()
        seen = torch.tensor([[a.seen_amax["k"], a.seen_amax["v"]] for a in attentions], dtype=torch.float32)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        wanted = seen * self.config.precision.kv_amax_headroom
        for attention, values in zip(attentions, wanted.tolist(), strict=True):
            for site, value in zip(("k", "v"), values, strict=True):
                if value > 0:
                    attention.static_amax[site] = value
        self.forget_kv_range()
        return self.kv_amax()


def next_token_logprobs(model: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """log p(next token) [B, S] FP32 of the tempered softmax, for every position (padding included, masked by the caller)."""
    seq_len = batch.tokens.shape[1]
    positions = torch.arange(seq_len).expand_as(batch.tokens)
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)[None, None]
    logits_BSV = model(batch.tokens, positions, causal)
    return token_logprobs(logits_BSV, batch.next_tokens, temperature=temperature)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """FP32 log-softmax of ``logits`` / ``temperature`` [..., V] at ``tokens`` [...]."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, dim=-1)


def _finalize_without_scaling(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over ranks as sums: the loss is already divided by its global denominator."""
    finalize_model_grads(model, None, **kwargs)


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this process in the data-parallel group."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
