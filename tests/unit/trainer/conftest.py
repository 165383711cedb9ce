"""Tests of this folder build Megatron-core models: it is made ready before any test module imports it."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.platform.device import prepare_megatron

prepare_megatron()


@pytest.fixture(autouse=True)
def process_group(lone_process: None) -> None:
    """Every test here runs in a process group of one and draws the same random tensors each time."""
    torch.manual_seed(0)
