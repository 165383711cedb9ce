"""Bad input to the main job: one line on stderr, exit code 2, and nothing built or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import launch, small_config
from processes import ROOT, environment

BEFORE_ANYTHING = {
    "rollout.topp=0.5": "error: rollout.topp=0.5: unknown key; did you mean rollout.top_p?",
    "trainer.steps=many": "error: trainer.steps='many': must be an integer",
    "model.num_experts=0": "error: model.num_experts=0: must be greater than 0",
    "parallel.expert=3": "error: parallel.expert=3: must divide model.num_experts=4; use one of 1, 2, 4",
    "parallel.expert=2": "error: parallel.expert=2: must divide the world size 1; start a multiple of 2 processes or set "
    "parallel.expert to a divisor of 1",
    "rollout.top_p=0.9": "error: rollout.top_p=0.9: importance sampling (algorithm.objective=tis) needs the whole "
    "distribution, and nucleus sampling cuts it; use rollout.top_p=1.0 or algorithm.objective=naive_proximal",
    "model.hidden_size=40": "error: model.hidden_size=40: must be a multiple of 16 (one NVFP4 block); use 48",
    "run.name": "error: run.name: not an override; write section.key=value",
}
ONCE_THE_TASK_IS_KNOWN = {
    "model.vocab_size=16": "error: model.vocab_size=16: the tokenizer of task.name=arithmetic has 46 ids; use at least 64",
    "checkpoint.resume=true": "error: checkpoint.resume=true: {out}/small/checkpoints holds no complete checkpoint; use false "
    "to start anew",
    "checkpoint.directory={out}/small.yaml": "error: checkpoint.directory={out}/small.yaml: {out}/small.yaml cannot be made "
    "(File exists); name a writable directory",
    "run.output_dir={out}/small.yaml": "error: run.output_dir={out}/small.yaml: {out}/small.yaml/small cannot be made (Not a "
    "directory); name a writable directory",
}

WITHOUT_MODELS = """
import contextlib, io, json, runpy, sys
from megatron_trace.platform.device import prepare_megatron
prepare_megatron()
import megatron_trace.trainer.megatron as megatron

def built(*_):
    raise SystemExit("a model was built")

megatron.MegatronTrainer.__init__ = built
results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, err = arguments, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            results.append([end.code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""
"""Runs the launcher several times in one process in which building a model ends it with another code."""


@pytest.fixture(scope="module")
def late_refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[object]]]:
    """Exit code, stdout and stderr of each bad override and of one good one, each in a directory of its own."""
    directories = {o: tmp_path_factory.mktemp("refused") for o in (*ONCE_THE_TASK_IS_KNOWN, "run.seed=1")}
    starts = []
    for override, out in directories.items():
        given = [override.format(out=out)]
        if not override.startswith("run.output_dir"):
            given.append(f"run.output_dir={out}")
        starts.append([str(ROOT / "launch" / "pretrain_rl.py"), "--config", str(small_config(out)), *given])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MODELS, json.dumps(starts)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    results = json.loads(done.stdout)
    return {override: (out, result) for (override, out), result in zip(directories.items(), results, strict=True)}


@pytest.mark.parametrize(("override", "line"), BEFORE_ANYTHING.items(), ids=list(BEFORE_ANYTHING))
def test_a_setting_that_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, override: str, line: str) -> None:
    done = launch(small_config(tmp_path), override)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}\n")
    assert [p.name for p in tmp_path.rglob("*")] == ["small.yaml"], "nothing is written"


@pytest.mark.parametrize(("override", "line"), ONCE_THE_TASK_IS_KNOWN.items(), ids=list(ONCE_THE_TASK_IS_KNOWN))
def test_what_is_found_later_is_refused_alike_and_before_any_model_is_built(late_refusals, override: str, line: str) -> None:
    out, (code, stdout, stderr) = late_refusals[override]
    assert (code, stdout) == (2, "") and stderr.endswith(line.format(out=out) + "\n")
    assert stderr.count("error: ") == 1 and "Traceback" not in stderr
    assert [p.name for p in out.rglob("*") if p.is_file()] == ["small.yaml"], "nothing is written"


def test_the_same_start_without_the_error_goes_on_to_build_a_model(late_refusals) -> None:
    assert late_refusals["run.seed=1"][1][0] == "a model was built"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path / "absent.yaml")
    line = f"error: {tmp_path}/absent.yaml: cannot be read (No such file or directory); give the path of a YAML file\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_several_problems_are_a_line_each_and_only_rank_0_speaks(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    done = launch(config, "parallel.expert=3", "rollout.top_p=0.5")
    assert done.returncode == 2 and [line[:22] for line in done.stderr.splitlines()] == [
        "error: parallel.expert",
        "error: rollout.top_p=0",
    ]
    rank_1 = environment() | {"RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "pretrain_rl.py"), "--config", str(config), "parallel.expert=3"],
        env=rank_1,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_quickstart_checks_the_configuration_before_torchrun(repository: Path) -> None:
    """torchrun would bury the line and turn code 2 into 1."""
    lines = (repository / "tools" / "quickstart.sh").read_text().splitlines()
    check, start = (
        next(i for i, line in enumerate(lines) if text in line) for text in ("-m megatron_trace.config ", "torchrun --")
    )
    assert check < start and os.access(repository / "tools" / "quickstart.sh", os.R_OK)
