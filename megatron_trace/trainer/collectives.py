"""Small reductions of plain numbers and metrics.

Sums are over the data-parallel group: ranks of one model-parallel group hold the same samples and the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_trace.rl.metrics import PolicyMetrics


def global_sum(value: float) -> float:
    """Sum of ``value`` over data-parallel ranks."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return float(tensor)


def global_sums(values: Mapping[str, float]) -> dict[str, float]:
    """Sum per key over data-parallel ranks; every rank must have the same keys in the same order."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return dict(zip(values, tensor.tolist(), strict=True))


def global_max(value: float) -> float:
    """Largest ``value`` over all ranks."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order (small picklable objects)."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def merge_metrics(parts: Sequence[PolicyMetrics]) -> PolicyMetrics:
    """Metrics of all micro-batches of all data-parallel ranks together."""
    total = PolicyMetrics.empty()
    for part in parts:
        total = total.merge(part)
    sums, maxima = total.sums.clone(), total.maxima.clone()
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return PolicyMetrics(sums=sums, maxima=maxima)
