"""Capabilities are found by what they can do: packages that only bear the name do not count."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megatron_trace.planning import capabilities


def _apex(monkeypatch: pytest.MonkeyPatch, **modules: types.ModuleType) -> capabilities.Capability:
    for name in ("apex", "apex.optimizers", "amp_C", "fused_weight_gradient_mlp_cuda"):
        monkeypatch.setitem(sys.modules, name, modules.get(name.replace(".", "_")))
    return capabilities._apex()


def test_the_web_toolkit_named_apex_is_no_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _apex(monkeypatch, apex=types.ModuleType("apex"))
    assert (found.present, found.detail) == (False, "a package named apex is installed, but it is not NVIDIA's")


def test_apex_without_its_compiled_parts_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = object  # type: ignore[attr-defined]
    found = _apex(monkeypatch, apex=types.ModuleType("apex"), apex_optimizers=optimizers)
    assert (found.present, found.detail) == (False, "lacks amp_C, fused_weight_gradient_mlp_cuda")


def test_apex_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = object  # type: ignore[attr-defined]
    extension = types.ModuleType("extension")
    found = _apex(
        monkeypatch,
        apex=types.ModuleType("apex"),
        apex_optimizers=optimizers,
        amp_C=extension,
        fused_weight_gradient_mlp_cuda=extension,
    )
    assert found.present


def test_a_package_that_raises_anything_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare transformer-engine raises RuntimeError at import."""
    (tmp_path / "half_installed.py").write_text("raise RuntimeError('Found empty meta package\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert capabilities.load("half_installed") == "RuntimeError: Found empty meta package"


def test_the_report_covers_what_the_design_depends_on(repository: Path) -> None:
    """In a process of its own: trying a package imports it."""
    command = [sys.executable, "-W", "ignore", "tools/env.py", "--json"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    names = {item["name"]: item for item in json.loads(done.stdout.splitlines()[-1])["capabilities"]}
    for name in "PyTorch,FP4 tensor cores,NCCL,Megatron-core,Transformer Engine,NVIDIA apex,SGLang,ModelOpt,Ray".split(","):
        assert name in names
    assert names["PyTorch"]["present"] and names["Megatron-core"]["present"]
