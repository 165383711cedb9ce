"""Rows of bytes that cross the expert all-to-all with the tokens, or instead of their values.

Follows ``MoEAlltoAllTokenDispatcher`` (megatron/core/transformer/moe/token_dispatcher.py): permuted by expert then token,
all-to-all over expert-parallel ranks, all-gather over expert-tensor-parallel ranks, sorted by local expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_trace.modeling.sites import unpacked_values


@dataclass(frozen=True)
class ArrivedRecords:
    """Records of the rows an expert block was handed: ``rows`` uint8 [R, n] as ``sites.record_rows`` made them, or None."""

    rows: torch.Tensor | None
    bits: int


def permuted_tokens(routing_map_TE: torch.Tensor) -> torch.Tensor:
    """Index of the token behind each routed row int64 [R], in the dispatcher's order: by expert, then by token."""
    return routing_map_TE.t().nonzero(as_tuple=True)[1]


def dispatched_rows(rows_R: torch.Tensor, dispatcher: MoEAlltoAllTokenDispatcher) -> torch.Tensor:
    """``rows_R`` uint8 [R, n] in permuted order -> uint8 [R', n] in the order experts are handed them. Collective.

    Call after the dispatcher's own all-to-all, whose split sizes it uses.
    """
    out = _all_to_all(rows_R, dispatcher.output_splits, dispatcher.input_splits, dispatcher.ep_group)
    if dispatcher.tp_size > 1:
        sizes = None if dispatcher.output_splits_tp is None else dispatcher.output_splits_tp.tolist()
        out = gather_from_sequence_parallel_region(out, group=dispatcher.tp_group, output_split_sizes=sizes)
    if dispatcher.num_local_experts > 1:
        counts = dispatcher.num_global_tokens_per_local_expert.ravel()
        out, _ = sort_chunks_by_idxs(out, counts, dispatcher.sort_input_by_local_experts)
    return out


def unpacked_after_dispatch(
    sent_RH: torch.Tensor, arrived: torch.Tensor, dispatcher: MoEAlltoAllTokenDispatcher
) -> torch.Tensor:
    """Values of the packed rows that ``arrived`` uint8 [R', n]; their gradient goes back to ``sent_RH`` as values."""
    return _Arrival.apply(sent_RH, arrived, dispatcher.output_splits, dispatcher.input_splits, dispatcher.ep_group)


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent_RH: torch.Tensor, arrived: torch.Tensor, received: Any, sent: Any, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (received, sent), group
        return unpacked_values(arrived, width=sent_RH.shape[-1], dtype=sent_RH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        received, sent = ctx.splits
        return _all_to_all(grads[0].contiguous(), sent, received, ctx.group), None, None, None, None


def _all_to_all(x: torch.Tensor, received: Any, sent: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Rows to and from every rank of ``group``; ``received`` and ``sent`` are row counts by rank (None: equal)."""
    if group.size() == 1:
        return x
    received, sent = (None if s is None else [int(n) for n in s] for s in (received, sent))
    out = x.new_empty((len(x) if received is None else sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
