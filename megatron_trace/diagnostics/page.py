"""The report's page: style for light, dark and print, a few lines of script, sortable tables. No network, by its own policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megatron_trace.diagnostics.findings import Finding

SEVERITY_WORDS = {"fault": "Fault", "warning": "Warning", "note": "Note"}

LIGHT = {
    "page": "#f5f6f8",
    "panel": "#ffffff",
    "text": "#1b2027",
    "muted": "#555f6b",
    "line": "#d7dce2",
    "link": "#1a5fa0",
    "heat": "#ee7a35",
    "fault": "#b3141f",
    "warning": "#8a5300",
    "note": "#1a5fa0",
    "c0": "#1f6fb2",
    "c1": "#c2410c",
    "c2": "#0b7a5b",
    "c3": "#8438ad",
    "c4": "#8f6200",
    "c5": "#be185d",
    "c6": "#4a5668",
    "c7": "#0e7490",
}
DARK = {
    "page": "#12151a",
    "panel": "#1b2027",
    "text": "#e8ebef",
    "muted": "#a7b0bc",
    "line": "#39414c",
    "link": "#7fbcff",
    "heat": "#a34a12",
    "fault": "#ff8f93",
    "warning": "#f2b84b",
    "note": "#7fbcff",
    "c0": "#6cb6ff",
    "c1": "#ff9d5c",
    "c2": "#4fd1a5",
    "c3": "#d29bf5",
    "c4": "#e5c04b",
    "c5": "#ff8ab8",
    "c6": "#a9b4c4",
    "c7": "#5cd0e6",
}
"""Colour roles by theme; tests hold text at a contrast of 4.5 and graphics at 3 against their grounds."""


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


def _style() -> str:
    series = "".join(f".c{i}{{--s:var(--c{i})}}" for i in range(8))
    return f"""
:root{{color-scheme:light dark;{_variables(LIGHT)}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}
{series}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--text);
 font:15px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}}
main,header{{max-width:1460px;margin:0 auto;padding:0 24px}}
header{{padding-top:28px}}
h1{{font-size:26px;line-height:1.2;margin:0 0 4px}}
h2{{font-size:19px;margin:34px 0 12px}}
h3{{font-size:15px;margin:0 0 2px}}
p{{margin:0 0 10px;max-width:90ch}}
a{{color:var(--link)}}
code{{font:13px/1.4 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}}
.muted{{color:var(--muted)}}
nav{{display:flex;flex-wrap:wrap;gap:4px 18px;padding:10px 0 0}}
.panel,figure,.figures>div{{background:var(--panel);border:1px solid var(--line);border-radius:8px}}
.panel{{padding:14px 16px;margin:0 0 14px;overflow-x:auto}}
.figures{{display:grid;gap:12px;margin:18px 0 0;
 grid-template-columns:repeat(auto-fill,minmax(max(190px,calc((100% - 36px)/4)),1fr))}}
.figures>div{{padding:10px 14px}}
.figures dt,.figures .muted{{font-size:13px;color:var(--muted)}}
.figures dd{{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}}
.figures dd small{{font-size:13px;font-weight:400;color:var(--muted)}}
.grid{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:14px}}
figure{{margin:0;padding:12px 14px 8px;break-inside:avoid;position:relative}}
.grid+p,.grid+.panel,.panel+.grid{{margin-top:14px}}
.unit,figcaption{{font-size:13px;color:var(--muted)}}
figcaption{{min-height:1.5em;padding-top:4px;font-variant-numeric:tabular-nums}}
.legend{{display:flex;flex-wrap:wrap;gap:0 14px;font-size:13px;list-style:none;margin:0;padding:0}}
.swatch{{margin-right:5px;vertical-align:middle}}
svg.plot{{display:block;width:100%;height:auto;overflow:visible;font-size:11px;font-variant-numeric:tabular-nums}}
svg line.grid{{stroke:var(--line);stroke-width:1;display:inline}}
svg .axis{{stroke:var(--muted)}}
svg .tick{{fill:var(--muted)}}
svg .mark{{fill:var(--text);paint-order:stroke;stroke:var(--panel);stroke-width:3px}}
svg .curve{{fill:none;stroke:var(--s);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
svg .faint{{stroke-width:1;opacity:.45}}
svg .dot{{fill:var(--s);stroke:none}}
svg .area,svg .bar{{fill:var(--s)}}
svg .area{{stroke:var(--panel);stroke-width:.6}}
svg .level{{stroke:var(--text);stroke-dasharray:4 3;stroke-width:1.2}}
svg .cell{{fill:none;stroke:var(--line)}}
svg .none{{stroke-dasharray:2 3}}
svg .heat{{fill:var(--heat)}}
svg .in{{fill:var(--text)}}
svg .cursor{{stroke:var(--muted);stroke-dasharray:2 2}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}}
th,td{{padding:5px 9px;text-align:right;border-bottom:1px solid var(--line)}}
td{{white-space:nowrap}}
th{{vertical-align:bottom;font-weight:600;line-height:1.3}}
th.left,td.left{{text-align:left}}
td.left{{white-space:normal}}
table.narrow{{width:auto;min-width:min(640px,100%)}}
tbody tr:last-child td{{border-bottom:0}}
th button{{all:unset;cursor:pointer;font:inherit}}
th button:focus-visible,a:focus-visible,summary:focus-visible{{outline:2px solid var(--link);outline-offset:2px}}
th button::after{{content:" \\2195";color:var(--muted)}}
th[aria-sort=ascending] button::after{{content:" \\2191";color:var(--text)}}
th[aria-sort=descending] button::after{{content:" \\2193";color:var(--text)}}
caption{{text-align:left;color:var(--muted);font-size:13px;padding-bottom:6px}}
.share{{display:inline-block;height:9px;background:var(--c0);border-radius:2px;margin-right:8px;vertical-align:baseline}}
.findings{{list-style:none;margin:0;padding:0}}
.findings li{{border-left:5px solid var(--s);background:var(--panel);border-radius:6px;padding:9px 14px;margin:0 0 8px;
 break-inside:avoid;box-shadow:0 0 0 1px var(--line)}}
.findings b{{color:var(--s);margin-right:6px}}
.findings .advice{{display:block;color:var(--muted);font-size:14px}}
.fault{{--s:var(--fault)}}.warning{{--s:var(--warning)}}.note{{--s:var(--note)}}
summary{{cursor:pointer;font-weight:600;padding:4px 0}}
.config{{columns:2 420px;column-gap:32px;font-size:13.5px}}
.config div{{break-inside:avoid;margin-bottom:10px}}
.config h3{{font-size:14px}}
.config dl{{display:grid;grid-template-columns:max-content 1fr;gap:0 14px;margin:0}}
.config dt{{color:var(--muted)}}
.config dd{{margin:0;overflow-wrap:anywhere}}
.skip{{position:absolute;left:-9999px}}.skip:focus{{left:24px}}
footer{{max-width:1460px;margin:30px auto;padding:0 24px;color:var(--muted);font-size:13px}}
@media (max-width:560px){{main,header,footer{{padding-left:12px;padding-right:12px}}}}
@media print{{body{{font-size:11px;background:#fff}}*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
 nav,.skip{{display:none}}
 main,header{{max-width:none;padding:0}}.grid{{grid-template-columns:1fr 1fr;gap:8px}}h2{{break-after:avoid;margin-top:18px}}
 table{{font-size:8.5px}}th,td{{padding:2px 3px}}th.left{{min-width:0!important}}.panel{{padding:8px 9px}}
 th button::after{{content:""!important}}
 .panel{{overflow:visible;break-inside:auto}}
 .figures{{grid-template-columns:repeat(4,1fr);gap:6px}}.figures dd{{font-size:16px}}
 tr{{break-inside:avoid}}thead{{display:table-header-group}}
 figcaption,.unit,.legend,caption,.figures .muted,.figures dt,.config,code,.findings .advice{{font-size:10px}}
 h1{{font-size:20px}}h2{{font-size:15px}}h3,.config h3{{font-size:11px}}.config{{columns:2 auto}}.config dl{{gap:0 8px}}}}
"""


SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0], key = row => row.cells[column].dataset.value;
      const order = (a, b) => {
        const x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        const difference = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -difference : difference;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
const show = value =>
  value === null ? "-" : value && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plot = JSON.parse(svg.dataset.plot), [left, top, right, bottom] = plot.box, [low, high] = plot.x;
  const caption = svg.closest("figure").querySelector("figcaption"), resting = caption.textContent;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const hide = () => { cursor.remove(); caption.textContent = resting; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    if (point.x < left || point.x > right) return hide();
    const wanted = low + (point.x - left) / (right - left) * (high - low);
    const nearer = (a, b) => Math.abs(a[0] - wanted) < Math.abs(b[0] - wanted) ? a : b;
    const near = points => points.reduce((best, p) => nearer(p, best));
    const found = plot.lines.filter(line => line.points.length).map(line => [line.name, near(line.points)]);
    const step = near(found.map(f => f[1]))[0];
    const x = left + (step - low) / (high - low) * (right - left);
    const place = {x1: x, x2: x, y1: top, y2: bottom, class: "cursor"};
    for (const [name, value] of Object.entries(place)) cursor.setAttribute(name, value);
    svg.append(cursor);
    const same = found.filter(f => f[1][0] === step);
    caption.textContent = step + ": " + same.map(f => (found.length > 1 ? f[0] + " " : "") + show(f[1][1])).join(", ");
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(item => { item.open = true; }));
"""


@dataclass(frozen=True)
class Column:
    """A column's heading; ``left`` for words, ``hint`` as its tooltip."""

    name: str
    left: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """What a cell shows (``html`` is trusted, made by ``text_cell`` and its like) and what it sorts by ('' sorts last)."""

    html: str
    key: str


def text_cell(text: str) -> Cell:
    return Cell(escape(text), text)


def number_cell(value: float | int | None, text: str) -> Cell:
    return Cell(escape(text), "" if value is None or not math.isfinite(value) else repr(float(value)))


def share_cell(value: float | None, text: str) -> Cell:
    """A share with a bar as long as it."""
    if value is None:
        return number_cell(None, text)
    return Cell(
        f'<span class="share" style="width:{60 * max(0.0, min(1.0, value)):.1f}px"></span>{escape(text)}', repr(float(value))
    )


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, caption: str, sortable: bool = True) -> str:
    """A table; with script, a click on a heading sorts by it."""
    heads = []
    for i, column in enumerate(columns):
        width = min(30, max((len(row[i].key) for row in rows), default=0))
        kind = f' class="left" style="min-width:{width}ch"' if column.left else ""
        hint = f' title="{escape(column.hint)}"' if column.hint else ""
        inner = f"<button{hint}>{escape(column.name)}</button>" if sortable else escape(column.name)
        heads.append(f'<th scope="col"{kind}>{inner}</th>')
    body = []
    for row in rows:
        cells = [
            f'<td{" class=left" if column.left else ""} data-value="{escape(cell.key)}">{cell.html}</td>'
            for column, cell in zip(columns, row, strict=True)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    kind = "sortable" if sortable else "narrow"
    return (
        f'<div class="panel"><table class="{kind}"><caption>{escape(caption)}</caption><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def findings_list(findings: Sequence[Finding], *, of: Mapping[int, str] | None = None) -> str:
    """Findings, gravest first; ``of`` names the run each belongs to by its index."""
    if not findings:
        return "<p>Nothing stands out: no fault, no warning.</p>"
    items = []
    for i, finding in enumerate(findings):
        run = f"<strong>{escape(of[i])}:</strong> " if of else ""
        items.append(
            f'<li class="{finding.severity}" data-code="{finding.code}"><b>{SEVERITY_WORDS[finding.severity]}</b>{run}'
            f'{escape(finding.text)}<span class="advice">{escape(finding.advice)}</span></li>'
        )
    return f'<ul class="findings">{"".join(items)}</ul>'


def document(*, title: str, header: str, body: str, footer: str) -> str:
    """The whole file."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n"
        f'<body><a class="skip" href="#findings">Skip to findings</a>\n<header>{header}</header>\n<main>{body}</main>\n'
        f"<footer>{footer}</footer>\n<script>{SCRIPT}</script></body></html>\n"
    )
