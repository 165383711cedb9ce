"""Which rank does what: sizes of process groups, their members in Megatron-core's order, the layers of a stage (no torch).

Order and formulas: megatron/core/parallel_state.py, ``initialize_model_parallel`` in its default order "tp-cp-ep-dp-pp": dense
modules use the grid tensor x context x data x pipeline and routed experts the grid expert-tensor x expert x expert-data x
pipeline over the same ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron_trace.config.schema import RunConfig

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Sizes of every kind of parallelism over ``world_size`` ranks. Build with ``resolve``, which checks nothing."""

    world_size: int
    tensor: int
    context: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    expert_tensor: int

    @property
    def data(self) -> int:
        """Replicas of the dense modules, each with its own sequences."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Replicas of each routed expert."""
        return self.world_size // (self.expert * self.expert_tensor * self.pipeline)

    @cached_property
    def _dense_grid(self) -> tuple[tuple[str, int], ...]:
        """Axes from the fastest-varying to the slowest."""
        return (("tensor", self.tensor), ("context", self.context), ("data", self.data), ("pipeline", self.pipeline))

    @cached_property
    def _expert_grid(self) -> tuple[tuple[str, int], ...]:
        return (
            ("expert_tensor", self.expert_tensor),
            ("expert", self.expert),
            ("expert_data", self.expert_data),
            ("pipeline", self.pipeline),
        )

    def groups(self, axis: str) -> Groups:
        """Ranks of every group of ``axis`` (a name in ``AXES``), in the order Megatron-core creates them."""
        grid = self._dense_grid if axis in dict(self._dense_grid) else self._expert_grid
        names = [name for name, _ in grid]
        if axis not in names:
            raise ValueError(f"axis {axis!r}: must be one of {', '.join(AXES)}")
        position = names.index(axis)
        size = grid[position][1]
        stride = math.prod(extent for _, extent in grid[:position])
        starts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return tuple(tuple(start + stride * index for index in range(size)) for start in starts)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of ``rank`` on every axis."""
        found: dict[str, int] = {}
        for grid in (self._dense_grid, self._expert_grid):
            stride = 1
            for name, size in grid:
                found[name] = rank // stride % size
                stride *= size
        return found

    def stage_layers(self, stage: int, num_layers: int) -> tuple[int, ...]:
        """Global layers (0-based, ascending) of pipeline stage ``stage``; chunks alternate between stages when interleaved."""
        chunk = num_layers // (self.pipeline * self.virtual_pipeline)
        starts = ((index * self.pipeline + stage) * chunk for index in range(self.virtual_pipeline))
        return tuple(layer for start in starts for layer in range(start, start + chunk))

    def to_dict(self) -> dict[str, int]:
        """Sizes by name, the derived data-parallel sizes included."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "data": self.data,
            "pipeline": self.pipeline,
            "virtual_pipeline": self.virtual_pipeline,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
            "expert_data": self.expert_data,
        }


AXES = ("tensor", "context", "data", "pipeline", "expert_tensor", "expert", "expert_data")


def smallest_world_size(config: RunConfig) -> int:
    """The fewest ranks that both grids fit into, a multiple of ``cluster.nodes``."""
    parallel = config.parallel
    dense = parallel.tensor * parallel.context * parallel.pipeline
    expert = parallel.expert * parallel.expert_tensor * parallel.pipeline
    return math.lcm(dense, expert, config.cluster.nodes)


def resolve(config: RunConfig, *, world_size: int | None = None) -> Layout:
    """The layout of ``config`` over ``world_size`` ranks, or over those its cluster section has."""
    cluster, parallel = config.cluster, config.parallel
    if world_size is None:
        per_node = cluster.devices_per_node
        world_size = smallest_world_size(config) if per_node is None else cluster.nodes * per_node
    return Layout(
        world_size=world_size,
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )
