"""Workers of this folder, started once, and the same cases computed by this process alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.dist)


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Outcomes of all cases as seen by each rank of one torchrun of two gloo processes; a hang fails within four minutes."""
    import torch
    from processes import environment, free_port

    out = tmp_path_factory.mktemp("two_processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    worker = str(Path(__file__).with_name("worker.py"))
    done = subprocess.run([*command, worker, "cases", str(out)], env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(out / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="session")
def one_process(lone_process: None) -> dict[bool, Any]:
    """Outcome of one process that holds all experts and all samples, without and with starved experts."""
    import cases

    return {starved: cases.run(replace(cases.CASES["ep1"], starved=starved)) for starved in (False, True)}
