"""Make ``tiny`` and ``reference`` importable whatever pytest's import mode, and give tests one model and its weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny import random_weights, tiny_config  # noqa: E402

from megatron_trace.config.model import ModelConfig  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread_one_seed() -> None:
    """The machine's cores are for processes, and a test's random tensors are the same each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    """Three layers, 4 experts top-2, 4 query and 2 KV heads."""
    return tiny_config()


@pytest.fixture(scope="session")
def weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Random FP32 weights of ``model``."""
    return random_weights(model)
