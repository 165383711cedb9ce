"""The reasoning-gym source: against the package where it is installed, and its refusals without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_trace.config import ConfigError, load
from megatron_trace.config.schema import ReasoningGymSection
from megatron_trace.tasks import build_task
from megatron_trace.tasks.reasoning_gym import ReasoningGymTask

SMALL = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


def make(**changes: Any) -> ReasoningGymTask:
    arguments: dict[str, Any] = {
        "settings": ReasoningGymSection(params=SMALL),
        "seed": 0,
        "train_problems": 200,
        "heldout_problems": 50,
        "max_prompt_tokens": 96,
        "max_new_tokens": 8,
    }
    return ReasoningGymTask(**(arguments | changes))


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == (
        "task.name='reasoning_gym': the package reasoning-gym is not installed; "
        "install the extra (pip install 'megatron-trace[tasks]') or use task.name=arithmetic"
    )


@pytest.fixture(scope="module")
def task() -> ReasoningGymTask:
    pytest.importorskip("reasoning_gym")
    return make()


def test_answers_agree_with_arithmetic(task: ReasoningGymTask) -> None:
    for problem in [*task.pool.train, *task.pool.heldout]:
        expression = problem.prompt_text.removesuffix("=").rsplit(":", 1)[1].split()
        total = int(expression[0])
        for sign, number in zip(expression[1::2], expression[2::2], strict=True):
            total += int(number) if sign == "+" else -int(number)
        assert problem.answer == str(total)


def test_scores_come_from_the_dataset(task: ReasoningGymTask) -> None:
    problem = task.heldout_problems(1)[0]
    right = task.tokenizer.encode(problem.answer)
    end = task.tokenizer.eos_id
    assert task.reward(problem, [*right, end]) == 1.0
    assert task.reward(problem, right) == 0.0
    for text in ("", "1x", "999999", f" {problem.answer} ", f"{problem.answer}{problem.answer}"):
        expected = task.dataset.score_answer(answer=text.strip(), entry=problem.entry)
        assert task.reward(problem, [*task.tokenizer.encode(text), end]) == expected
    assert task.reward(problem, [0, 300, -1, end]) < 1.0


def test_a_scorer_that_raises_means_a_wrong_answer(task: ReasoningGymTask, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task.heldout_problems(1)[0]
    monkeypatch.setattr(task.dataset, "score_answer", lambda answer, entry: int("not a number"))
    assert task.reward(problem, [*task.tokenizer.encode(problem.answer), task.tokenizer.eos_id]) == 0.0


def test_splits_are_disjoint_and_repeatable(task: ReasoningGymTask) -> None:
    trained = {problem.prompt_text for problem in task.pool.train}
    heldout = {problem.prompt_text for problem in task.pool.heldout}
    assert (len(trained), len(heldout)) == (200, 50)
    assert not trained & heldout
    assert {problem.prompt_text for problem in make(seed=1).pool.train}.isdisjoint(heldout)
    assert make().pool.train == task.pool.train


def test_supervised_batch_imitates_the_answer(task: ReasoningGymTask) -> None:
    problems = task.train_problems(start=0, count=2)
    batch = task.supervised_batch(problems, sequence_length=104)
    for row, problem in enumerate(problems):
        assert task.tokenizer.decode(batch.tokens[row][batch.response_mask[row]][:-1]) == problem.answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_prompt_tokens": 16}, r"^task\.max_prompt_tokens=16: a problem of the dataset takes \d+ tokens; raise it"),
        ({"max_new_tokens": 1}, r"^rollout\.max_new_tokens=1: an answer of the dataset takes \d tokens; use at least \d$"),
        (
            {"settings": ReasoningGymSection(dataset="nope")},
            r"^task\.reasoning_gym\.dataset='nope': refused by reasoning-gym \(Dataset 'nope' not registered\); mend the name",
        ),
        (
            {"settings": ReasoningGymSection(params={"min_terms": -1})},
            r"refused by reasoning-gym \(min_terms must be positive\)",
        ),
        (
            {"settings": ReasoningGymSection(params={"foo": 1})},
            r"refused by reasoning-gym \(.*unexpected keyword argument 'foo'\)",
        ),
        (
            {"settings": ReasoningGymSection(params={"seed": 1})},
            r"^task\.reasoning_gym\.params\.seed=1: set by the run; remove it$",
        ),
    ],
)
def test_refusals_are_one_line(changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


def test_a_configuration_selects_it(tiny_config_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    path = tmp_path / "gym.yaml"
    path.write_text(
        tiny_config_path.read_text().split("task:")[0]
        + "task:\n  name: reasoning_gym\n  train_problems: 64\n  heldout_problems: 16\n  max_prompt_tokens: 96\n"
        + "  reasoning_gym: {dataset: chain_sum, params: {max_terms: 2, max_digits: 1}}\n\nwarmup:"
        + tiny_config_path.read_text().split("warmup:")[1]
    )
    overrides = ["model.vocab_size=128", "trainer.sequence_length=128"]
    assert isinstance(build_task(load(path, overrides)), ReasoningGymTask)
