"""What one rank's model is fed of a micro-batch, and how its log-probabilities find back to the whole micro-batch.

A micro-batch is the same on every rank of a model-parallel group. A rank's share is one list of places: for each token it
computes, in its own order, the token's place s * B + b in the micro-batch, or -1 for padding of its own. Tokens, guidance rows
and routes are all taken by that list, so they cannot come apart, whatever the layout.

Axis legend: B sequences, S positions of the micro-batch; b, s those of the feed (packed: b = 1); T = s * b tokens,
sequence-first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_trace.guidance.frames import GuidanceFrame, HeadShare
from megatron_trace.guidance.sharding import zigzag_positions
from megatron_trace.modeling.parallel import Layout
from megatron_trace.trainer.batch import MicroBatch


@dataclass(frozen=True)
class Feed:
    """``tokens`` and ``next_tokens`` int64 [b, s]; ``places`` int64 [T]; ``packed`` where sequences lie one behind another."""

    tokens: torch.Tensor
    next_tokens: torch.Tensor
    frame: GuidanceFrame
    places: torch.Tensor
    is_whole: bool
    """Whether the feed is the micro-batch itself: every token, in its order."""
    packed: PackedSeqParams | None = None

    def model_inputs(self, *, own_mask: bool) -> dict[str, Any]:
        """Arguments of ``GPTModel.forward``; ``own_mask``: the core attention knows causality by itself."""
        batch, length = self.tokens.shape
        mask = None if own_mask else torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        return {
            "input_ids": self.tokens,
            "position_ids": torch.arange(length).expand(batch, length),
            "attention_mask": mask,
            "packed_seq_params": self.packed,
        }


def feed_of(batch: MicroBatch, layout: Layout, *, heads: HeadShare | None) -> Feed:
    """This rank's share of ``batch``; ``heads`` are the KV heads it computes (None: all)."""
    packed = None
    if batch.packed:
        places, packed = _packed_places(batch, layout)
        size = 1
    else:
        places, size = _padded_places(batch, layout), batch.tokens.shape[0]
    whole = len(places) == batch.tokens.numel() and not batch.packed and layout.context == 1
    index = torch.from_numpy(places)
    frame = batch.frame if whole else batch.frame.take(index)
    tokens, next_tokens = (_taken(values, index, size) for values in (batch.tokens, batch.next_tokens))
    return Feed(
        tokens=tokens,
        next_tokens=next_tokens,
        frame=replace(frame, heads=heads, sequence_part=_sequence_part(len(places), layout)),
        places=index,
        is_whole=whole,
        packed=packed,
    )


def to_batch(logprobs: torch.Tensor, feed: Feed, batch: MicroBatch, layout: Layout) -> torch.Tensor:
    """``logprobs`` [b, s] of the feed as [B, S] of the micro-batch, the same on every context-parallel rank; 0 where none is.

    Backward gives every rank the gradient of its own tokens.
    """
    if feed.is_whole:
        return logprobs
    flat_T, places = logprobs.t().reshape(-1), feed.places
    if layout.context > 1:
        group = parallel_state.get_context_parallel_group()
        flat_T = gather_from_sequence_parallel_region(flat_T, tensor_parallel_output_grad=False, group=group)
        everyone = [torch.empty_like(places) for _ in range(layout.context)]
        torch.distributed.all_gather(everyone, places, group=group)
        places = torch.cat(everyone)
    kept = places >= 0
    size, length = batch.tokens.shape
    return logprobs.new_zeros(length * size).index_put((places[kept],), flat_T[kept]).view(length, size).t()


def _taken(values_BS: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Values [b, s] at ``places``; padding repeats the first, whose log-probability is not looked at."""
    flat = values_BS.t().reshape(-1).index_select(0, places.clamp(min=0))
    return flat.view(-1, size).t().contiguous()


def _padded_places(batch: MicroBatch, layout: Layout) -> np.ndarray:
    size, length = batch.tokens.shape
    multiple = layout.token_multiple
    padded = -(-length // multiple) * multiple
    at_s = np.arange(padded)
    if layout.context > 1:
        at_s = zigzag_positions(padded, cp_size=layout.context, cp_rank=parallel_state.get_context_parallel_rank())
    places = at_s[:, None] * size + np.arange(size)
    return np.where(at_s[:, None] < length, places, -1).reshape(-1)


def _packed_places(batch: MicroBatch, layout: Layout) -> tuple[np.ndarray, PackedSeqParams]:
    if layout.context > 1:
        raise ValueError("packed micro-batches are not supported under context parallelism (parallel.context > 1): pad them")
    size, length = batch.tokens.shape
    assert batch.frame.is_token is not None
    lengths = batch.frame.is_token.view(length, size).sum(dim=0).tolist()
    parts = [np.arange(n) * size + b for b, n in enumerate(lengths) if n]
    missing = -sum(lengths) % layout.token_multiple
    if missing:  # padding is a sequence of its own, so that nothing attends to it
        parts.append(np.full(missing, -1))
    bounds = np.cumsum([0, *map(len, parts)])
    cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
    longest = max(map(len, parts))
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return np.concatenate(parts), packed


def _sequence_part(tokens: int, layout: Layout) -> tuple[int, int] | None:
    if not layout.sequence_parallel:
        return None
    share, rank = tokens // layout.tensor, parallel_state.get_tensor_model_parallel_rank()
    return rank * share, (rank + 1) * share
