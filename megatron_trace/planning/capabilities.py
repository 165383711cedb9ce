"""What this machine can do, found by trying it: a package's name alone proves nothing (``tools/env.py`` prints the report).

The name apex on the package index is a web toolkit; a bare transformer-engine raises RuntimeError where it should raise
ImportError; an installed kernel library may not load. So every entry is the import, or the attribute, that is really used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Capability:
    """One thing a run may use. ``detail`` is its version where present, and else why not."""

    name: str
    present: bool
    detail: str
    needed_for: str


def load(module: str) -> ModuleType | str:
    """The module, or in one line why it cannot be used."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (a bare transformer-engine raises RuntimeError, a missing library OSError)
        first = str(error).strip().splitlines()
        return f"{type(error).__name__}: {first[0] if first else 'no message'}"


def version(distribution: str) -> str:
    """Installed version of ``distribution``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def probe() -> list[Capability]:
    """Every capability, in the order of the report."""
    found = [Capability("Python", True, sys.version.split()[0], "everything")]
    found += [check() for check in _CHECKS]
    return found


def _module(name: str, module: str, distribution: str, needed_for: str) -> Capability:
    loaded = load(module)
    present = isinstance(loaded, ModuleType)
    return Capability(name, present, version(distribution) if present else str(loaded), needed_for)


def _torch() -> Capability:
    return _module("PyTorch", "torch", "torch", "everything but configuration and planning")


def _cuda() -> Capability:
    torch = load("torch")
    if isinstance(torch, str):
        return Capability("CUDA device", False, torch, "GPU runs")
    if not torch.cuda.is_available():
        return Capability("CUDA device", False, "torch.cuda.is_available() is False", "GPU runs")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Capability("CUDA device", True, f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}", "GPU runs")


def _compute_capability() -> tuple[int, int] | str:
    torch = load("torch")
    if isinstance(torch, str):
        return torch
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def _fp8() -> Capability:
    return _tensor_cores("FP8 tensor cores", (8, 9), "Transformer Engine recipes")


def _fp4() -> Capability:
    return _tensor_cores("FP4 tensor cores", (10, 0), "native NVFP4 GEMM and KV (elsewhere NVFP4 is emulated)")


def _tensor_cores(name: str, least: tuple[int, int], needed_for: str) -> Capability:
    found = _compute_capability()
    if isinstance(found, str):
        return Capability(name, False, found, needed_for)
    wanted = f"{least[0]}.{least[1]}"
    return Capability(name, found >= least, f"compute capability {found[0]}.{found[1]}, needs {wanted}", needed_for)


def _nccl() -> Capability:
    torch = load("torch")
    if isinstance(torch, str):
        return Capability("NCCL", False, torch, "GPU runs over several devices")
    if not torch.distributed.is_nccl_available():
        return Capability("NCCL", False, "this PyTorch was built without it", "GPU runs over several devices")
    return Capability("NCCL", True, ".".join(map(str, torch.cuda.nccl.version())), "GPU runs over several devices")


def _gloo() -> Capability:
    torch = load("torch")
    present = not isinstance(torch, str) and torch.distributed.is_gloo_available()
    return Capability("gloo", present, "in PyTorch" if present else "not in this PyTorch", "CPU runs and the preflight")


def _megatron() -> Capability:
    return _module("Megatron-core", "megatron.core.package_info", "megatron-core", "training")


def _transformer_engine() -> Capability:
    return _module("Transformer Engine", "transformer_engine.pytorch", "transformer-engine", "native FP8 and NVFP4 modules")


def _apex() -> Capability:
    """NVIDIA apex's fused optimiser and its two compiled extensions."""
    needed_for = "Megatron-core's fused optimiser and gradient accumulation where Transformer Engine is absent"
    parts = {"apex.optimizers": "FusedAdam", "amp_C": None, "fused_weight_gradient_mlp_cuda": None}
    missing = []
    for module, attribute in parts.items():
        loaded = load(module)
        if isinstance(loaded, str) or (attribute and not hasattr(loaded, attribute)):
            missing.append(f"{module}.{attribute}" if attribute else module)
    if not missing:
        return Capability("NVIDIA apex", True, "FusedAdam, amp_C, fused_weight_gradient_mlp_cuda", needed_for)
    named = isinstance(load("apex"), ModuleType)
    why = f"lacks {', '.join(missing)}" if named else "not installed"
    if named and len(missing) == len(parts):
        why = "a package named apex is installed, but it is not NVIDIA's"
    return Capability("NVIDIA apex", False, why, needed_for)


def _triton() -> Capability:
    return _module("Triton", "triton", "triton", "the project's own kernels on a GPU")


def _sglang() -> Capability:
    return _module("SGLang", "sglang", "sglang", "rollout.engine=sglang")


def _modelopt() -> Capability:
    return _module("ModelOpt", "modelopt.torch.quantization", "nvidia-modelopt", "quantised checkpoints")


def _ray() -> Capability:
    return _module("Ray", "ray", "ray", "rollout.placement=ray")


def _commands() -> Capability:
    names = [name for name in ("torchrun", "sbatch", "ray", "kubectl", "nvidia-smi") if shutil.which(name)]
    return Capability("commands on PATH", bool(names), ", ".join(names) or "none of those looked for", "launching")


_CHECKS: tuple[Callable[[], Capability], ...] = (
    _torch,
    _cuda,
    _fp8,
    _fp4,
    _nccl,
    _gloo,
    _megatron,
    _transformer_engine,
    _apex,
    _triton,
    _sglang,
    _modelopt,
    _ray,
    _commands,
)
