"""One sample while it is being generated, and the batches that forward passes and sampling take.

Axis legend: T flattened new tokens, B sequences, Q new tokens of one sequence (padded), S context slots (padded).
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment
from megatron_trace.rollout.embedded.model import ForwardBatch
from megatron_trace.rollout.embedded.sampler import SamplingBatch, uniform_stream
from megatron_trace.rollout.protocol import FinishReason, GenerationRequest


@dataclass(eq=False)
class RunningSequence:
    """A request, its tokens so far, and the pages that hold them."""

    request: GenerationRequest
    tokens: list[int] = field(init=False)
    computed: int = 0
    """Leading tokens whose keys, values and records are in the pages."""
    pages: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    uniforms: np.ndarray = field(init=False)
    budget: int = field(init=False)
    """Tokens to generate unless a stop token comes first."""
    kept_guidance: GuidanceSegment | None = None
    """Rows of the forwards that sampled its tokens, saved when it was preempted; nothing recorded later replaces them."""
    kept_routes: RouteSegment | None = None
    kept: int = 0
    """Leading positions whose records are saved."""

    def __post_init__(self) -> None:
        sampling, forced = self.request.sampling, self.request.forced_tokens
        self.tokens = list(self.request.prompt)
        self.budget = sampling.max_new_tokens if forced is None else len(forced)
        self.uniforms = uniform_stream(seed=sampling.seed, sample_id=self.request.sample_id, length=self.budget)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token must be computed, or the first token is yet to be sampled."""
        return self.step == 0 or self.computed < len(self.tokens) - 1

    @property
    def step(self) -> int:
        """Index of the next token to generate."""
        return len(self.logprobs)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample has ended, or None. A forced sample ends with its last forced token, stop token or not."""
        stopped = self.step > 0 and self.tokens[-1] in self.request.sampling.stop_token_ids
        if stopped and (self.request.forced_tokens is None or self.step == self.budget):
            return "stop"
        return "length" if self.step == self.budget else None

    def slots(self, page_size: int, start: int, stop: int) -> np.ndarray:
        """KV slots int64 of positions ``start`` to ``stop``."""
        position = np.arange(start, stop)
        return np.asarray(self.pages, dtype=np.int64)[position // page_size] * page_size + position % page_size


def forward_batch(sequences: List[RunningSequence], stops: List[int], *, page_size: int, device: torch.device) -> ForwardBatch:
    """Tokens ``computed`` to ``stops[i]`` of each sequence; at least one of each."""
    starts = np.array([s.computed for s in sequences])
    ends = np.array(stops)
    counts = ends - starts
    tokens = np.concatenate([s.tokens[s.computed : stop] for s, stop in zip(sequences, stops, strict=True)])
    owner = np.repeat(np.arange(len(sequences)), counts)
    first_row = np.cumsum(counts) - counts
    positions = np.arange(len(tokens)) - first_row[owner] + starts[owner]

    table = np.zeros((len(sequences), -(-int(ends.max()) // page_size)), dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        held = sequence.pages[: len(row)]
        row[: len(held)] = held
    context = (table[:, :, None] * page_size + np.arange(page_size)).reshape(len(sequences), -1)[:, : int(ends.max())]
    queries = np.minimum(np.arange(int(counts.max())), counts[:, None] - 1)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return ForwardBatch(
        tokens_T=tensor(tokens),
        positions_T=tensor(positions),
        slots_T=tensor(context[owner, positions]),
        context_BS=tensor(context),
        row_BQ=tensor(first_row[:, None] + queries),
        last_B=tensor(first_row + counts - 1),
        cell_T=None if counts.max() == 1 else tensor(owner * int(counts.max()) + positions - starts[owner]),
    )


def sampling_batch(sequences: List[RunningSequence], *, device: torch.device) -> SamplingBatch:
    """What each sequence's next token is drawn with."""
    forced = [-1 if s.request.forced_tokens is None else s.request.forced_tokens[s.step] for s in sequences]
    sampling = [(s.request.sampling.temperature, s.request.sampling.top_p, s.uniforms[s.step]) for s in sequences]
    temperature, top_p, uniform = torch.tensor(sampling, dtype=torch.float64, device=device).unbind(-1)
    return SamplingBatch(
        temperature=temperature, top_p=top_p, uniform=uniform.contiguous(), forced=torch.tensor(forced, device=device)
    )
