"""Image files and constraints: everything pinned, and the same version wherever one is named."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PIN = re.compile(r"([A-Za-z0-9_.-]+)==([0-9][A-Za-z0-9.]*)")


def _pins(text: str) -> dict[str, str]:
    return dict(PIN.findall(text))


@pytest.mark.parametrize("name", ["constraints-cpu.txt", "constraints-gpu.txt"])
def test_constraints_pin_exactly_and_once(repository: Path, name: str) -> None:
    lines = [line for line in (repository / "docker" / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(PIN.fullmatch(line) for line in lines)
    packages = [line.split("==")[0].lower() for line in lines]
    assert len(set(packages)) == len(packages)
    assert "apex" not in packages


@pytest.mark.parametrize(
    ("image", "constraints"), [("Dockerfile", "constraints-gpu.txt"), ("docker/cpu.Dockerfile", "constraints-cpu.txt")]
)
def test_images_install_what_the_constraints_say(repository: Path, image: str, constraints: str) -> None:
    allowed = _pins((repository / "docker" / constraints).read_text())
    installed = _pins((repository / image).read_text())
    assert installed and {name: allowed.get(name) for name in installed} == installed


def test_the_base_image_is_a_fixed_release(repository: Path) -> None:
    first = next(line for line in (repository / "Dockerfile").read_text().splitlines() if line.startswith("FROM"))
    assert re.fullmatch(r"FROM nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", first)
    assert first.removeprefix("FROM ") in (repository / "docs" / "install.md").read_text()


def test_the_version_matrix_says_what_is_pinned(repository: Path) -> None:
    matrix = (repository / "docs" / "install.md").read_text()
    for constraints in ("constraints-cpu.txt", "constraints-gpu.txt"):
        pins = _pins((repository / "docker" / constraints).read_text())
        for name in ("megatron-core", "transformer-engine", "sglang", "sglang-kernel", "transformers", "tokenizers", "ray"):
            if name in pins:
                assert pins[name] in matrix, (constraints, name)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
@pytest.mark.parametrize("image", ["Dockerfile", "docker/cpu.Dockerfile"])
def test_hadolint_finds_nothing(repository: Path, image: str) -> None:
    done = subprocess.run(["hadolint", image], cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
