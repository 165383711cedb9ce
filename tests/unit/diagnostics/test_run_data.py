"""Reading what a run left, whole or broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_runs import step_record, summary, write_run

from megatron_trace.diagnostics.run_data import NotARunError, lookup, mean, plain, read_run


def test_a_whole_run_is_read_without_a_problem(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.name, run.last_step, run.planned_steps, run.problems) == ("healthy", 40, 40, ())
    assert len(run.warmup) == 30
    assert run.series("policy.dlogp_mean")[:2] == [(1.0, 0.001 * 1.1), (2.0, 0.001 * 1.2)]
    assert [step for step, _ in run.series("accuracy")] == [10.0, 20.0, 30.0, 40.0]  # null is not recorded
    assert run.keys("sites") == ("fc1_in", "k", "v")
    assert run.total("response_tokens") == 40 * 4000
    assert run.mean("reward") == pytest.approx(0.3 + 0.005 * 20.5)


def test_a_later_line_of_the_same_step_counts_and_order_on_disk_does_not(tmp_path: Path) -> None:
    lines = [{"phase": "rl", "step": s, "reward": r} for s, r in ((2, 0.2), (1, 0.1), (2, 0.7))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_run(tmp_path).series("reward") == [(1.0, 0.1), (2.0, 0.7)]


def test_broken_lines_nan_and_a_missing_configuration_leave_the_rest_readable(tmp_path: Path) -> None:
    good = json.dumps(step_record(1))
    broken = '{"phase": "rl", "step": 2, "reward": NaN, "loss": Infinity}'
    (tmp_path / "metrics.jsonl").write_text(f'{good}\n{broken}\n[1, 2]\n\n{{"phase": "rl", "st')
    run = read_run(tmp_path)
    assert run.series("reward") == [(1.0, 0.305), (2.0, None)]
    assert run.series("loss")[1] == (2.0, None)
    assert run.name == tmp_path.name
    assert run.problems == ("config.json is missing", "metrics.jsonl: 2 lines could not be read and were left out")


def test_a_summary_of_an_earlier_run_in_the_directory_is_ignored(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, steps=7))
    assert run.summary is None
    assert "speaks of step 40, metrics.jsonl ends at step 7" in run.problems[0]


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_summary_that_is_no_object_is_named_and_ignored(tmp_path: Path, text: str) -> None:
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text(text)
    run = read_run(tmp_path)
    assert run.summary is None and run.last_step == 40
    assert run.problems[0].startswith("summary.json")


def test_a_summary_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary()))
    run = read_run(tmp_path)
    assert run.summary is not None and run.steps == ()


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (("none", "no such directory"), ("file", "is a file"), ("empty", "holds neither metrics.jsonl")):
        with pytest.raises(NotARunError, match=words) as error:
            read_run(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)


def test_small_helpers() -> None:
    assert lookup({"a": {"b": 0}}, "a.b") == 0
    assert lookup({"a": 1}, "a.b") is None
    assert mean([1.0, None, 2.0]) == 1.5
    assert mean([None]) is None
    assert plain({"a": (1, float("nan")), 2: float("inf")}) == {"a": [1, None], "2": None}
