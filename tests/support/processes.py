"""Subprocesses of tests: an environment without this process's torchrun variables, and a free port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """The caller's environment with the checkout importable, one thread per process and no process group."""
    env = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "200"}


def free_port() -> int:
    """A TCP port of the loopback device that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
