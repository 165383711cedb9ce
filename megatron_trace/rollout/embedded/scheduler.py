"""Which tokens the next forward computes, and who gives way when pages run out. No tensors.

Prefill first: sequences with uncomputed tokens, oldest first, then newly admitted ones, until ``max_prefill_tokens`` are taken;
what does not fit is computed in a later chunk. With nothing to prefill, every running sequence decodes one token. Pages are
taken as tokens come. When none is free, the sequence admitted last is preempted: its pages are released and it waits, first in
line, to be computed again from its tokens. The oldest is never preempted, so the engine always moves on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_trace.rollout.embedded.block_manager import BlockManager
from megatron_trace.rollout.embedded.sequence import RunningSequence


@dataclass(frozen=True)
class Work:
    """One forward: tokens ``computed`` to ``ends[i]`` of ``sequences[i]``.

    ``forks`` (sequence, leader) have the same prompt as a leader that this forward completes: they copy its last page.
    """

    sequences: list[RunningSequence] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    forks: list[tuple[RunningSequence, RunningSequence]] = field(default_factory=list)

    def add(self, sequence: RunningSequence, end: int) -> None:
        self.sequences.append(sequence)
        self.ends.append(end)


class Scheduler:
    """Owns the waiting and the running sequences, and their pages.

    ``on_preempt`` is called with a sequence while it still has its pages: whoever keeps its records saves them there. While
    ``may_admit`` says no, waiting sequences are admitted one at a time only: slower, but never stuck.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_size: int,
        max_prefill_tokens: int,
        on_preempt: Callable[[RunningSequence], None],
        may_admit: Callable[[], bool] = lambda: True,
    ) -> None:
        self.blocks = blocks
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self.preemptions = 0
        self._on_preempt = on_preempt
        self._may_admit = may_admit

    def next(self) -> Work:
        """The next forward; call only while something is waiting or running."""
        return self._prefill() or self._decode()

    def preempt_all(self) -> None:
        """Take every running sequence back to the queue, in order (its pages are about to mean something else)."""
        while self.running:
            self._preempt(self.running[-1])

    def remove(self, sequence: RunningSequence) -> None:
        """Take a finished or aborted sequence out; its computed pages stay findable as a prefix."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.blocks.release(sequence.pages, tokens=sequence.tokens[: sequence.computed])

    def abandon(self) -> None:
        """Forget every sequence and what the pages hold: they may be half written."""
        for sequence in self.running:
            self.blocks.release(sequence.pages)
        self.running.clear()
        self.waiting.clear()
        self.blocks.flush()

    def _prefill(self) -> Work | None:
        work = Work()
        budget = self.max_prefill_tokens
        for sequence in self.running:
            if sequence.prefilling:
                budget -= self._take_chunk(sequence, budget, work)
        # Only fresh prompts that this forward completes can be copied from.
        computed = zip(work.sequences, work.ends, strict=True)
        leaders = {s.request.prompt: s for s, end in computed if _fresh(s) and end == len(s.tokens)}
        partial = {s.request.prompt for s in self.running if _fresh(s) and s.request.prompt not in leaders}
        while budget > 0 and self.waiting and len(self.running) < self.max_batch_size:
            if self.running and not self._may_admit():
                break
            sequence = self.waiting[0]
            prompt = sequence.request.prompt
            if _fresh(sequence) and prompt in partial:
                break  # the same prompt is being computed in chunks: its pages will be found when it is done
            if _fresh(sequence) and prompt in leaders:
                if not self._fork(sequence, leaders[prompt]):
                    break
                work.forks.append((sequence, leaders[prompt]))
            elif self._admit(sequence):
                budget -= self._take_chunk(sequence, budget, work)
                if _fresh(sequence):
                    done = work.ends[-1] == len(sequence.tokens)
                    leaders.update({prompt: sequence} if done else {})
                    partial.update(() if done else {prompt})
            else:
                break
            self.running.append(self.waiting.popleft())
        return work if work.sequences else None

    def _take_chunk(self, sequence: RunningSequence, budget: int, work: Work) -> int:
        chunk = min(len(sequence.tokens) - sequence.computed, budget)
        if chunk > 0:
            end = sequence.computed + chunk
            self.blocks.name(sequence.pages, sequence.tokens[:end])
            work.add(sequence, end)
        return max(chunk, 0)

    def _admit(self, sequence: RunningSequence) -> bool:
        # A preempted sequence comes back only where the others can each grow by a page, or it would be preempted at once.
        spare = len(self.running) if sequence.step else 0
        allocation = self.blocks.allocate(sequence.tokens, num_slots=len(sequence.tokens), spare=spare)
        if allocation is None:
            return False
        sequence.pages, sequence.computed = allocation.pages, allocation.cached_tokens
        return True

    def _fork(self, sequence: RunningSequence, leader: RunningSequence) -> bool:
        n = sequence.prompt_length
        pages = self.blocks.fork(leader.pages, prompt_length=n, num_slots=n)
        if pages is None:
            return False
        sequence.pages = pages
        return True

    def _decode(self) -> Work:
        work = Work()
        for sequence in list(self.running):
            while sequence in self.running and not self.blocks.grow(sequence.pages, num_slots=len(sequence.tokens)):
                self._preempt(self.running[-1])
            if sequence in self.running:
                work.add(sequence, len(sequence.tokens))
        return work

    def _preempt(self, sequence: RunningSequence) -> None:
        self._on_preempt(sequence)
        self.blocks.release(sequence.pages, tokens=sequence.tokens[: sequence.computed])
        self.running.remove(sequence)
        sequence.pages, sequence.computed = [], 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1


def _fresh(sequence: RunningSequence) -> bool:
    """Whether nothing was sampled yet: the sequence is its prompt."""
    return sequence.step == 0
