"""The record of a run: one JSON line per step on disk, a live line on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class RunLog:
    """Writes ``metrics.jsonl`` and ``summary.json`` below ``directory`` and talks to the console; silent when not ``main``."""

    def __init__(self, directory: Path, *, main: bool, append: bool = False) -> None:
        self.directory = directory
        self.main = main
        self.console = Console(quiet=not main, highlight=False)
        self.started = time.perf_counter()
        self._phases: dict[str, float] = {}
        if main:
            directory.mkdir(parents=True, exist_ok=True)
            if not append:
                (directory / "metrics.jsonl").write_text("")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the enclosed block; the seconds appear in the next line under ``seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start

    def take_phases(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        phases, self._phases = self._phases, {}
        return {name: round(seconds, 4) for name, seconds in phases.items()}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        if self.main:
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite ``metrics.jsonl`` with the ``wanted`` records only; a line cut off by a kill is dropped too."""
        path = self.directory / "metrics.jsonl"
        if not self.main or not path.exists():
            return
        kept = [line for line in path.read_text().splitlines() if (record := _parsed(line)) is not None and wanted(record)]
        path.write_text("".join(f"{line}\n" for line in kept))

    def say(self, text: str) -> None:
        """One plain line."""
        self.console.print(text)

    @contextmanager
    def progress(self, title: str, *, total: int, done: int = 0) -> Iterator[ProgressLine]:
        """A bar with ETA on a terminal; on anything else, the lines passed to ``advance``."""
        if not (self.main and self.console.is_terminal):
            yield ProgressLine(self.console, None, None)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as bar:
            yield ProgressLine(self.console, bar, bar.add_task(title, total=total, completed=done, note=""))

    def summary(self, values: Mapping[str, Any], *, table: Sequence[tuple[str, str]]) -> None:
        """Write ``summary.json`` and print ``table`` of (name, value)."""
        if not self.main:
            return
        (self.directory / "summary.json").write_text(json.dumps(values, indent=1) + "\n")
        view = Table(title=f"{self.directory}", show_header=False)
        view.add_column("what", no_wrap=True)
        view.add_column("value", justify="right")
        for name, value in table:
            view.add_row(name, value)
        self.console.print(view)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


class ProgressLine:
    """What ``RunLog.progress`` yields."""

    def __init__(self, console: Console, bar: Progress | None, task: Any) -> None:
        self._console, self._bar, self._task = console, bar, task

    def advance(self, note: str, *, show: bool = True) -> None:
        """One step done; ``note`` is its short summary, printed where there is no bar (only if ``show``)."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, note=note)
        elif show:
            self._console.print(note)
