"""Which of three equal paths runs an NVFP4 operation: eager torch, the same code through torch.compile, or Triton.

All three give the same bits, so the choice changes speed only. CUDA tensors go to Triton, CPU tensors to the eager path unless
``prefer("compiled")`` is active (compiling costs seconds per operation and dtype, needs a C++ compiler, and exists for the two
fake-quantisers, where it gains). Where the preferred path cannot run, the eager one does, and the reason is counted:
``report()`` says so. The counters are this package's only state.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

Path = Literal["eager", "compiled", "triton"]

_preferred: ContextVar[Path | None] = ContextVar("numerics_path", default=None)
_calls: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[tuple[str, str]] = Counter()


@contextmanager
def prefer(path: Path) -> Iterator[None]:
    """Within the block, run operations on ``path`` wherever it can. ``triton`` on a CPU tensor means its interpreter."""
    token = _preferred.set(path)
    try:
        yield
    finally:
        _preferred.reset(token)


def select(op: str, x: Tensor, *, unsupported: str | None, compilable: bool = False) -> Path:
    """Path for ``op`` on ``x``; ``unsupported`` says what of this call the Triton kernels cannot do (None: nothing).

    ``compilable``: whether a compiled form exists; only operations that gain from it have one.
    """
    wanted = _preferred.get()
    if wanted is None:
        wanted = "triton" if x.is_cuda else "eager"
    if wanted != "eager":
        if wanted == "compiled":
            reason = unavailable("compiled") if compilable else "no compiled form"
        else:
            reason = unsupported or unavailable("triton")
        if reason is not None:
            _fallbacks[op, reason] += 1
            wanted = "eager"
    _calls[op, wanted] += 1
    return wanted


@lru_cache(maxsize=4)
def unavailable(path: Path) -> str | None:
    """Why ``path`` cannot run on this machine, or None."""
    if path == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if path == "compiled" and shutil.which("g++") is None and shutil.which("clang++") is None:
        return "no C++ compiler"
    return None


@lru_cache(maxsize=16)
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` through torch.compile, compiled once for all shapes of a dtype and rank."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def report() -> dict[str, dict[str, int]]:
    """Calls per "operation: path", and calls sent to the eager path per "operation: reason", since ``reset``."""
    return {
        "calls": {f"{op}: {path}": n for (op, path), n in sorted(_calls.items())},
        "fallbacks": {f"{op}: {reason}": n for (op, reason), n in sorted(_fallbacks.items())},
    }


def reset() -> None:
    """Forget all counts."""
    _calls.clear()
    _fallbacks.clear()
