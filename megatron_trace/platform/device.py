"""Where CPU and CUDA part: device, process-group backend, and the context every Megatron-core call runs in."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

_megatron_ready = False


def on_cpu() -> bool:
    """Whether this machine runs without CUDA."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    """This process's device."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def prepare_megatron() -> None:
    """Make ``import megatron.core`` work here (CPU stand-ins where needed). Idempotent."""
    global _megatron_ready
    if _megatron_ready:
        return
    if on_cpu():
        from megatron_trace.platform import cpu

        cpu.install()
        import megatron.core  # noqa: F401  (the stand-ins must be in place first)

        cpu.patch_megatron()
    _megatron_ready = True


def megatron_context() -> AbstractContextManager[object]:
    """The context in which Megatron-core builds, runs and steps; on CUDA nothing is needed."""
    if not on_cpu():
        return contextlib.nullcontext()
    from megatron_trace.platform.cpu import MegatronOnCpu

    return MegatronOnCpu()


def init_process_group(*, timeout_s: float = 600.0) -> tuple[int, int]:
    """Join torchrun's process group (gloo on CPU, NCCL on CUDA); a lone process is a group of one. Returns (rank, world)."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    alone = "MASTER_PORT" not in os.environ
    if not torch.distributed.is_initialized():
        if not on_cpu():
            torch.cuda.set_device(device())
        backend = "gloo" if on_cpu() else "nccl"
        if alone:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def leave_process_group() -> None:
    """Leave the process group, if one was joined, without waiting for the others."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
