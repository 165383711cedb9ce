"""docs/paper_index.md names only functions, settings and tests that exist (found by parsing, without importing the rooms)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_trace.config.schema import RunConfig
from megatron_trace.rl import losses, rejection

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "paper_index.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| What")
]


def names(column: int) -> Iterator[str]:
    for row in ROWS:
        yield from re.findall(r"`([^`]+)`", row[column])


def defined(path: Path) -> set[str]:
    """Top-level names of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_every_row_has_four_cells_and_a_function() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert len(row) == 4, row
        assert row[1] == "none" or "`" in row[1], row


@pytest.mark.parametrize("name", sorted(set(names(1))))
def test_function_exists(name: str) -> None:
    module = ROOT / "megatron_trace" / (name.replace(".", "/") + ".py")
    if not module.exists():
        parent, _, leaf = name.rpartition(".")
        assert leaf in defined(ROOT / "megatron_trace" / (parent.replace(".", "/") + ".py"))


@pytest.mark.parametrize("name", sorted(name for name in set(names(2)) if "." in name))
def test_setting_exists(name: str) -> None:
    section, field = name.split(".")
    owners = {
        "LossConfig": losses.LossConfig.__dataclass_fields__,
        "LossInputs": losses.LossInputs.__dataclass_fields__,
        "RejectionConfig": rejection.RejectionConfig.__dataclass_fields__,
    }
    if section not in owners:
        owners[section] = RunConfig.model_fields[section].annotation.model_fields
    assert field in owners[section]


@pytest.mark.parametrize("name", sorted(set(names(3))))
def test_test_exists(name: str) -> None:
    path, function = name.split("::")
    assert function in defined(ROOT / "tests" / path)
