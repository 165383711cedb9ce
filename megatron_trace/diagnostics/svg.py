"""Charts as inline SVG text, coloured by the page's CSS variables so that one drawing serves light, dark and print.

A chart's curves ride along as JSON in ``data-plot`` for the page's hover script; without script the drawing is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from megatron_trace.diagnostics.run_data import Point

SERIES_COLORS = 8
WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 30
MAX_POINTS = 240
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Line:
    """One curve. ``color`` indexes the page's palette; ``faint`` draws it thin and pale, behind its smoothed self."""

    name: str
    points: Sequence[Point]
    color: int = 0
    dash: str = ""
    faint: bool = False


def figure(value: float | int | None, digits: int = 3) -> str:
    """A number for people: ``-`` for none, thousands separated, small ones as 1.2e-5."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{max(digits - 2, 0)}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A share as a percentage with as many digits as it deserves."""
    if value is None:
        return "–"
    size = abs(value) * 100
    if size == 0 or size >= 99.95:
        return f"{value:.0%}"
    if size < 1e-3:
        return "< 0.001%"
    return f"{value:.1%}" if size >= 1 else f"{value * 100:.2g}%"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten apart) inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of evenly spaced ticks with as many decimals as tell them apart."""
    if len(values) < 2 or max(abs(v) for v in values) >= 1e5:
        return [figure(v) for v in values]
    decimals = next((d for d in range(9) if all(abs(round(v, d) - v) < 1e-6 * (values[1] - values[0]) for v in values)), 9)
    return [figure(v, 4) for v in values] if decimals > 5 else [f"{v:,.{decimals}f}" for v in values]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], thinned to at most six; 1, 2 and 5 of each where there are fewer than two."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**e for e in range(first, last + 1) if low * 0.999 <= 10.0**e <= high * 1.001]
    if len(decades) >= 2:
        return decades[:: -(-len(decades) // 6)]
    return [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5) if low * 0.999 <= m * 10.0**e <= high * 1.001]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about ``limit`` points that keep ends, gaps and the extremes of every stretch: a spike never disappears."""
    if len(points) <= limit:
        return list(points)
    size = -(-2 * len(points) // limit)
    kept: dict[int, None] = {0: None}
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        known = [i for i in part if points[i][1] is not None]
        wanted = {min(known, key=lambda i: points[i][1]), max(known, key=lambda i: points[i][1])} if known else set()  # type: ignore[arg-type, return-value]
        wanted |= {i for i in part if points[i][1] is None and (i == start or points[i - 1][1] is not None)}
        kept |= dict.fromkeys(sorted(wanted))
    kept[len(points) - 1] = None
    return [points[i] for i in kept]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of each value and up to ``window - 1`` before it; gaps stay gaps and start anew."""
    out: list[Point] = []
    recent: list[float] = []
    for step, value in points:
        if value is None:
            recent = []
            out.append((step, None))
            continue
        recent = [*recent, value][-window:]
        out.append((step, sum(recent) / len(recent)))
    return out


def line_chart(
    lines: Sequence[Line], *, label: str, log: bool = False, level: tuple[str, float] | None = None, x_name: str = "step"
) -> str:
    """Curves over steps. ``log`` asks for a logarithmic axis and gets it where there is a positive value."""
    values = [v for line in lines for _, v in line.points if v is not None]
    steps = [x for line in lines for x, _ in line.points]
    positive = [v for v in values if v > 0]
    log = log and bool(positive) and max(positive) > 3 * min(positive)
    low, high = (min(positive), max(positive)) if log else _range(values, level)
    axis = _Axes(_x_range(steps), (low, high), log=log, zero=log and min(values) <= 0)
    parts = [axis.grid(x_name)]
    if level is not None and low <= level[1] <= high:
        parts.append(axis.level(*level))
    parts += [axis.curve(line) for line in sorted(lines, key=lambda line: not line.faint)]
    shown = [line for line in lines if not line.faint]
    return _svg(parts, label=label, plot=axis.plot(shown))


def stacked_chart(lines: Sequence[Line], *, label: str, x_name: str = "step") -> str:
    """Areas on top of each other; all lines share their steps."""
    lines = [Line(line.name, thin_together(lines)[i], line.color) for i, line in enumerate(lines)]
    steps = [x for x, _ in lines[0].points]
    base = [0.0] * len(steps)
    tops: list[list[float]] = []
    for line in lines:
        base = [b + (v or 0.0) for b, (_, v) in zip(base, line.points, strict=True)]
        tops.append(base)
    axis = _Axes(_x_range(steps), (0.0, max(tops[-1]) or 1.0), log=False)
    parts = [axis.grid(x_name)]
    below = [0.0] * len(steps)
    for line, top in zip(lines, tops, strict=True):
        outline = [*zip(steps, top, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        path = " ".join(f"{axis.x(x):.1f},{axis.y(y):.1f}" for x, y in outline)
        parts.append(f'<polygon class="area c{line.color % SERIES_COLORS}" points="{path}"/>')
        below = top
    return _svg(parts, label=label, plot=axis.plot(lines))


def thin_together(lines: Sequence[Line], limit: int = MAX_POINTS) -> list[list[Point]]:
    """Curves over the same steps, averaged over stretches of steps so that they still share them."""
    count = len(lines[0].points)
    size = max(1, -(-count // limit))
    out: list[list[Point]] = []
    for line in lines:
        parts = [line.points[i : i + size] for i in range(0, count, size)]
        out.append([(part[0][0], sum(v or 0.0 for _, v in part) / len(part)) for part in parts])
    return out


def bar_chart(rows: Sequence[tuple[str, float | None, int]], *, label: str, level: tuple[str, float]) -> str:
    """Horizontal bars of (name, value, colour) on a logarithmic axis from a power of ten on, with a line at ``level``."""
    known = [v for _, v, _ in rows if v is not None and v > 0]
    low = 10.0 ** math.floor(math.log10(min([*known, level[1]])) - 1e-9)
    high = max([*known, level[1]]) * 1.6
    left, row, top = 128, 24, 8
    height = top + row * len(rows) + BOTTOM

    def x(value: float) -> float:
        return left + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (WIDTH - left - 46)

    base = height - BOTTOM
    parts, marks = [], []
    for tick in log_ticks(low, high):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{base}"/>')
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{base + 14}" text-anchor="middle">{figure(tick)}</text>')
    for i, (name, value, color) in enumerate(rows):
        y = top + i * row
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        end = x(value) if value is not None and value > 0 else left
        parts.append(f'<rect class="bar c{color}" x="{left}" y="{y + 4}" width="{max(end - left, 1):.1f}" height="{row - 8}"/>')
        marks.append(f'<text class="mark" x="{end + 5:.1f}" y="{y + 16}">{figure(value)}</text>')
    parts.append(f'<line class="level" x1="{x(level[1]):.1f}" x2="{x(level[1]):.1f}" y1="{top}" y2="{base}"/>')
    parts += [
        f'<text class="tick" x="{x(level[1]):.1f}" y="{height - 3}" text-anchor="middle">{escape(level[0])}</text>',
        *marks,
    ]
    return _svg(parts, label=label, height=height)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    value: Callable[[int, int], float | None],
    *,
    label: str,
    top_value: float,
    write: Callable[[float | None], str] = figure,
) -> str:
    """One cell per row and column, coloured from nothing at 0 to the full heat colour at ``top_value``; text where it fits."""
    left, top, height = 56, 6, 30
    cell = (WIDTH - left - RIGHT) / max(len(columns), 1)
    parts = []
    for r, row in enumerate(rows):
        y = top + r * height
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 19}" text-anchor="end">{escape(row)}</text>')
        for c, column in enumerate(columns):
            found = value(r, c)
            share = 0.0 if found is None or top_value <= 0 else max(0.0, min(1.0, found / top_value))
            x = left + c * cell
            kind = "cell none" if found is None else "cell"
            box = f'x="{x + 1:.1f}" y="{y + 1}" width="{max(cell - 2, 1):.1f}" height="{height - 2}" rx="2"'
            parts.append(
                f"<g><title>{escape(row)}, layer {escape(column)}: {write(found)}</title>"
                f'<rect class="{kind}" {box}/><rect class="heat" {box} fill-opacity="{share:.3f}"/>'
            )
            if cell >= 34:
                parts.append(f'<text class="in" x="{x + cell / 2:.1f}" y="{y + 19}" text-anchor="middle">{write(found)}</text>')
            parts.append("</g>")
    every = max(1, -(-len(columns) * 26 // (WIDTH - left)))
    bottom = top + len(rows) * height
    for c in range(0, len(columns), every):
        x = left + (c + 0.5) * cell
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{escape(columns[c])}</text>')
    parts.append(f'<text class="tick" x="{left - 8}" y="{bottom + 14}" text-anchor="end">layer</text>')
    return _svg(parts, label=label, height=bottom + 22)


def swatch(color: int, dash: str = "") -> str:
    """A short piece of line for a legend."""
    line = f'<line class="curve c{color % SERIES_COLORS}" x1="1" x2="21" y1="5" y2="5"{_dashed(dash)}/>'
    return f'<svg class="swatch" width="22" height="10" aria-hidden="true">{line}</svg>'


class _Axes:
    """Maps values to the drawing and draws the frame. ``zero``: a logarithmic axis keeps its base line for zeros."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], *, log: bool, zero: bool = False) -> None:
        self.x_range, self.log, self.zero = x_range, log, zero
        low, high = y_range
        if log:
            self.y_ticks = log_ticks(low, high)
            self.y_range = (low / (high / low) ** 0.12 if zero else low / 1.15, high * 1.15)
        else:
            pad = 0.04 * (high - low)
            self.y_range = (low if low == 0 else low - pad, high + pad)
            self.y_ticks = ticks(*self.y_range)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log and value <= 0:
            return float(HEIGHT - BOTTOM)
        share = math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def grid(self, x_name: str) -> str:
        parts = []
        labels = [figure(tick) for tick in self.y_ticks] if self.log else tick_labels(self.y_ticks)
        for tick, name in [*zip(self.y_ticks, labels, strict=True), *([(0.0, "0")] if self.zero else [])]:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{name}</text>')
        for tick in ticks(*self.x_range, 6):
            if float(tick).is_integer():
                at = f'x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}"'
                parts.append(f'<text class="tick" {at} text-anchor="middle">{figure(tick)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_name)}</text>')
        base = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        return "".join(parts)

    def level(self, name: str, value: float) -> str:
        y = self.y(value)
        return (
            f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{WIDTH - RIGHT}" y="{y - 4:.1f}" text-anchor="end">{escape(name)} {figure(value)}</text>'
        )

    def curve(self, line: Line) -> str:
        kind = f"curve c{line.color % SERIES_COLORS}" + (" faint" if line.faint else "")
        points = thin(line.points)
        parts = []
        for piece in _pieces(points):
            path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in piece)
            if len(piece) == 1:
                x, y = piece[0]
                parts.append(f'<circle class="{kind} dot" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3"/>')
            else:
                parts.append(f'<polyline class="{kind}" points="{path}"{_dashed(line.dash)}/>')
            if 1 < len(piece) <= 8:
                parts += [f'<circle class="{kind} dot" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="2.5"/>' for x, y in piece]
        return "".join(parts)

    def plot(self, lines: Sequence[Line]) -> str:
        data = {
            "x": list(self.x_range),
            "y": list(self.y_range),
            "log": self.log,
            "box": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
            "lines": [
                {
                    "name": line.name,
                    "color": line.color % SERIES_COLORS,
                    "points": [[_short(x), None if v is None else _short(v)] for x, v in thin(line.points)],
                }
                for line in lines
            ],
        }
        return json.dumps(data, separators=(",", ":"))


def _pieces(points: Iterable[Point]) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, value in points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((x, value))
    return [piece for piece in pieces if piece]


def _range(values: Sequence[float], level: tuple[str, float] | None) -> tuple[float, float]:
    """Of a linear axis: from 0 unless the values stay far from it; never empty."""
    low, high = min(values), max(values)
    if level is not None and high < level[1] <= 2 * high:
        high = level[1]
    if low > 0 and low < 0.6 * high:
        low = 0.0
    if low == high:
        return (0.0, 1.0) if high == 0 else (min(0.0, 1.2 * high), max(0.0, 1.2 * high))
    return low, high


def _x_range(steps: Sequence[float]) -> tuple[float, float]:
    low, high = min(steps), max(steps)
    return (low, high) if high > low else (low - 1, high + 1)


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


def _dashed(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def _svg(parts: Sequence[str], *, label: str, height: int = HEIGHT, plot: str | None = None) -> str:
    data = "" if plot is None else f' data-plot="{escape(plot)}"'
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"{data}>{"".join(parts)}</svg>'
    )
