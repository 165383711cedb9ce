"""SIGTERM and Ctrl-C while torchrun runs the main job: a checkpoint is written, nothing is left running, and it can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import command, launch, metrics, small_config
from processes import ROOT, environment, free_port

pytestmark = pytest.mark.slow
ENDLESS = ("trainer.steps=100000", "warmup.steps=5")


def torchrun(config: Path, *overrides: str) -> list[str]:
    """Two processes. torchrun answers a failed worker with its own code 1: only a lone process shows 2, 130 or 143."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return [*start, str(ROOT / "launch" / "pretrain_rl.py"), "--config", str(config), *overrides]


def wait_for_step(directory: Path, process: subprocess.Popen[str], *, phase: str = "rl", step: int = 2) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        path = directory / "metrics.jsonl"
        if path.exists() and f'"phase": "{phase}", "step": {step},' in path.read_text():
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"no {phase} step {step} within four minutes")


def running_under(directory: Path) -> list[str]:
    """Command lines of live processes that name ``directory``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_of_two_stops_with_a_checkpoint_and_no_process_left(tmp_path: Path, number: signal.Signals) -> None:
    config = small_config(tmp_path)
    settings = (f"run.output_dir={tmp_path}", "parallel.expert=2", "trainer.micro_batch_size=4", *ENDLESS)
    process = subprocess.Popen(
        torchrun(config, *settings),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_step(tmp_path / "small", process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0, "an interrupted run must not look finished"
    steps = [m["step"] for m in metrics(tmp_path / "small") if m["phase"] == "rl"]
    saved = tmp_path / "small" / "checkpoints" / f"step_{5 + steps[-1]:06d}"
    assert f"{number.name}: checkpoint written to {saved}; continue with checkpoint.resume=true" in out
    assert sorted(p.name for p in saved.iterdir()) == ["manifest.json", "rank_0.pt", "rank_1.pt"]
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    assert running_under(tmp_path) == []
    if number is signal.SIGTERM:
        more = (f"trainer.steps={steps[-1] + 1}", "checkpoint.resume=true")
        again = subprocess.run(torchrun(config, *settings[:-2], *ENDLESS[1:], *more), env=environment(), timeout=120)
        assert again.returncode == 0
        assert [m["step"] for m in metrics(tmp_path / "small") if m["phase"] == "rl"] == [*steps, steps[-1] + 1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_one_process_exits_with_the_code_of_the_signal_and_goes_on_where_it_was(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    config = small_config(tmp_path)
    process = subprocess.Popen(
        command(config, f"run.output_dir={tmp_path}", *ENDLESS),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path / "small", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code and f"{number.name}: checkpoint written to" in out and "Traceback" not in err
    before = metrics(tmp_path / "small")
    last = before[-1]["step"]
    again = launch(config, *ENDLESS[1:], f"trainer.steps={last + 1}", "checkpoint.resume=true")
    assert again.returncode == 0, again.stderr[-3000:]
    after = metrics(tmp_path / "small")
    assert after[: len(before)] == before and [m["step"] for m in after[len(before) :]] == [last + 1]


def test_a_stop_during_the_warm_up_resumes_in_the_warm_up(tmp_path: Path) -> None:
    """And ends with the warm-up losses of a run that was never stopped."""
    config = small_config(tmp_path)
    long = ("warmup.steps=400", "trainer.steps=0")
    process = subprocess.Popen(
        command(config, f"run.output_dir={tmp_path}", *long),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path / "small", process, phase="warmup", step=20)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    stopped_at = metrics(tmp_path / "small")[-1]["step"]
    assert process.returncode == 143 and 20 <= stopped_at < 400
    assert launch(config, *long, "checkpoint.resume=true").returncode == 0
    assert launch(config, *long, "run.name=whole").returncode == 0
    assert metrics(tmp_path / "small") == metrics(tmp_path / "whole") and len(metrics(tmp_path / "whole")) == 400
