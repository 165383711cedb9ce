"""Search the layouts of a given cluster and rank those that are legal and fit (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_trace.config.schema import ParallelSection, RunConfig
from megatron_trace.config.validation import unsupported
from megatron_trace.planning import layout, legality, memory
from megatron_trace.planning.activations import Kernels
from megatron_trace.planning.layout import Layout
from megatron_trace.planning.plan import GIB


@dataclass(frozen=True)
class Suggestion:
    """One layout that fits, with what it was ranked by."""

    parallel: ParallelSection
    layout: Layout
    device_bytes: int
    bubble: float
    expert_groups_per_node: bool
    """Whether every expert group lies inside a node."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings that differ from 1, as they are given on the command line."""
        values = self.parallel.model_dump()
        return tuple(f"parallel.{name}={value}" for name, value in values.items())

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better: time lost to the pipeline (in steps of 5%), shards of dense modules (each costs communication in
        every layer), experts across nodes, memory."""
        split = self.layout.tensor * self.layout.context
        return (int(self.bubble * 20), split, not self.expert_groups_per_node, self.device_bytes)


def suggest(config: RunConfig, *, world_size: int | None = None, most: int = 8) -> list[Suggestion]:
    """The best ``most`` layouts for the cluster of ``config``; empty where none fits.

    Tensor parallelism stays inside a node, experts are not split (``expert_tensor`` as configured), ``context`` only where the
    stack allows it. Memory is that of fused kernels unless the layout is one that this version runs.
    """
    ranks = layout.resolve(config, world_size=world_size).world_size
    found = [item for parallel in _candidates(config, ranks) for item in _judge(config, parallel, ranks)]
    return sorted(found, key=lambda item: item.rank)[:most]


def _candidates(config: RunConfig, ranks: int) -> Iterator[ParallelSection]:
    model = config.model
    per_node = config.cluster.devices_per_node or ranks // config.cluster.nodes
    experts = [size for size in _divisors(model.num_experts) if ranks % size == 0]
    for tensor in _divisors(per_node):
        for pipeline in (size for size in _divisors(model.num_layers) if ranks % (size * tensor) == 0):
            for context in (1,) if model.full_attention_interval > 1 else (1, 2, 4, 8):
                for expert in experts:
                    for virtual in (1,) if pipeline == 1 else (1, 2):
                        yield config.parallel.model_copy(
                            update={
                                "tensor": tensor,
                                "pipeline": pipeline,
                                "context": context,
                                "expert": expert,
                                "virtual_pipeline": virtual,
                            }
                        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _judge(config: RunConfig, parallel: ParallelSection, ranks: int) -> Iterator[Suggestion]:
    """The layout as a suggestion, or nothing."""
    wanted = config.model_copy(update={"parallel": parallel})
    where = layout.resolve(wanted, world_size=ranks)
    if legality.errors(wanted, where):
        return
    limit = config.cluster.device_memory_gib
    # The first stage holds the most micro-batches, the last the head; no stage between needs more than the larger of the two.
    ends = {0, where.pipeline - 1}
    kernels: Kernels = "fused" if unsupported(wanted) else "reference"
    needed = max(memory.rank_memory(wanted, where, stage, kernels=kernels).device for stage in ends)
    if limit is not None and needed > limit * GIB:
        return
    per_node = config.cluster.devices_per_node or ranks // config.cluster.nodes
    yield Suggestion(
        parallel=parallel,
        layout=where,
        device_bytes=needed,
        bubble=legality.bubble(wanted, where),
        expert_groups_per_node=parallel.expert * parallel.expert_tensor <= per_node,
    )
