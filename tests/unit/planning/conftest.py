"""A tiny run whose figures do not change with the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_config_path() -> Path:
    """Path of this folder's tiny run, relative to the repository's root as the commands of the tests give it."""
    return Path(__file__).parent / "tiny.yaml"
