"""The run's record: JSON lines, phases, silence off the main rank, plain lines without a terminal, summary and table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_trace.diagnostics.memory import PeakMemory
from megatron_trace.diagnostics.run_log import RunLog


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_every_record_is_one_json_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "a" / "run", main=True)
    log.write({"step": 1, "reward": 0.5})
    log.write({"step": 2, "note": "two\nlines"})
    assert lines(tmp_path / "a" / "run") == [{"step": 1, "reward": 0.5}, {"step": 2, "note": "two\nlines"}]


def test_a_new_run_starts_empty_and_a_resumed_one_appends(tmp_path: Path) -> None:
    RunLog(tmp_path, main=True).write({"step": 1})
    RunLog(tmp_path, main=True, append=True).write({"step": 2})
    assert [record["step"] for record in lines(tmp_path)] == [1, 2]
    RunLog(tmp_path, main=True)
    assert lines(tmp_path) == []


def test_other_ranks_touch_no_file_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path / "run", main=False)
    log.write({"step": 1})
    log.say("hello")
    log.summary({"a": 1}, table=[("a", "1")])
    with log.progress("rl", total=2) as line:
        line.advance("note")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_phases_add_up_and_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    log = RunLog(tmp_path, main=True)
    with log.phase("train"):
        pass
    with log.phase("train"):
        pass
    with pytest.raises(RuntimeError), log.phase("refit"):
        raise RuntimeError
    assert log.take_phases() == {"train": 2.75, "refit": 1.0}
    assert log.take_phases() == {}


def test_without_a_terminal_progress_is_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, main=True)
    with log.progress("rl", total=3, done=1) as line:
        line.advance("step 2/3")
        line.advance("step 3/3 hidden", show=False)
    assert capsys.readouterr().out == "step 2/3\n"


def test_summary_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, main=True)
    log.summary({"accuracy_final": 0.75, "evidence": []}, table=[("held-out accuracy", "0.7500")])
    assert json.loads((tmp_path / "summary.json").read_text()) == {"accuracy_final": 0.75, "evidence": []}
    assert re.search(r"held-out accuracy\s*\S\s*0\.7500", capsys.readouterr().out)


def test_peak_memory_is_a_high_water_mark() -> None:
    memory = PeakMemory()
    before = memory.gib()
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    grown = memory.gib()
    del block
    assert 0.01 < before <= grown == memory.gib()
    with open("/proc/self/status") as status:
        peak_kib = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    assert memory.gib() == pytest.approx(peak_kib / 2**20, rel=0.02)


def test_records_of_steps_that_will_be_repeated_are_dropped_and_so_is_half_a_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path, main=True)
    for step in (1, 2, 3):
        log.write({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    RunLog(tmp_path, main=False).keep(lambda record: False)
    again = RunLog(tmp_path, main=True, append=True)
    again.keep(lambda record: record["step"] <= 2)
    again.write({"step": 3, "again": True})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    RunLog(tmp_path / "nothing yet", main=True, append=True).keep(lambda record: True)
