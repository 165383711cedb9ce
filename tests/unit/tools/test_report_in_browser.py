"""The report opened in headless Chromium: no console message, every plot drawn, tables sort, hover reads, themes and print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import Row, write_run

from megatron_trace.diagnostics.analysis import analyse
from megatron_trace.diagnostics.compare import with_distinct_names
from megatron_trace.diagnostics.report import render
from megatron_trace.diagnostics.run_data import read_run

DRAWN = """return [...document.querySelectorAll('figure')].map(figure => {
  const marks = [...figure.querySelectorAll('svg.plot .curve, svg.plot .area, svg.plot .bar, svg.plot .heat')];
  const boxes = marks.map(mark => mark.getBoundingClientRect());
  return {name: figure.dataset.chart, marks: marks.length, width: Math.max(0, ...boxes.map(box => box.width)),
    inside: boxes.every(box => { const f = figure.getBoundingClientRect();
      return box.left >= f.left - 1 && box.right <= f.right + 1 && box.top >= f.top - 1 && box.bottom <= f.bottom + 1; })};
})"""
COLUMN = """const table = document.querySelector('#sites table');
const head = [...table.querySelectorAll('th')].findIndex(th => th.textContent === arguments_name);
return [...table.tBodies[0].rows].map(row => row.cells[head].textContent)"""
GROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run whose sites all differ in noise."""
    directory = tmp_path_factory.mktemp("report")

    def change(row: Row) -> None:
        row["noise"] = {"fc1_in": 0.001, "k": 0.004, "v": 0.0021}[row["site"]] * (1 + row["layer"])
        if (row["layer"], row["site"]) == (0, "k"):
            row["noise"] = None

    path = directory / "report.html"
    path.write_text(render([analyse(read_run(write_run(directory / "run", change_site=change)))]), encoding="utf-8")
    return path


def column(browser: Any, name: str) -> list[str]:
    return browser.run(COLUMN.replace("arguments_name", repr(name)))


def test_no_console_message_and_every_plot_is_drawn_inside_its_frame(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    figures = browser.run(DRAWN)
    assert len(figures) >= 24
    for figure in figures:
        assert figure["marks"] >= 1 and figure["width"] > 20 and figure["inside"], figure
    assert browser.console() == []


def test_tables_sort_both_ways_with_unknown_values_last(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    click = "[...document.querySelectorAll('#sites th button')].find(b => b.textContent === 'noise').click()"
    assert column(browser, "layer")[:4] == ["0", "0", "0", "1"]
    browser.run(click)
    down = column(browser, "noise")
    assert (down[0], down[1], down[-2:]) == ("1.6%", "1.2%", ["0.1%", "–"])
    assert (column(browser, "layer")[0], column(browser, "site")[0]) == ("3", "k")  # rows move as a whole
    browser.run(click)
    assert column(browser, "noise") == [*reversed(down[:-1]), "–"]
    state = "return [...document.querySelectorAll('[aria-sort]')].map(th => th.textContent + ' ' + th.ariaSort)"
    assert browser.run(state) == ["noise ascending"]
    browser.run("[...document.querySelectorAll('#sites th button')].find(b => b.textContent === 'site').click()")
    assert column(browser, "site") == ["v"] * 4 + ["k"] * 4 + ["fc1_in"] * 4
    assert browser.console() == []


def test_hovering_reads_the_values_of_a_step(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    move = """const figure = document.querySelector('figure[data-chart=dlogp]'), svg = figure.querySelector('svg.plot');
      svg.scrollIntoView(); const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 14, clientY: box.top + 40}));
      return figure.querySelector('figcaption').textContent"""
    assert browser.run(move) == "40: mean 0.0011, 95th percentile 0.0033, largest 0.22"
    leave = """const figure = document.querySelector('figure[data-chart=dlogp]');
      figure.querySelector('svg.plot').dispatchEvent(new PointerEvent('pointerleave'));
      return [figure.querySelector('figcaption').textContent.slice(0, 4), figure.querySelectorAll('.cursor').length]"""
    assert browser.run(leave) == ["mean", 0]
    assert browser.console() == []


def test_the_page_follows_the_readers_theme_and_prints_light(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    seen = {}
    for scheme, kind in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        browser.media(scheme=scheme, kind=kind)
        seen[scheme, kind] = browser.run(GROUND)
    browser.media()
    light, dark = "rgb(245, 246, 248)", "rgb(18, 21, 26)"
    assert seen == {("light", "screen"): light, ("dark", "screen"): dark, ("dark", "print"): "rgb(255, 255, 255)"}


def test_printing_opens_what_is_folded_and_makes_pages(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    assert browser.run("return document.querySelector('details').open") is False
    document = browser.pdf()
    assert document.startswith(b"%PDF") and document.count(b"/Type /Page\n") >= 3
    assert browser.run("return document.querySelector('details').open") is True


def test_nothing_is_cut_off_on_a_printed_page(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    browser.media(kind="print")
    browser.command("Emulation.setDeviceMetricsOverride", width=718, height=1000, deviceScaleFactor=1, mobile=False)
    wide = browser.run("return document.documentElement.scrollWidth")
    browser.command("Emulation.clearDeviceMetricsOverride")
    browser.media()
    assert wide <= 718  # A4 with margins of one centimetre


def test_every_control_has_a_name_and_every_plot_words(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    nameless = """return [...document.querySelectorAll('button, a, summary')].filter(e => !e.textContent.trim()).length
      + [...document.querySelectorAll('svg.plot')].filter(e => !(e.getAttribute('aria-label') || '').includes(' ')).length
      + [...document.querySelectorAll('table')].filter(e => !e.caption).length"""
    assert browser.run(nameless) == 0
    assert browser.run("return document.documentElement.lang") == "en"


def test_a_narrow_window_scrolls_tables_and_not_the_page(browser: Any, page_path: Path) -> None:
    browser.open(page_path)
    browser.command("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    wide = browser.run("return document.documentElement.scrollWidth")
    browser.command("Emulation.clearDeviceMetricsOverride")
    assert wide <= 390


def test_a_comparison_draws_all_runs_and_folds_each(browser: Any, tmp_path: Path) -> None:
    def slower(record: Row) -> None:
        record["reward"] *= 0.5

    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", change_step=slower, steps=25, finished=False)]
    path = tmp_path / "both.html"
    path.write_text(render(with_distinct_names([analyse(read_run(run)) for run in runs])), encoding="utf-8")
    browser.open(path)
    curves = "return document.querySelectorAll('#curves figure[data-chart=reward] polyline:not(.faint)').length"
    assert browser.run(curves) == 2
    assert browser.run("return [...document.querySelectorAll('main > details')].map(d => d.open)") == [False, False]
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert all(f["marks"] and f["width"] > 2 for f in browser.run(DRAWN))
    assert browser.console() == []
