"""Settings shared by all tests: one thread (the machine's cores are for processes), and no deadline for property tests."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_config_path(repository: Path) -> Path:
    """The shipped configuration of the main job."""
    return repository / "configs" / "tiny_moe_cpu.yaml"
