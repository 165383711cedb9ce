"""Kernels run natively where there is a GPU and in Triton's interpreter elsewhere; the choice is made before Triton is
imported.
"""

from __future__ import annotations

import os

import pytest
import torch

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
