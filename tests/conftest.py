"""Settings shared by all tests: one thread (the cores are for processes), fast tests first, no property-test deadline."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:  # read by Triton when it is first imported, which Megatron-core may do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Helper modules (``trainers``, ``processes``; ``tiny`` of the engine tests) are importable whatever pytest's import mode.
sys.path[:0] = [str(Path(__file__).parent / room) for room in ("support", "engine")]

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def _tier(item: pytest.Item) -> int:
    """0: fast, in process; 1: several processes or another engine; 2: slow."""
    if item.get_closest_marker("slow"):
        return 2
    return 1 if any(item.get_closest_marker(name) for name in ("dist", "sglang", "ray", "gpu")) else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, the order inside a tier unchanged."""
    items.sort(key=_tier)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def lone_process() -> None:
    """This process as a process group of one, with Megatron-core ready to run in it."""
    import torch

    from megatron_trace.platform.device import init_process_group, prepare_megatron

    torch.set_num_threads(1)
    prepare_megatron()
    init_process_group()


@pytest.fixture(scope="session")
def tiny_config_path(repository: Path) -> Path:
    """The shipped configuration of the main job."""
    return repository / "configs" / "tiny_moe_cpu.yaml"
