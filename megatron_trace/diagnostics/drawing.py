"""From an analysed chart to a figure of the page: title, legend, drawing, and a caption that says the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron_trace.diagnostics.analysis import Chart, Curve
from megatron_trace.diagnostics.run_data import Point
from megatron_trace.diagnostics.svg import DASHES, SERIES_COLORS, Line, figure, line_chart, smooth, stacked_chart, swatch

SMOOTHED = frozenset({"reward", "loss", "speed", "grad_norm"})
"""Charts whose noise hides their course: drawn as a mean over steps, the raw values pale behind."""
SMOOTH_FROM = 20
"""Steps from which such a chart is smoothed."""


def chart_figure(chart: Chart) -> str:
    """A chart of one run."""
    curves = [curve for curve in chart.curves if any(v is not None for _, v in curve.points)]
    lines = [Line(curve.name, curve.points, i) for i, curve in enumerate(curves)]
    caption = "; ".join(_words(curve, name=len(curves) > 1) for curve in curves[:3])
    label = f"{chart.title}, {chart.unit}: {'; '.join(_words(curve, name=True) for curve in curves)}"
    if chart.kind == "stack":
        return _figure(chart, lines, stacked_chart(lines, label=label), _phase_words(curves))
    if chart.key == "flips":
        lines = [Line(line.name, line.points, i // 2, DASHES[i % 2]) for i, line in enumerate(lines)]
    drawn = _smoothed(lines[0]) if chart.key in SMOOTHED and len(lines) == 1 else lines
    text = line_chart(drawn, label=label, log=chart.log, level=chart.level)
    unit = chart.unit + (f", mean over {_window(lines[0].points)} steps" if len(drawn) > len(lines) else "")
    return _figure(chart, lines, text, caption, unit=unit)


def comparison_figure(charts: Sequence[tuple[str, Chart]]) -> str:
    """The first curve of the same chart of several runs; colours repeat with another dash after eight."""
    first = charts[0][1]
    lines = [
        Line(name, chart.curves[0].points, i % SERIES_COLORS, DASHES[i // SERIES_COLORS % len(DASHES)])
        for i, (name, chart) in enumerate(charts)
        if any(v is not None for _, v in chart.curves[0].points)
    ]
    what = f"{first.curves[0].name}, {first.unit}" if len(first.curves) > 1 else first.unit
    label = f"{first.title}, {what}: " + "; ".join(_words(Curve(line.name, tuple(line.points)), name=True) for line in lines)
    drawn = [part for line in lines for part in (_smoothed(line) if first.key in SMOOTHED else [line])]
    return _figure(first, lines, line_chart(drawn, label=label, log=first.log, level=first.level), "", unit=what)


def plain_figure(title: str, unit: str, drawing: str, caption: str) -> str:
    """A figure without curves."""
    return (
        f'<figure data-chart="{escape(title)}"><h3>{escape(title)}</h3><div class="unit">{escape(unit)}</div>{drawing}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _figure(chart: Chart, lines: Sequence[Line], drawing: str, caption: str, *, unit: str | None = None) -> str:
    items = "".join(f"<li>{swatch(line.color, line.dash)}{escape(line.name)}</li>" for line in lines)
    legend = f'<ul class="legend">{items}</ul>' if len(lines) > 1 else ""
    return (
        f'<figure data-chart="{chart.key}"><h3>{escape(chart.title)}</h3><div class="unit">{escape(unit or chart.unit)}</div>'
        f"{legend}{drawing}<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _smoothed(line: Line) -> list[Line]:
    window = _window(line.points)
    if len(line.points) < SMOOTH_FROM:
        return [line]
    return [
        Line(line.name, smooth(line.points, window), line.color, line.dash),
        Line(line.name, line.points, line.color, line.dash, faint=True),
    ]


def _window(points: Sequence[Point]) -> int:
    return max(3, len(points) // 12)


def _words(curve: Curve, *, name: bool) -> str:
    known = [v for _, v in curve.points if v is not None]
    before = f"{curve.name} " if name else ""
    if not known:
        return f"{before}not a number"
    if len(known) == 1:
        return f"{before}{figure(known[0])}"
    span = "" if name else f" (least {figure(min(known))}, largest {figure(max(known))})"
    return f"{before}{figure(known[0])} → {figure(known[-1])}{span}"


def _phase_words(curves: Sequence[Curve]) -> str:
    means = {curve.name: sum(v or 0.0 for _, v in curve.points) / len(curve.points) for curve in curves}
    total = sum(means.values())
    return (
        ", ".join(f"{name} {share / total:.0%}" for name, share in sorted(means.items(), key=lambda item: -item[1]))
        if total
        else ""
    )
