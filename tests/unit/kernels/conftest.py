"""Kernels run natively where there is a GPU and in Triton's interpreter elsewhere; the choice is made before Triton is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from megatron_trace.numerics import dispatch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Device the kernels can run on; skips with the reason where they cannot."""
    from megatron_trace.kernels import nvfp4

    reason = nvfp4.available()
    if reason is not None:
        pytest.skip(f"kernels not testable: {reason}")
    if torch.cuda.is_available():
        return "cuda"
    if not nvfp4.interpreted():
        pytest.skip("kernels not testable: Triton was imported without TRITON_INTERPRET=1 and there is no GPU")
    return "cpu"


@pytest.fixture(autouse=True)
def reference_is_eager() -> Iterator[None]:
    """On a GPU the reference functions would dispatch to the kernels under test."""
    with dispatch.prefer("eager"):
        yield
