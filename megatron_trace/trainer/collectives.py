"""Small reductions over all ranks of plain numbers and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_trace.rl.metrics import PolicyMetrics


def global_sum(value: float) -> float:
    """Sum of ``value`` over all ranks."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def global_sums(values: Mapping[str, float]) -> dict[str, float]:
    """Sum per key over all ranks; every rank must have the same keys in the same order."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(tensor)
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
    """Metrics of all micro-batches of all ranks together."""
    total = PolicyMetrics.empty()
    for part in parts:
        total = total.merge(part)
    sums, maxima = total.sums.clone(), total.maxima.clone()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return PolicyMetrics(sums=sums, maxima=maxima)
