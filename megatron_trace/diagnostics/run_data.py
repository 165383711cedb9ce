"""What a run left on disk, read leniently: an interrupted run, a cut-off line or a NaN must not hide the rest. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Point = tuple[float, float | None]
"""(step, value); None where the recorded value is NaN or infinite, so that a curve breaks there."""

RUN_FILES = ("metrics.jsonl", "summary.json")


class NotARunError(ValueError):
    """The directory holds no run; the message names it and says what would."""


@dataclass(frozen=True)
class RunData:
    """One run. ``config`` is empty and ``summary`` None where the file is missing or unreadable; ``problems`` says so."""

    directory: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    warmup: tuple[Mapping[str, Any], ...]
    steps: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        """``run.name`` of the configuration, else the directory's name."""
        return str(lookup(self.config, "run.name") or self.directory.name)

    @property
    def planned_steps(self) -> int | None:
        """Reinforcement steps that were asked for."""
        value = lookup(self.config, "trainer.steps")
        return int(value) if is_number(value) else None

    @property
    def last_step(self) -> int:
        """The last reinforcement step with a line in ``metrics.jsonl``; 0 without any."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    def series(self, path: str) -> list[Point]:
        """Values at dotted ``path`` over reinforcement steps; steps that lack it are left out."""
        return _series(self.steps, path)

    def warmup_series(self, path: str) -> list[Point]:
        """The same over warm-up steps."""
        return _series(self.warmup, path)

    def keys(self, path: str) -> tuple[str, ...]:
        """Names found at dotted ``path`` in any reinforcement step, in order of appearance."""
        found: dict[str, None] = {}
        for record in self.steps:
            value = lookup(record, path)
            if isinstance(value, Mapping):
                found |= dict.fromkeys(value)
        return tuple(found)

    def total(self, path: str) -> float:
        """Sum of the finite values at ``path``."""
        return sum(value for _, value in self.series(path) if value is not None)

    def mean(self, path: str) -> float | None:
        """Mean of the finite values at ``path``; None without any."""
        return mean(value for _, value in self.series(path))


def read_run(directory: Path | str) -> RunData:
    """Read ``directory``; raises NotARunError when it is none or holds neither metrics nor a summary."""
    directory = Path(directory)
    if not directory.exists():
        raise NotARunError(f"{directory}: no such directory; give the directory of a run (run.output_dir/run.name)")
    if not directory.is_dir():
        raise NotARunError(f"{directory}: is a file; give the directory of a run, which holds {' or '.join(RUN_FILES)}")
    if not any((directory / name).is_file() for name in RUN_FILES):
        raise NotARunError(f"{directory}: holds neither {' nor '.join(RUN_FILES)}; give the directory of a run")
    problems: list[str] = []
    config = _read_object(directory / "config.json", problems)
    summary = _read_object(directory / "summary.json", problems) if (directory / "summary.json").exists() else None
    records = _read_lines(directory / "metrics.jsonl", problems)
    steps = _by_step(records, "rl")
    if summary is not None and steps and _of_an_earlier_run(summary, steps[-1]["step"]):
        problems.append(
            f"summary.json speaks of step {summary['steps']}, metrics.jsonl ends at step {steps[-1]['step']}: the summary "
            "is of an "
            "earlier run in this directory and was ignored"
        )
        summary = None
    return RunData(
        directory=directory,
        config=config,
        summary=summary or None,
        warmup=_by_step(records, "warmup"),
        steps=steps,
        problems=tuple(problems),
    )


def lookup(record: Mapping[str, Any], path: str) -> Any:
    """Value at a dotted path; None where a part is missing."""
    value: Any = record
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def is_number(value: Any) -> bool:
    """A finite int or float; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else None."""
    return float(value) if is_number(value) else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is not None; None of nothing."""
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept else None


def plain(value: Any) -> Any:
    """``value`` with NaN and infinities as None, mappings as dicts and sequences as lists: strict JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plain_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    """``plain`` of a mapping."""
    return {str(key): plain(item) for key, item in values.items()}


def _series(records: Iterable[Mapping[str, Any]], path: str) -> list[Point]:
    points: list[Point] = []
    for record in records:
        value = lookup(record, path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            points.append((float(record["step"]), number(value)))
    return points


def _of_an_earlier_run(summary: Mapping[str, Any], last_step: int) -> bool:
    return is_number(summary.get("steps")) and summary["steps"] > last_step


def _by_step(records: Iterable[Mapping[str, Any]], phase: str) -> tuple[Mapping[str, Any], ...]:
    """Records of one phase, steps ascending; of a step that was written twice the later line counts."""
    found = {int(r["step"]): r for r in records if r.get("phase") == phase and is_number(r.get("step"))}
    return tuple(found[step] for step in sorted(found))


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        problems.append(f"{path.name} is missing")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problems.append(f"{path.name} is no JSON ({error}) and was ignored")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds a {type(value).__name__} where an object belongs, and was ignored")
        return {}
    return value


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        problems.append(f"{path.name} is missing: there are no curves")
        return []
    records, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            bad += bool(line.strip())
    if bad:
        problems.append(f"{path.name}: {bad} line{'s' if bad > 1 else ''} could not be read and were left out")
    return records
