"""``tools/report.py`` and ``tools/replay_mismatch.py`` as commands."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from synthetic_runs import write_run


def tool(repository: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", repository / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_is_written_beside_the_run(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert tool(repository, "report").main([str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<h1>healthy</h1>" in text
    assert f"report written to {run / 'report.html'}" in capsys.readouterr().out
    assert len(text) < 300_000


def test_json_holds_what_the_report_shows(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "both.html"
    runs = [str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b", steps=5, finished=False))]
    assert tool(repository, "report").main([*runs, "--output", str(output), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["output"] == str(output) and values["errors"] == []
    assert [run["finished"] for run in values["runs"]] == [True, False]
    assert values["runs"][1]["findings"][0]["code"] == "interrupted"
    assert "Settings that differ" in output.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report", "replay_mismatch"])
def test_what_is_no_run_is_refused_with_code_two(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    for directory, words in ((tmp_path / "none", "no such directory"), (tmp_path / "empty", "holds neither")):
        assert tool(repository, name).main([str(directory), "--json"]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: {directory}") and words in captured.err
        assert json.loads(captured.out)["errors"] == [captured.err.removeprefix("error: ").rstrip()]


def test_outputs_that_cannot_be_written_are_refused(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, report = str(write_run(tmp_path / "run")), tool(repository, "report")
    assert report.main([run, run]) == 2
    assert "--output: name the file" in capsys.readouterr().err
    assert report.main([run, "--output", str(tmp_path / "no" / "such" / "file.html")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_replay_prints_tables_and_says_what_was_not_measured(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path))
    assert tool(repository, "replay_mismatch").main([run, "--updates-newer", "2"]) == 0
    text = capsys.readouterr().out
    assert "a policy 2 updates newer" in text and "same weights" not in text
    assert "share* guided" in text and "by switching sites on one at a time were not measured" in text
    assert "1.0% of codes differ to nearest, 100% of them by one codeword" in text


def test_replay_shows_site_switches_where_they_were_measured(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(values: dict) -> None:
        switch = {"layer": 0, "site": "k", "dlogp_mean_alone": 0.00912, "dlogp_mean_without": 0.00234}
        values["evidence"][1]["site_switches"] = [switch]

    run = str(write_run(tmp_path, change_summary=change))
    replay = tool(repository, "replay_mismatch")
    assert replay.main([run, "--updates-newer", "0"]) == 0
    text = capsys.readouterr().out
    assert "0.00912" in text and "0.00234" in text and "not measured" not in text
    assert replay.main([run, "--json"]) == 0
    fresh = json.loads(capsys.readouterr().out)["evidence"][0]
    assert [s["dlogp_alone"] for s in fresh["sites"] if s["dlogp_alone"] is not None] == [0.00912]


def test_replay_without_evidence_is_refused(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path, finished=False))
    assert tool(repository, "replay_mismatch").main([run]) == 2
    assert "evidence.enabled=true" in capsys.readouterr().err


def test_both_tools_run_as_commands_without_torch(repository: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    blocked = "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
    blocked += "runpy.run_path(sys.argv[0], run_name='__main__')"
    for name in ("report", "replay_mismatch"):
        command = [sys.executable, "-c", blocked, str(repository / "tools" / f"{name}.py"), str(run), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["errors"] == []
