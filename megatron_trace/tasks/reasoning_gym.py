"""Problems and scorers of the reasoning-gym package (extra ``tasks``), imported only when the task is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_trace.config import ConfigError
from megatron_trace.config.schema import ReasoningGymSection
from megatron_trace.tasks.base import Problem, SupervisedBatch, supervised_batch
from megatron_trace.tasks.pool import Candidate, ProblemPool
from megatron_trace.tasks.tokenizer import TEXT_ALPHABET, CharTokenizer

_DATASET_SIZE = 2**31 - 1
"""Entries are generated when asked for, so that a size costs nothing."""


class ReasoningGymTask:
    """One reasoning-gym dataset, split by its questions and scored by its own ``score_answer``; implements ``Task``."""

    def __init__(
        self,
        settings: ReasoningGymSection,
        *,
        seed: int,
        train_problems: int,
        heldout_problems: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """Generate both splits. Raises ConfigError without the package, for settings it refuses, and for problems too long."""
        self.tokenizer = CharTokenizer(TEXT_ALPHABET)
        self.dataset = _create_dataset(settings, seed=seed)
        self._max_prompt_tokens = max_prompt_tokens
        self._max_new_tokens = max_new_tokens
        self.pool = ProblemPool.fill(self._candidates(), train=train_problems, heldout=heldout_problems, seed=seed)

    def train_problems(self, *, start: int, count: int) -> list[Problem]:
        """See ``Task.train_problems``."""
        return self.pool.stream(start=start, count=count)

    def heldout_problems(self, count: int | None = None) -> list[Problem]:
        """See ``Task.heldout_problems``."""
        return list(self.pool.heldout[:count])

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """The dataset's score of the whole response; 0.0 for one that is not ended or that the scorer cannot read."""
        text, ended = self.tokenizer.response_text(response_ids)
        if not ended:
            return 0.0
        try:
            return float(self.dataset.score_answer(answer=text.strip(), entry=problem.entry))
        except Exception:  # scorers of some datasets parse the answer and raise on malformed ones: a wrong answer, not an error
            return 0.0

    def supervised_batch(self, problems: Sequence[Problem], *, sequence_length: int) -> SupervisedBatch:
        """See ``Task.supervised_batch``; the solution is the bare answer."""
        return supervised_batch(problems, tokenizer=self.tokenizer, sequence_length=sequence_length)

    def _candidates(self) -> Iterator[Candidate]:
        for index in range(_DATASET_SIZE):
            entry = self.dataset[index]
            yield Candidate(key=entry["question"], problem=self._problem(entry))

    def _problem(self, entry: dict[str, Any]) -> Problem:
        question, answer = str(entry["question"]), str(entry["answer"])
        try:
            prompt_ids = (self.tokenizer.bos_id, *self.tokenizer.encode(question))
            solution_tokens = len(self.tokenizer.encode(answer)) + 1
        except ValueError as error:
            raise ConfigError(f"task.reasoning_gym.dataset: {error}; choose a dataset in plain ASCII") from error
        if len(prompt_ids) > self._max_prompt_tokens:
            raise ConfigError(
                f"task.max_prompt_tokens={self._max_prompt_tokens}: a problem of the dataset takes {len(prompt_ids)} tokens; "
                f"raise it or make the dataset's problems shorter (task.reasoning_gym.params)"
            )
        if solution_tokens > self._max_new_tokens:
            raise ConfigError(
                f"rollout.max_new_tokens={self._max_new_tokens}: an answer of the dataset takes {solution_tokens} tokens; "
                f"use at least {solution_tokens}"
            )
        return Problem(
            problem_id=0, prompt_text=question, prompt_ids=prompt_ids, solution_text=answer, answer=answer, entry=entry
        )


def _create_dataset(settings: ReasoningGymSection, *, seed: int) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "task.name='reasoning_gym': the package reasoning-gym is not installed; "
            "install the extra (pip install 'megatron-trace[tasks]') or use task.name=arithmetic"
        ) from error
    for name in ("seed", "size"):
        if name in settings.params:
            raise ConfigError(f"task.reasoning_gym.params.{name}={settings.params[name]!r}: set by the run; remove it")
    try:
        return package.create_dataset(settings.dataset, seed=seed, size=_DATASET_SIZE, **settings.params)
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"task.reasoning_gym.dataset={settings.dataset!r}: refused by reasoning-gym ({reason}); "
            f"mend the name or task.reasoning_gym.params"
        ) from error
