"""What a task is to the trainer: problems in, rewards out, and solutions for a supervised start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_trace.tasks.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer. ``problem_id`` counts within its split, from 0."""

    problem_id: int
    prompt_text: str
    prompt_ids: tuple[int, ...]
    """Begin of sequence and the prompt's characters."""
    solution_text: str
    """What the supervised start imitates, without end of sequence; right unless the source is told to show flawed ones."""
    answer: str
    """The final answer alone."""
    entry: Mapping[str, Any] | None = None
    """What the source's own scorer needs, where it has one."""


@dataclass(frozen=True)
class SupervisedBatch:
    """Prompts with their solutions, padded at the right.

    ``tokens`` int64 [n, sequence_length]; ``response_mask`` bool [n, sequence_length], true where the token at that very
    position belongs to the response (end of sequence included), so that it is the target of the position before; ``lengths``
    int64 [n].
    """

    tokens: np.ndarray
    response_mask: np.ndarray
    lengths: np.ndarray


class Task(Protocol):
    """A source of problems with a rule that scores responses. Everything is a pure function of its settings and the seed."""

    @property
    def tokenizer(self) -> CharTokenizer:
        """Tokenizer of prompts and responses."""
        ...

    def train_problems(self, *, start: int, count: int) -> list[Problem]:
        """Problems at ``start`` .. ``start + count - 1`` of the endless training stream, reshuffled each epoch."""
        ...

    def heldout_problems(self, count: int | None = None) -> list[Problem]:
        """The first ``count`` problems of the held-out split, all of them when None."""
        ...

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """Score in [0, 1] of a response; any sequence of ids is scored, none is an error."""
        ...

    def supervised_batch(self, problems: Sequence[Problem], *, sequence_length: int) -> SupervisedBatch:
        """Prompts and written-out solutions of ``problems``, padded to ``sequence_length``."""
        ...


def supervised_batch(problems: Sequence[Problem], *, tokenizer: CharTokenizer, sequence_length: int) -> SupervisedBatch:
    """Lay out prompt, solution and end of sequence of each problem; raises ValueError for one that does not fit."""
    shape = (len(problems), sequence_length)
    tokens = np.full(shape, tokenizer.pad_id, dtype=np.int64)
    response_mask = np.zeros(shape, dtype=bool)
    lengths = np.zeros(len(problems), dtype=np.int64)
    for row, problem in enumerate(problems):
        ids = (*problem.prompt_ids, *tokenizer.encode(problem.solution_text), tokenizer.eos_id)
        if len(ids) > sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length}: problem {problem.prompt_text!r} and its solution take {len(ids)} tokens; "
                f"use at least {len(ids)}"
            )
        tokens[row, : len(ids)] = ids
        response_mask[row, len(problem.prompt_ids) : len(ids)] = True
        lengths[row] = len(ids)
    return SupervisedBatch(tokens=tokens, response_mask=response_mask, lengths=lengths)
