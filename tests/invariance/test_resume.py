"""The real loop, interrupted and resumed in a new process: metrics and final weights of a run that was never interrupted."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launching import launch, metrics, small_config

pytestmark = pytest.mark.dist  # starts processes, though one at a time

DTYPES = ["float32", "bfloat16"]
WARMUP, STEPS, HALF = 60, 4, 2
MANY = ("algorithm.samples_per_prompt=16",)
"""Samples enough that in some prompt not all rewards are equal, or nothing would be trained."""


@dataclass
class Parts:
    """Directories of a run of ``STEPS`` steps and of one that was resumed from its checkpoint after ``HALF`` of them."""

    whole: Path
    resumed: Path


def run_both(root: Path, dtype: str) -> Parts:
    config = small_config(root)
    settings = (f"precision.compute_dtype={dtype}", f"checkpoint.interval={HALF}", "evaluation.interval=1", *MANY)
    done = launch(config, *settings, "run.name=whole")
    assert done.returncode == 0, done.stderr[-3000:]
    # What a machine that dies after step 3 leaves behind: a checkpoint of step 2, metrics up to step 3 and half a line.
    whole, resumed = root / "whole", root / "resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / checkpoint_name(HALF), resumed / "checkpoints" / checkpoint_name(HALF))
    (resumed / "checkpoints" / f".{checkpoint_name(3)}.partial").mkdir()
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(lines[: WARMUP + 3]) + lines[WARMUP + 3][:40])
    done = launch(config, *settings, "run.name=resumed", "checkpoint.resume=true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed from {resumed / 'checkpoints' / checkpoint_name(HALF)}" in done.stdout
    return Parts(whole, resumed)


def checkpoint_name(step: int) -> str:
    return f"step_{WARMUP + step:06d}"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    roots = {dtype: tmp_path_factory.mktemp(dtype) for dtype in DTYPES}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(DTYPES, pool.map(run_both, roots.values(), DTYPES), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_metrics_of_every_step_are_equal_and_stand_once(parts, dtype: str) -> None:
    whole, resumed = metrics(parts[dtype].whole), metrics(parts[dtype].resumed)
    assert [(m["phase"], m["step"]) for m in whole] == [("warmup", i + 1) for i in range(WARMUP)] + [
        ("rl", i + 1) for i in range(STEPS)
    ]
    assert resumed == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_steps_compared_really_train(parts, dtype: str) -> None:
    steps = [m for m in metrics(parts[dtype].whole) if m["phase"] == "rl"]
    assert any(m["grad_norm"] > 0 for m in steps[:HALF]) and any(m["grad_norm"] > 0 for m in steps[HALF:])
    assert [m["version"] for m in steps] == [WARMUP + 2 * (i + 1) for i in range(STEPS)]
    assert any(m["policy"]["dlogp_mean"] > 0 for m in steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_checkpoints_are_equal_bit_for_bit(parts, dtype: str) -> None:
    paths = [directory / "checkpoints" / checkpoint_name(STEPS) for directory in (parts[dtype].whole, parts[dtype].resumed)]
    one, other = (torch.load(path / "rank_0.pt", weights_only=True) for path in paths)
    assert one.keys() == other.keys() == {"weights", "optimizers", "version", "kv_amax", "rng"}
    assert_equal_trees(one, other)
    manifests = [json.loads((path / "manifest.json").read_text()) for path in paths]
    for manifest in manifests:
        assert manifest["progress"].pop("seconds") > 0
    assert manifests[0] == manifests[1] and manifests[0]["progress"]["step"] == STEPS
    halfway = torch.load(parts[dtype].whole / "checkpoints" / checkpoint_name(HALF) / "rank_0.pt", weights_only=True)
    assert not torch.equal(halfway["weights"]["output_layer.weight"], one["weights"]["output_layer.weight"])


def assert_equal_trees(a: object, b: object, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype is b.dtype and torch.equal(a, b), path  # type: ignore[union-attr]
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path  # type: ignore[union-attr]
        for key, value in a.items():
            assert_equal_trees(value, b[key], f"{path}/{key}")  # type: ignore[index]
    elif isinstance(a, list):
        assert len(a) == len(b), path  # type: ignore[arg-type]
        for i, (x, y) in enumerate(zip(a, b, strict=True)):  # type: ignore[call-overload]
            assert_equal_trees(x, y, f"{path}[{i}]")
    else:
        assert a == b, path
