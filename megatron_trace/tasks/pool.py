"""Two disjoint splits of a generated source, and the endless shuffled stream over the training one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron_trace.config import ConfigError
from megatron_trace.tasks.base import Problem

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 8
"""One in this many problem keys belongs to the held-out split."""
_PATIENCE = 16
"""Drawn problems for each wanted one, after which a source is called too small."""


def split_of(key: str) -> Split:
    """Split of a problem, by a hash of what makes it the same problem: no seed in it, so no run trains on a held-out one."""
    digest = hashlib.sha256(f"megatron-trace split:{key}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_SHARE == 0 else "train"


@dataclass(frozen=True)
class Candidate:
    """A drawn problem, with the ``key`` that decides its split."""

    key: str
    problem: Problem


@dataclass(frozen=True)
class ProblemPool:
    """The finite splits a task draws from. Prompts are distinct within each split; keys never cross splits."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    seed: int

    @classmethod
    def fill(cls, candidates: Iterator[Candidate], *, train: int, heldout: int, seed: int) -> ProblemPool:
        """Take distinct problems until both splits are full; raises ConfigError if the source is too small."""
        wanted: dict[Split, int] = {"train": train, "heldout": heldout}
        taken: dict[Split, list[Problem]] = {"train": [], "heldout": []}
        prompts: set[str] = set()
        for _ in range(_PATIENCE * (train + HELDOUT_SHARE * heldout)):
            candidate = next(candidates)
            split = split_of(candidate.key)
            if len(taken[split]) == wanted[split] or candidate.problem.prompt_text in prompts:
                continue
            prompts.add(candidate.problem.prompt_text)
            taken[split].append(replace(candidate.problem, problem_id=len(taken[split])))
            if all(len(taken[name]) == wanted[name] for name in wanted):
                return cls(train=tuple(taken["train"]), heldout=tuple(taken["heldout"]), seed=seed)
        raise ConfigError(
            f"task.{name}_problems={wanted[name]}: the source has only {len(taken[name])} distinct ones; "
            f"use at most {len(taken[name])} or make the problems more varied"
            for name in wanted
            if len(taken[name]) < wanted[name]
        )

    def stream(self, *, start: int, count: int) -> list[Problem]:
        """Problems ``start`` .. ``start + count - 1`` of the training split repeated for ever, each epoch in its own order."""
        size = len(self.train)
        return [self.train[_order(self.seed, index // size, size)[index % size]] for index in range(start, start + count)]


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    return tuple(random.Random(f"order:{seed}:{epoch}").sample(range(size), size))
