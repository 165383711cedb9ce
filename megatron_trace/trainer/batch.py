"""Trajectories as the padded micro-batches the trainer computes on.

Axes: B sequences, S input positions (position p predicts token p + 1; the last sampled token is no input).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import tokens_digest
from megatron_trace.guidance.store import GuidanceStore, RowRequest
from megatron_trace.rollout.protocol import Trajectory


@dataclass(frozen=True)
class Sample:
    """One trained sequence: its trajectory and the advantage of its response tokens."""

    trajectory: Trajectory
    advantage: float = 0.0


@dataclass(frozen=True)
class MicroBatch:
    """All tensors [B, S]; ``mask`` marks positions whose next token is a response's; ``proximal_logprobs`` may come later."""

    sample_ids: tuple[int, ...]
    tokens: torch.Tensor
    next_tokens: torch.Tensor
    mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    frame: GuidanceFrame
    proximal_logprobs: torch.Tensor | None = None
    packed: bool = False
    """Whether the model is fed the sequences one behind another, without their padding."""

    def with_proximal(self, logprobs: torch.Tensor) -> MicroBatch:
        return replace(self, proximal_logprobs=logprobs)


def row_request(trajectory: Trajectory) -> RowRequest:
    """Rows 0..n-2 of the sample; a position that sampled a token must carry the weight version that sampled it."""
    length = len(trajectory.tokens) - 1
    versions = np.full(length, -1, dtype=np.int64)
    versions[trajectory.prompt_length - 1 :] = trajectory.token_versions
    digest = tokens_digest(trajectory.tokens[:length])
    return RowRequest(sample_id=trajectory.sample_id, length=length, versions=versions, tokens_digest=digest)


def micro_batch(
    samples: Sequence[Sample],
    *,
    store: GuidanceStore | None,
    rounding: Rounding,
    pad_id: int,
    measure_flips: bool = False,
    layers: Sequence[int] | None = None,
    packed: bool = False,
) -> MicroBatch:
    """Pad ``samples`` on the right to the longest and gather their frame (from ``store`` where rounding or routes need it).

    ``layers``: the global layers of this pipeline stage, whose records alone are read (None: all).
    """
    lengths = [len(s.trajectory.tokens) - 1 for s in samples]
    shape = (len(samples), max(lengths))
    tokens = np.full(shape, pad_id, dtype=np.int64)
    next_tokens = np.full(shape, pad_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    behavior = np.zeros(shape, dtype=np.float32)
    for b, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        t = sample.trajectory
        tokens[b, :length], next_tokens[b, :length] = t.tokens[:-1], t.tokens[1:]
        mask[b, t.prompt_length - 1 : length] = True
        behavior[b, t.prompt_length - 1 : length] = t.logprobs
    advantages = np.broadcast_to(np.array([s.advantage for s in samples], dtype=np.float32)[:, None], shape)
    requests = [row_request(s.trajectory) for s in samples]
    source = store if store is not None else GuidanceStore(contract_fingerprint="")
    return MicroBatch(
        sample_ids=tuple(s.trajectory.sample_id for s in samples),
        tokens=torch.from_numpy(tokens),
        next_tokens=torch.from_numpy(next_tokens),
        mask=torch.from_numpy(mask),
        behavior_logprobs=torch.from_numpy(behavior),
        advantages=torch.from_numpy(advantages.copy()),
        frame=source.frame(requests, seq_len=shape[1], rounding=rounding, measure_flips=measure_flips, layers=layers),
        packed=packed,
    )


def micro_batches(
    samples: Sequence[Sample],
    *,
    size: int,
    store: GuidanceStore | None,
    rounding: Rounding,
    pad_id: int,
    measure_flips: bool = False,
    layers: Sequence[int] | None = None,
    packed: bool = False,
) -> list[MicroBatch]:
    """Split ``samples`` into micro-batches of ``size``, sorted by length to pad little; flips are measured in the first."""
    ordered = sorted(samples, key=lambda s: (len(s.trajectory.tokens), s.trajectory.sample_id))
    return [
        micro_batch(
            ordered[i : i + size],
            store=store,
            rounding=rounding,
            pad_id=pad_id,
            measure_flips=measure_flips and i == 0,
            layers=layers,
            packed=packed,
        )
        for i in range(0, len(ordered), size)
    ]
