"""Where the independent oracles come from: installed packages, or a directory named by MEGATRON_TRACE_ORACLES.

That directory has ``te/`` (``pip install --no-deps --target te transformer-engine==2.20.2``: read as files, never imported,
since without its core the package raises at import) and ``peers/`` (nvidia-modelopt, torchao, compressed-tensors and what
they import).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

ROOT = os.environ.get("MEGATRON_TRACE_ORACLES")


def peer(module: str) -> Any:
    """Import ``module``, from peers/ too; skips with the reason where it is absent."""
    extra = str(Path(ROOT) / "peers") if ROOT else None
    if extra:
        sys.path.append(extra)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"oracle {module} not importable: {error}")
    finally:
        if extra:
            sys.path.remove(extra)


def _reference_file() -> Path:
    roots = [Path(ROOT) / "te" / "transformer_engine"] if ROOT else []
    spec = importlib.util.find_spec("transformer_engine")
    if spec is not None and spec.submodule_search_locations:
        roots += [Path(p) for p in spec.submodule_search_locations]
    for root in roots:
        path = root / "pytorch" / "custom_recipes" / "reference_nvfp4.py"
        if path.exists():
            return path
    pytest.skip("Transformer Engine's reference_nvfp4.py not found: install transformer-engine or set MEGATRON_TRACE_ORACLES")


def transformer_engine_reference() -> Any:
    """Transformer Engine's reference module, executed from its file with stand-ins for the three modules it imports."""
    path = _reference_file()
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.custom_recipes")
    saved = {n: sys.modules.get(n) for n in sys.modules if n == "transformer_engine" or n.startswith("transformer_engine.")}
    fakes = {n: types.ModuleType(n) for n in names}
    utils = _load("transformer_engine.pytorch.custom_recipes.reference_utils", path.with_name("reference_utils.py"))
    base = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    base.QuantizedTensorStorage = type("QuantizedTensorStorage", (), {})  # type: ignore[attr-defined]
    base.Quantizer = _Quantizer  # type: ignore[attr-defined]
    fakes[names[2]].gemm = MagicMock(name="gemm")  # type: ignore[attr-defined]
    fakes[names[2]].reference_utils = utils  # type: ignore[attr-defined]
    try:
        sys.modules.update(fakes)
        sys.modules["transformer_engine.pytorch.quantized_tensor"] = base
        return _load("megatron_trace_tests_te_reference", path)
    finally:
        for name in [*names, "transformer_engine.pytorch.quantized_tensor"]:
            sys.modules.pop(name, None)
        sys.modules.update({n: m for n, m in saved.items() if m is not None})


class _Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(name, None)
    return module


def inputs() -> dict[str, torch.Tensor]:
    """float32 [32, 128] tensors from easy to hostile."""
    g = torch.Generator().manual_seed(7)
    normal = torch.randn(32, 128, generator=g)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    edges = torch.cat([s * e for s in (1, -1) for e in (ties, ties * (1 + 2**-23), ties * (1 - 2**-24))])
    tie_rows = edges[torch.randint(0, len(edges), (32, 128), generator=g)]
    tie_rows[:, ::16] = 6.0
    single = torch.zeros(32, 128)
    single[5, 77] = -3.25
    wide = normal * torch.logspace(-6, 6, 8).repeat_interleave(16)
    signed_zero = torch.where(torch.rand(32, 128, generator=g) < 0.4, torch.tensor(-0.0), normal)
    return {
        "normal": normal,
        "heavy": normal / torch.rand(32, 128, generator=g).clamp_min(1e-3) ** 2,
        "ties": tie_rows,
        "single": single,
        "zeros": torch.zeros(32, 128),
        "signed_zero": signed_zero,
        "wide": wide,
        "underflow": normal * torch.where(torch.arange(128) < 16, 1.0, 1e-7),
        "subnormal": normal * 1e-40,
        "tiny": normal * 1e-36,
    }
