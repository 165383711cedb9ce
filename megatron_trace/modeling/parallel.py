"""Parallel layout of the trainer and Megatron-core's process groups for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_trace.config.model import ModelConfig
from megatron_trace.config.schema import ParallelSection


@dataclass(frozen=True)
class Layout:
    """Sizes of every kind of parallelism; what is left of the world size is data parallelism.

    Sequence parallelism goes with ``tensor`` > 1, because Megatron-core requires it of MoE layers in training.
    ``first_stage_layers`` and ``last_stage_layers`` make uneven pipeline stages (None: even).
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @classmethod
    def of(cls, section: ParallelSection) -> Layout:
        """The layout a run is configured with."""
        names = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context")
        return cls(**{name: getattr(section, name) for name in names})

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor > 1

    @property
    def token_multiple(self) -> int:
        """What the length of a micro-batch's sequences is padded to a multiple of: equal parts for every rank."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)


_created: tuple[Layout, object] | None = None
"""Layout and world group that Megatron-core's groups were made for."""


def initialize(layout: Layout | None = None, *, seed: int) -> None:
    """Create the groups once per process; a later call with another layout replaces them, with the same one keeps them.

    Groups that are replaced are not freed by Megatron-core and hold threads, so they are not made anew without need. ``layout``
    None: no model parallelism.
    """
    global _created
    wanted = (layout or Layout(), dist.group.WORLD)
    if not parallel_state.model_parallel_is_initialized() or _created != wanted:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        _create_groups(wanted[0])
        _created = wanted
    model_parallel_cuda_manual_seed(seed)


def _create_groups(layout: Layout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def local_expert_ids(model: ModelConfig) -> range:
    """Global ids of the experts that live on this rank."""
    size = parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_model_parallel_rank()
    per_rank = model.num_experts // size
    return range(rank * per_rank, (rank + 1) * per_rank)
