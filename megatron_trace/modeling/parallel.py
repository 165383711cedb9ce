"""Megatron-core's process groups for a run."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_trace.config.model import ModelConfig


def initialize(*, expert_parallel: int, seed: int) -> None:
    """Create the groups once per process; a second call with another size replaces them (tests)."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(seed)


def local_expert_ids(model: ModelConfig) -> range:
    """Global ids of the experts that live on this rank."""
    size = parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_model_parallel_rank()
    per_rank = model.num_experts // size
    return range(rank * per_rank, (rank + 1) * per_rank)
