"""Several runs side by side: findings, figures, curves, methods, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from megatron_trace.diagnostics import page
from megatron_trace.diagnostics.analysis import Analysis
from megatron_trace.diagnostics.drawing import comparison_figure
from megatron_trace.diagnostics.page import Cell, Column, number_cell, text_cell
from megatron_trace.diagnostics.run_data import lookup, number
from megatron_trace.diagnostics.svg import figure, percent

CHARTS = ("reward", "accuracy", "dlogp", "kl", "entropy", "clip", "rho_max", "ess", "grad_norm", "shape", "speed", "warmup")
NOT_COMPARED = frozenset({"run.name", "run.output_dir"})


def with_distinct_names(analyses: Sequence[Analysis]) -> list[Analysis]:
    """Runs of one name are told apart by their directories."""
    names = [a.run.name for a in analyses]
    out = []
    for a in analyses:
        if names.count(a.run.name) > 1:
            section = lookup(a.run.config, "run")
            run = {**(section if isinstance(section, Mapping) else {}), "name": f"{a.run.name} ({a.run.directory})"}
            a = replace(a, run=replace(a.run, config={**a.run.config, "run": run}))
        out.append(a)
    return out


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Dotted setting -> value by run, for settings in which the runs differ; None where a run has no such setting."""
    flat = {name: _flat(config) for name, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    found = {key: {name: values.get(key) for name, values in flat.items()} for key in keys if key not in NOT_COMPARED}
    return {key: values for key, values in found.items() if len({repr(v) for v in values.values()}) > 1}


def method_means(analyses: Sequence[Analysis]) -> dict[int, dict[str, dict[str, float | None]]]:
    """Policy age in updates -> method -> run -> mean \\|dlogp\\|."""
    out: dict[int, dict[str, dict[str, float | None]]] = {}
    for a in analyses:
        for e in a.evidence:
            for m in e.methods:
                out.setdefault(e.updates_newer, {}).setdefault(m.name, {})[a.run.name] = m.mean
    return dict(sorted(out.items()))


def comparison_sections(analyses: Sequence[Analysis]) -> str:
    """The part of a report that speaks of all runs at once."""
    return "".join(
        (
            f'<section id="findings"><h2>What to look at</h2>{_findings(analyses)}</section>',
            f'<section id="compare"><h2>Figures</h2>{_figures(analyses)}</section>',
            f'<section id="curves"><h2>Curves</h2><div class="grid">{_curves(analyses)}</div></section>',
            f'<section id="methods"><h2>Methods on the same tokens</h2>{_methods(analyses)}</section>',
            f'<section id="settings"><h2>Settings that differ</h2>{_settings(analyses)}</section>',
        )
    )


def _findings(analyses: Sequence[Analysis]) -> str:
    grave = [(f, a.run.name) for a in analyses for f in a.findings if f.severity != "note"]
    grave.sort(key=lambda item: item[0].severity != "fault")
    return page.findings_list([f for f, _ in grave], of=dict(enumerate(name for _, name in grave)))


def _figures(analyses: Sequence[Analysis]) -> str:
    columns = [
        Column("run", left=True),
        Column("trainer forward", left=True),
        Column("seed"),
        Column("steps"),
        Column("accuracy, warm-up"),
        Column("accuracy, end"),
        Column("reward, last ten"),
        Column("|Δ log p|, last ten"),
        Column("KL, last ten"),
        Column("guidance bytes/token"),
        Column("tokens/s"),
        Column("s/step"),
        Column("findings", left=True),
    ]
    rows = []
    for i, a in enumerate(analyses):
        h = a.headline
        seed = number(lookup(a.run.config, "run.seed"))
        link = Cell(f'<a href="#run{i}">{escape(a.run.name)}</a>', a.run.name)
        counted = [(s, sum(f.severity == s for f in a.findings)) for s in ("fault", "warning", "note")]
        words = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counted if n) or "none"
        rows.append(
            [
                link,
                text_cell(a.treatment.forward if a.treatment is not None else "–"),
                number_cell(seed, figure(seed)),
                number_cell(a.run.last_step, str(a.run.last_step)),
                number_cell(h["accuracy_warmup"], percent(h["accuracy_warmup"])),
                number_cell(h["accuracy_final"], percent(h["accuracy_final"])),
                *(number_cell(h[k], figure(h[k])) for k in ("reward_recent", "dlogp_recent", "kl_recent")),
                *(
                    number_cell(h[k], figure(h[k]))
                    for k in ("guidance_bytes_per_token", "tokens_per_second", "seconds_per_step")
                ),
                text_cell(words),
            ]
        )
    return page.table(columns, rows, caption="One row a run; a heading sorts.")


def _curves(analyses: Sequence[Analysis]) -> str:
    figures = []
    for key in CHARTS:
        charts = [(a.run.name, chart) for a in analyses if (chart := a.chart(key)) is not None]
        if charts:
            figures.append(comparison_figure(charts))
    return "".join(figures) or "<p>No step has been recorded.</p>"


def _methods(analyses: Sequence[Analysis]) -> str:
    ages = method_means(analyses)
    if not ages:
        return "<p>Not measured in any of these runs.</p>"
    names = [a.run.name for a in analyses if a.evidence]
    parts = []
    for age, methods in ages.items():
        rows = []
        for method, by_run in methods.items():
            cells = [text_cell(method)]
            for name in names:
                value, floor = by_run.get(name), methods.get("bf16", {}).get(name)
                ratio = value / floor if value is not None and floor else None
                cells += [number_cell(value, figure(value)), number_cell(ratio, figure(ratio))]
            rows.append(cells)
        columns = [Column("method", left=True)]
        for name in names:
            columns += [Column(f"{name}, mean |Δ log p|"), Column("× BF16")]
        words = "with the weights that sampled" if age == 0 else f"with a policy {age} updates newer"
        parts.append(page.table(columns, rows, caption=f"Mean |Δ log p| {words}; each run on its own tokens."))
    return "".join(parts)


def _settings(analyses: Sequence[Analysis]) -> str:
    found = differences({a.run.name: a.run.config for a in analyses})
    if not found:
        return "<p>None but the name.</p>"
    columns = [Column("setting", left=True), *(Column(a.run.name, left=True) for a in analyses)]
    rows = [[text_cell(key), *(text_cell(_shown(values[a.run.name])) for a in analyses)] for key, values in found.items()]
    return page.table(columns, rows, caption="Resolved settings that are not the same in all runs.")


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "–" if value is None else str(value)
