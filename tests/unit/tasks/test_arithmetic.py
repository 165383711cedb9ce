"""Arithmetic problems: right solutions (recomputed from the prompt alone), disjoint splits, and a checker that never fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.config import ConfigError, load
from megatron_trace.config.schema import ArithmeticSection
from megatron_trace.tasks import build_task
from megatron_trace.tasks.arithmetic import _VERBS, ArithmeticTask, longest_prompt, longest_solution
from megatron_trace.tasks.base import Problem

MIXED = ArithmeticSection(operands=4, max_operand=99, ops=("+", "-"), word_problem_fraction=0.5)


def make(settings: ArithmeticSection = MIXED, **changes: Any) -> ArithmeticTask:
    sizes = {"seed": 0, "train_problems": 600, "heldout_problems": 200, "max_prompt_tokens": 64, "max_new_tokens": 48} | changes
    return ArithmeticTask(settings, **sizes)


TASK = make()
EVERY = [*TASK.pool.train, *TASK.pool.heldout]


def terms(prompt: str) -> list[int]:
    """Signed numbers of a prompt, read from its words or signs and nothing else."""
    if prompt.endswith("="):
        return [int(term) for term in re.findall(r"[+-]?\d+", prompt)]
    found = re.fullmatch(r"[a-z]{3} has (\d+)((?:, [a-z]+ \d+)+)\. total\?", prompt)
    assert found is not None, prompt
    signs = {"gets": 1, "wins": 1, "buys": 1, "pays": -1, "uses": -1, "eats": -1}
    return [int(found[1]), *(signs[verb] * int(number) for verb, number in re.findall(r", ([a-z]+) (\d+)", found[2]))]


@pytest.mark.parametrize("problem", EVERY[::40], ids=lambda problem: problem.prompt_text)
def test_solutions_write_out_every_partial_sum(problem: Problem) -> None:
    numbers = terms(problem.prompt_text)
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total}{number:+d}={total + number}")
        total += number
    assert problem.solution_text == ",".join(steps) + "."
    assert problem.answer == str(total)


def test_answers_of_all_problems_are_right_and_no_partial_result_is_negative() -> None:
    for problem in EVERY:
        partial = np.cumsum(terms(problem.prompt_text))
        assert problem.answer == str(partial[-1])
        assert partial.min() >= 0
        assert len(partial) == 4


def test_numbers_and_words_both_appear_in_their_share() -> None:
    words = sum(not problem.prompt_text.endswith("=") for problem in EVERY)
    assert 0.4 < words / len(EVERY) < 0.6
    assert all(p.prompt_text.endswith("=") for p in make(MIXED.model_copy(update={"word_problem_fraction": 0.0})).pool.train)
    assert not any(
        p.prompt_text.endswith("=") for p in make(MIXED.model_copy(update={"word_problem_fraction": 1.0})).pool.train
    )


def test_prompt_ids_are_the_text_after_begin_of_sequence() -> None:
    for problem in EVERY:
        assert problem.prompt_ids[0] == TASK.tokenizer.bos_id
        assert TASK.tokenizer.decode(problem.prompt_ids[1:]) == problem.prompt_text


def test_own_solutions_earn_the_reward() -> None:
    for problem in EVERY:
        assert TASK.reward(problem, TASK.tokenizer.encode(problem.solution_text)) == 1.0


PROBLEM = Problem(problem_id=0, prompt_text="17+25=", prompt_ids=(1,), solution_text="17+25=42.", answer="42")


@pytest.mark.parametrize(
    ("response", "ended", "reward"),
    [
        ("17+25=42.", True, 1.0),
        ("17+25=42.", False, 1.0),
        ("17+25=42", True, 1.0),
        ("17+25=42", False, 0.0),
        ("9=1,=42.", False, 1.0),
        ("17+25=4", True, 0.0),
        ("17+25=421.", True, 0.0),
        ("17+25=042.", True, 0.0),
        ("17+25=-42.", True, 0.0),
        ("17+25=42.1", True, 0.0),
        ("17+25=42..", True, 0.0),
        ("17+25=42.,1+1=3.", True, 0.0),
        ("42.", True, 0.0),
        ("=", True, 0.0),
        ("=.", True, 0.0),
        ("", True, 0.0),
        ("= 42.", True, 0.0),
    ],
)
def test_reward_is_for_the_exact_final_answer(response: str, ended: bool, reward: float) -> None:
    ids = [*TASK.tokenizer.encode(response), *([TASK.tokenizer.eos_id] if ended else [])]
    assert TASK.reward(PROBLEM, ids) == reward


def test_what_follows_the_end_of_sequence_does_not_count() -> None:
    end = TASK.tokenizer.eos_id
    assert TASK.reward(PROBLEM, [*TASK.tokenizer.encode("=42."), end, *TASK.tokenizer.encode("=1.")]) == 1.0
    assert TASK.reward(PROBLEM, [*TASK.tokenizer.encode("=1."), end, *TASK.tokenizer.encode("=42.")]) == 0.0


@given(st.lists(st.integers(min_value=-3, max_value=70), max_size=30))
def test_any_tokens_are_scored(ids: list[int]) -> None:
    assert TASK.reward(PROBLEM, ids) in (0.0, 1.0)


def test_splits_share_no_chain_of_numbers_whatever_the_words_and_the_seed() -> None:
    small = ArithmeticSection(operands=2, max_operand=20, ops=("+",), word_problem_fraction=0.5)
    tasks = [make(small, seed=seed, train_problems=300, heldout_problems=40) for seed in (0, 1, 2)]
    trained = {tuple(terms(problem.prompt_text)) for task in tasks for problem in task.pool.train}
    heldout = {tuple(terms(problem.prompt_text)) for task in tasks for problem in task.pool.heldout}
    assert len(trained) > 150
    assert len(heldout) > 20
    assert not trained & heldout


def test_prompts_are_distinct() -> None:
    assert len({problem.prompt_text for problem in EVERY}) == len(EVERY) == 800
    assert [problem.problem_id for problem in TASK.heldout_problems()] == list(range(200))


def test_the_seed_decides_everything() -> None:
    assert make().pool == TASK.pool
    assert make(seed=1).pool.train != TASK.pool.train


def test_first_problems_of_seed_0_stay_what_they_are() -> None:
    task = make(ArithmeticSection(), train_problems=8192, heldout_problems=512)
    assert [(p.prompt_text, p.solution_text) for p in task.train_problems(start=0, count=2)] == [
        ("90+88+60=", "90+88=178,178+60=238."),
        ("7+62+41=", "7+62=69,69+41=110."),
    ]
    assert [p.prompt_text for p in task.heldout_problems(2)] == ["45+56+56=", "eva has 91, buys 16, gets 10. total?"]


def test_stream_is_a_pure_function_of_the_position() -> None:
    whole = TASK.train_problems(start=0, count=1500)
    assert TASK.train_problems(start=590, count=30) == whole[590:620]
    for epoch in (whole[:600], whole[600:1200]):
        assert sorted(problem.problem_id for problem in epoch) == list(range(600))
    assert whole[:600] != whole[600:1200]


def test_heldout_problems_can_be_cut() -> None:
    assert TASK.heldout_problems(5) == TASK.heldout_problems()[:5]
    assert len(TASK.heldout_problems()) == 200


def test_supervised_batch_lays_out_prompt_solution_and_end() -> None:
    problems = TASK.train_problems(start=0, count=3)
    batch = TASK.supervised_batch(problems, sequence_length=96)
    assert batch.tokens.shape == batch.response_mask.shape == (3, 96)
    assert batch.tokens.dtype == np.int64
    for row, problem in enumerate(problems):
        length = int(batch.lengths[row])
        text = TASK.tokenizer.decode(batch.tokens[row, 1 : length - 1])
        assert text == problem.prompt_text + problem.solution_text
        assert batch.tokens[row, 0] == TASK.tokenizer.bos_id
        assert batch.tokens[row, length - 1] == TASK.tokenizer.eos_id
        assert (batch.tokens[row, length:] == TASK.tokenizer.pad_id).all()
        response = batch.tokens[row][batch.response_mask[row]]
        assert TASK.tokenizer.decode(response[:-1]) == problem.solution_text
        assert response[-1] == TASK.tokenizer.eos_id


def test_supervised_batch_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"sequence_length=8: problem .* use at least"):
        TASK.supervised_batch(TASK.train_problems(start=0, count=1), sequence_length=8)


@pytest.mark.parametrize("ops", [("+",), ("-",), ("+", "-")])
@pytest.mark.parametrize(("operands", "max_operand"), [(2, 99), (3, 99), (6, 9), (4, 9999)])
def test_length_bounds_hold(ops: tuple[str, ...], operands: int, max_operand: int) -> None:
    settings = ArithmeticSection.model_validate(
        {"operands": operands, "max_operand": max_operand, "ops": ops, "word_problem_fraction": 0.5}
    )
    prompt, solution = longest_prompt(settings), longest_solution(settings)
    task = make(settings, train_problems=300, heldout_problems=30, max_prompt_tokens=prompt, max_new_tokens=solution)
    problems = [*task.pool.train, *task.pool.heldout]
    assert max(len(problem.prompt_ids) for problem in problems) <= prompt
    assert max(len(problem.solution_text) + 1 for problem in problems) <= solution
    if ops == ("+",) and operands <= 3:
        assert max(len(problem.prompt_ids) for problem in problems) == prompt
        assert max(len(problem.solution_text) + 1 for problem in problems) == solution


def test_verbs_are_equally_long_so_that_the_bound_is_one_number() -> None:
    assert {len(verb) for verbs in _VERBS.values() for verb in verbs} == {4}


def test_limits_too_small_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make(ArithmeticSection(), max_prompt_tokens=36, max_new_tokens=21)
    assert caught.value.problems == (
        "task.max_prompt_tokens=36: the longest problem of task.arithmetic takes 37 tokens; use at least 37",
        "rollout.max_new_tokens=21: the longest solution of task.arithmetic takes 22 tokens; use at least 22",
    )


def test_a_source_too_small_is_refused() -> None:
    small = ArithmeticSection(operands=2, max_operand=9, word_problem_fraction=0.0)
    with pytest.raises(
        ConfigError, match=r"^task\.train_problems=500: the source has only \d\d distinct ones; use at most \d\d"
    ):
        make(small, train_problems=500, heldout_problems=1)


def test_a_vocabulary_too_small_is_refused(tiny_config_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_task(load(tiny_config_path, ["model.vocab_size=32", "task.train_problems=16", "task.heldout_problems=64"]))
    assert str(caught.value) == "model.vocab_size=32: the tokenizer of task.name=arithmetic has 46 ids; use at least 64"
