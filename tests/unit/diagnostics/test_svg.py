"""Axes, thinning and numbers for people by value; drawings as well-formed XML with the right geometry."""

from __future__ import annotations

import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.diagnostics import page, svg
from megatron_trace.diagnostics.svg import Line, figure, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (12, "12"),
        (1234567, "1,234,567"),
        (1234.5, "1,234"),
        (0.58594, "0.586"),
        (0.000123, "1.2e-4"),
        (0.0001, "1e-4"),
        (-0.05, "-0.05"),
        (float("nan"), "NaN"),
        (float("-inf"), "-∞"),
    ],
)
def test_figures_for_people(value: float | None, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0%"), (1.0, "100%"), (0.4123, "41.2%"), (0.0085, "0.85%"), (0.0000051, "< 0.001%"), (0.9999, "100%")],
)
def test_percentages(value: float | None, text: str) -> None:
    assert percent(value) == text


def test_ticks_are_round_and_labelled_apart() -> None:
    assert svg.ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert svg.ticks(1, 40, 6) == [10, 20, 30, 40]
    assert svg.ticks(2, 2) == [2]
    assert svg.tick_labels([0.9985, 0.999, 0.9995, 1.0]) == ["0.9985", "0.9990", "0.9995", "1.0000"]
    assert svg.tick_labels([0.0, 2.0, 4.0]) == ["0", "2", "4"]
    assert svg.tick_labels([2.0e-5, 2.2e-5]) == ["2e-5", "2.2e-5"]


def test_log_ticks_are_decades_or_finer_within_one() -> None:
    assert svg.log_ticks(0.0005, 2.0) == pytest.approx([0.001, 0.01, 0.1, 1.0])
    assert svg.log_ticks(0.011, 0.06) == pytest.approx([0.02, 0.05])
    assert len(svg.log_ticks(1e-12, 1e12)) <= 6


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=3000))
def test_thinning_keeps_ends_extremes_and_gaps(values: list[float | None]) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = svg.thin(points, limit=50)
    assert kept == sorted(set(kept), key=lambda p: p[0]) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    known = [v for v in values if v is not None]
    if known:
        shown = [v for _, v in kept if v is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))
    assert any(v is None for _, v in kept) == any(v is None for v in values)
    assert len(kept) <= 80 + sum(v is None for v in values)


def test_smoothing_is_a_trailing_mean_that_gaps_interrupt() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0), (4.0, None), (5.0, 10.0)]
    assert svg.smooth(points, 2) == [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0), (4.0, None), (5.0, 10.0)]


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def coordinates(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]  # type: ignore[misc]


def test_a_line_lies_where_its_values_say_and_breaks_at_gaps() -> None:
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, None), (30.0, 0.5), (40.0, 1.0)]
    tree = drawn(svg.line_chart([Line("a", points)], label="a & b"))
    assert tree.attrib["aria-label"] == "a & b"
    first, second = (coordinates(e) for e in tree.iter("polyline"))
    left, right, bottom = svg.LEFT, svg.WIDTH - svg.RIGHT, svg.HEIGHT - svg.BOTTOM
    assert first[0] == (left, bottom)
    assert second[-1][0] == right and second[-1][1] == first[1][1] < second[0][1] < bottom
    plot = json.loads(unescape(tree.attrib["data-plot"]))
    assert plot["lines"][0]["points"] == [[0, 0], [10, 1], [20, None], [30, 0.5], [40, 1]]


def test_a_logarithmic_axis_puts_a_factor_of_ten_at_one_distance_and_zeros_on_the_base_line() -> None:
    tree = drawn(svg.line_chart([Line("a", [(1.0, 1e-3), (2.0, 1e-2), (3.0, 1e-1), (4.0, 0.0)])], label="x", log=True))
    (line,) = (coordinates(e) for e in tree.iter("polyline"))
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)
    assert line[3][1] == svg.HEIGHT - svg.BOTTOM
    assert "0" in [e.text for e in tree.iter("text")]


def test_one_value_and_constant_values_are_drawn() -> None:
    assert len(list(drawn(svg.line_chart([Line("a", [(3.0, 0.7)])], label="x")).iter("circle"))) == 1
    (line,) = drawn(svg.line_chart([Line("a", [(1.0, 0.0), (2.0, 0.0)])], label="x", log=True)).iter("polyline")
    assert {y for _, y in coordinates(line)} == {svg.HEIGHT - svg.BOTTOM}


def test_stacked_areas_add_up() -> None:
    lines = [Line("a", [(1.0, 1.0), (2.0, 1.0)], 0), Line("b", [(1.0, 3.0), (2.0, 1.0)], 1)]
    low, high = (coordinates(e) for e in drawn(svg.stacked_chart(lines, label="x")).iter("polygon"))
    base = svg.HEIGHT - svg.BOTTOM
    assert (base - high[0][1]) / (base - low[0][1]) == pytest.approx(4.0, rel=0.02)
    assert (base - high[1][1]) / (base - low[1][1]) == pytest.approx(2.0, rel=0.02)


def test_long_stacks_are_averaged_over_stretches() -> None:
    lines = [Line("a", [(float(i), float(i % 2)) for i in range(1000)])]
    (short,) = svg.thin_together(lines, limit=100)
    assert len(short) == 100 and {v for _, v in short} == {0.5}


def test_heat_cells_carry_their_share_of_the_colour_and_say_their_value() -> None:
    values = {(0, 0): 0.0, (0, 1): 4.0, (1, 0): 1.0, (1, 1): None}
    text = svg.heat_map(["k", "v"], ["0", "1"], lambda r, c: values[(r, c)], label="gap", top_value=4.0)
    tree = drawn(text)
    assert [float(e.attrib["fill-opacity"]) for e in tree.iter("rect") if e.attrib["class"] == "heat"] == [0, 1, 0.25, 0]
    assert [e.text for e in tree.iter("title")] == ["k, layer 0: 0", "k, layer 1: 4", "v, layer 0: 1", "v, layer 1: –"]
    assert [e.text for e in tree.iter("text") if e.attrib["class"] == "in"] == ["0", "4", "1", "–"]


def test_many_layers_lose_the_text_but_not_the_tooltip() -> None:
    names = [str(i) for i in range(94)]
    tree = drawn(svg.heat_map(["k"], names, lambda r, c: c / 94, label="x", top_value=1.0))
    assert len(list(tree.iter("title"))) == 94
    shown = [e.text for e in tree.iter("text")]
    assert 5 < len(shown) < 25 and "0" in shown


def test_bars_start_at_a_power_of_ten_and_grow_with_the_logarithm() -> None:
    tree = drawn(svg.bar_chart([("a", 0.5, 0), ("b", 5.0, 1), ("c", None, 2)], label="x", level=("BF16", 1.0)))
    a, b, c = (float(e.attrib["width"]) for e in tree.iter("rect"))
    level = next(float(e.attrib["x1"]) for e in tree.iter("line") if e.attrib["class"] == "level") - 128
    assert (b - a) == pytest.approx(level, abs=0.3)  # both span one decade: 0.5 to 5, 0.1 to 1
    assert c == 1


# ---- colours -------------------------------------------------------------------------------------------------------


def channels(color: str) -> tuple[float, float, float]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def luminance(rgb: tuple[float, float, float]) -> float:
    """Relative luminance, WCAG 2.2."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [page.LIGHT, page.DARK], ids=["light", "dark"])
def test_text_has_a_contrast_of_four_and_a_half_and_graphics_of_three(theme: dict[str, str]) -> None:
    for ground in ("page", "panel"):
        for name in ("text", "muted", "link", "fault", "warning", "note"):
            assert contrast(channels(theme[name]), channels(theme[ground])) >= 4.5, (name, ground)
    for i in range(svg.SERIES_COLORS):
        assert contrast(channels(theme[f"c{i}"]), channels(theme["panel"])) >= 3, i


@pytest.mark.parametrize("theme", [page.LIGHT, page.DARK], ids=["light", "dark"])
def test_text_in_heat_cells_is_readable_at_every_shade(theme: dict[str, str]) -> None:
    heat, panel = channels(theme["heat"]), channels(theme["panel"])
    for step in range(101):
        share = step / 100
        ground = tuple(share * h + (1 - share) * p for h, p in zip(heat, panel, strict=True))
        assert contrast(channels(theme["text"]), ground) >= 4.5, share  # type: ignore[arg-type]


def test_both_themes_name_the_same_roles_and_the_style_uses_no_other() -> None:
    assert page.LIGHT.keys() == page.DARK.keys()
    used = set(re.findall(r"var\(--([\w-]+)\)", page._style()))
    assert used - {"s"} <= page.LIGHT.keys()
