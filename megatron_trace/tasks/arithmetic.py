"""Chains of additions and subtractions, as numbers or in words, solved with every partial sum written out.

    17+25+8=                             ->  17+25=42,42+8=50.
    ann has 17, gets 25, wins 8. total?  ->  17+25=42,42+8=50.

The final answer is what stands after the last ``=``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_trace.config import ConfigError
from megatron_trace.config.schema import ArithmeticSection
from megatron_trace.tasks.base import Problem, SupervisedBatch, supervised_batch
from megatron_trace.tasks.pool import Candidate, ProblemPool
from megatron_trace.tasks.tokenizer import ARITHMETIC_ALPHABET, CharTokenizer

_NAMES = ("ann", "bob", "eva", "leo", "mia", "tom")
_VERBS = {"+": ("gets", "wins", "buys"), "-": ("pays", "uses", "eats")}
_ANSWER = re.compile(r"=(0|[1-9][0-9]*)(\.?)\Z")


@dataclass(frozen=True)
class Chain:
    """``operands[0]`` followed by ``ops[i] operands[i + 1]``; no partial result is negative."""

    operands: tuple[int, ...]
    ops: tuple[str, ...]

    @property
    def partials(self) -> tuple[int, ...]:
        """Results after each operation, the first operand leading."""
        signed = (value if op == "+" else -value for op, value in zip(("+", *self.ops), self.operands, strict=True))
        return tuple(accumulate(signed))

    @property
    def expression(self) -> str:
        """``17+25-8``; also the key that decides the split, so that words and numbers of one chain stay together."""
        return str(self.operands[0]) + "".join(f"{op}{value}" for op, value in zip(self.ops, self.operands[1:], strict=True))

    @property
    def steps(self) -> tuple[str, ...]:
        """Each operation with its result: ``17+25=42``, ``42-8=34``."""
        partials = self.partials
        each = zip(partials, self.ops, self.operands[1:], partials[1:], strict=False)
        return tuple(f"{before}{op}{value}={after}" for before, op, value, after in each)

    @property
    def solution(self) -> str:
        """All steps: ``17+25=42,42-8=34.``"""
        return ",".join(self.steps) + "."

    @property
    def forgetful_solution(self) -> str:
        """The steps of someone who forgets the last operand: ``17+25=42.``"""
        return ",".join(self.steps[:-1]) + "."


class ArithmeticTask:
    """Seeded arithmetic problems with a rule-based checker; implements ``Task``."""

    def __init__(
        self,
        settings: ArithmeticSection,
        *,
        seed: int,
        train_problems: int,
        heldout_problems: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """Generate both splits. Raises ConfigError where prompts or solutions could be longer than allowed."""
        _check_lengths(settings, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)
        self.tokenizer = CharTokenizer(ARITHMETIC_ALPHABET)
        candidates = self._candidates(settings, random.Random(f"arithmetic:{seed}"))
        self.pool = ProblemPool.fill(candidates, train=train_problems, heldout=heldout_problems, seed=seed)

    def train_problems(self, *, start: int, count: int) -> list[Problem]:
        """See ``Task.train_problems``."""
        return self.pool.stream(start=start, count=count)

    def heldout_problems(self, count: int | None = None) -> list[Problem]:
        """See ``Task.heldout_problems``."""
        return list(self.pool.heldout[:count])

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """1.0 if the response ends in ``=`` and the answer, closed by a full stop or the end of sequence, else 0.0."""
        text, ended = self.tokenizer.response_text(response_ids)
        found = _ANSWER.search(text)
        closed = found is not None and (ended or found[2] == ".")
        return 1.0 if found is not None and closed and found[1] == problem.answer else 0.0

    def supervised_batch(self, problems: Sequence[Problem], *, sequence_length: int) -> SupervisedBatch:
        """See ``Task.supervised_batch``."""
        return supervised_batch(problems, tokenizer=self.tokenizer, sequence_length=sequence_length)

    def _candidates(self, settings: ArithmeticSection, rng: random.Random) -> Iterator[Candidate]:
        while True:
            chain = _draw_chain(settings, rng)
            told = rng.random() < settings.word_problem_fraction
            prompt = _in_words(chain, rng) if told else f"{chain.expression}="
            forgets = settings.forgetful_fraction > 0 and rng.random() < settings.forgetful_fraction
            problem = Problem(
                problem_id=0,
                prompt_text=prompt,
                prompt_ids=(self.tokenizer.bos_id, *self.tokenizer.encode(prompt)),
                solution_text=chain.forgetful_solution if forgets else chain.solution,
                answer=str(chain.partials[-1]),
            )
            yield Candidate(key=chain.expression, problem=problem)


def _draw_chain(settings: ArithmeticSection, rng: random.Random) -> Chain:
    """Draw until no partial result is negative; the operands of a subtraction are drawn from what is left."""
    while True:
        total = rng.randint(1, settings.max_operand)
        operands, ops = [total], []
        for _ in range(settings.operands - 1):
            op = rng.choice(settings.ops)
            largest = settings.max_operand if op == "+" else min(settings.max_operand, total)
            if largest < 1:
                break
            value = rng.randint(1, largest)
            total += value if op == "+" else -value
            operands.append(value)
            ops.append(op)
        else:
            return Chain(operands=tuple(operands), ops=tuple(ops))


def _in_words(chain: Chain, rng: random.Random) -> str:
    events = (f", {rng.choice(_VERBS[op])} {value}" for op, value in zip(chain.ops, chain.operands[1:], strict=True))
    return f"{rng.choice(_NAMES)} has {chain.operands[0]}{''.join(events)}. total?"


def longest_prompt(settings: ArithmeticSection) -> int:
    """Tokens of the longest prompt these settings can give, begin of sequence included."""
    most = Chain(operands=(settings.max_operand,) * settings.operands, ops=("+",) * (settings.operands - 1))
    numbers = 0 if settings.word_problem_fraction == 1 else len(f"{most.expression}=")
    words = 0 if settings.word_problem_fraction == 0 else len(_in_words(most, random.Random(0)))
    return 1 + max(numbers, words)


def longest_solution(settings: ArithmeticSection) -> int:
    """Tokens of the longest solution these settings can give, end of sequence included (an upper bound with subtraction)."""
    most = Chain(operands=(settings.max_operand,) * settings.operands, ops=("+",) * (settings.operands - 1))
    return len(most.solution) + 1


def _check_lengths(settings: ArithmeticSection, *, max_prompt_tokens: int, max_new_tokens: int) -> None:
    prompt, solution = longest_prompt(settings), longest_solution(settings)
    problems = []
    if prompt > max_prompt_tokens:
        problems.append(
            f"task.max_prompt_tokens={max_prompt_tokens}: the longest problem of task.arithmetic takes {prompt} tokens; "
            f"use at least {prompt}"
        )
    if solution > max_new_tokens:
        problems.append(
            f"rollout.max_new_tokens={max_new_tokens}: the longest solution of task.arithmetic takes {solution} tokens; "
            f"use at least {solution}"
        )
    if problems:
        raise ConfigError(problems)
