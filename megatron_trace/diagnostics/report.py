"""The HTML report of one run, or of several side by side: sections made from an ``Analysis``. No torch, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megatron_trace.config import RunConfig
from megatron_trace.diagnostics import page
from megatron_trace.diagnostics.analysis import Analysis
from megatron_trace.diagnostics.attribution import Evidence, SiteGap, in_compute_order
from megatron_trace.diagnostics.compare import comparison_sections
from megatron_trace.diagnostics.drawing import chart_figure, plain_figure
from megatron_trace.diagnostics.findings import SEVERITIES
from megatron_trace.diagnostics.page import Cell, Column, number_cell, share_cell, text_cell
from megatron_trace.diagnostics.run_data import lookup, number
from megatron_trace.diagnostics.svg import bar_chart, figure, heat_map, percent

METHOD_WORDS = {
    "bf16": "BF16 rollout and trainer: the floor",
    "bf16_trainer": "quantised rollout, BF16 trainer",
    "qat": "trainer rounds to nearest with its own scales",
    "rtn_rollout_scale": "trainer rounds to nearest on the rollout's scale, all layers",
    "full": "whole codewords recorded, all layers",
    "trace_all": "one bit and the scale recorded, all layers",
    "trace_half": "one bit and the scale recorded, latter half of the layers",
    "trace": "the guidance settings of this run",
}
METHOD_COLORS = {"bf16": 6, "bf16_trainer": 1, "qat": 1, "rtn_rollout_scale": 4}
HEAT_MAPS = (
    ("noise", "Noise", "input difference before rounding, relative"),
    ("gap_qat", "Gap, own scales to nearest", "rounding difference over input difference"),
    ("gap_rtn_rollout_scale", "Gap, nearest on the rollout's scale", "rounding difference over input difference"),
    ("gap_trace_full", "Gap, whole codewords", "rounding difference over input difference"),
    ("gap_trace_compact", "Gap, one bit", "rounding difference over input difference"),
    ("flips_nearest", "Codes that differ, to nearest", "share of values, rollout's scale"),
    ("flips_full", "Codes that differ, whole codewords", "share of values"),
    ("flips_compact", "Codes that differ, one bit", "share of values"),
)


def render(analyses: Sequence[Analysis]) -> str:
    """The report as one self-contained HTML text; several analyses are compared first, then shown one by one."""
    if len(analyses) == 1:
        one = analyses[0]
        body, title = _run_sections(one, prefix=""), one.run.name
        lead = _lead(one)
    else:
        title = "Comparison of " + ", ".join(a.run.name for a in analyses)
        lead = f"{len(analyses)} runs side by side, then each by itself."
        body = comparison_sections(analyses)
        for i, one in enumerate(analyses):
            body += (
                f'<details id="run{i}"><summary>{escape(one.run.name)}: everything about this run</summary>'
                f'<p class="muted">{_lead(one)}</p>{_run_sections(one, prefix=f"run{i}-")}</details>'
            )
    header = f"<h1>{escape(title)}</h1><p class='muted'>{lead}</p>{_navigation(analyses)}"
    footer = (
        "Made by tools/report.py from config.json, metrics.jsonl and summary.json. docs/diagnostics.md explains each figure."
    )
    return page.document(title=f"{title} · megatron-trace", header=header, body=body, footer=footer)


def _lead(a: Analysis) -> str:
    state = "finished" if a.run.summary is not None else "not finished"
    of = f" of {a.run.planned_steps}" if a.run.planned_steps is not None else ""
    parts = [f"{state}, step {a.run.last_step}{of}"]
    if a.treatment is not None:
        parts.append(f"trainer forward {a.treatment.forward}")
    seed = lookup(a.run.config, "run.seed")
    if seed is not None:
        parts.append(f"seed {seed}")
    return escape(" · ".join(parts))


def _navigation(analyses: Sequence[Analysis]) -> str:
    if len(analyses) > 1:
        links = [
            ("findings", "Findings"),
            ("compare", "Figures"),
            ("curves", "Curves"),
            ("methods", "Methods"),
            ("settings", "Settings"),
        ]
        links += [(f"run{i}", a.run.name) for i, a in enumerate(analyses)]
    else:
        names = ("Findings", "Curves", "Sites", "Methods", "Guidance", "Health", "Configuration")
        links = [(name.lower(), name) for name in names]
    return (
        "<nav aria-label='Sections'>" + "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in links) + "</nav>"
    )


def _run_sections(a: Analysis, *, prefix: str) -> str:
    return "".join(
        (
            _headline(a),
            _section(prefix + "findings", "What to look at", page.findings_list(a.findings)),
            _section(prefix + "curves", "Curves", _curves(a)),
            _section(prefix + "sites", "Mismatch by layer and site", _sites(a)),
            _section(prefix + "methods", "Methods on the same tokens", _methods(a.evidence)),
            _section(prefix + "guidance", "Guidance", _guidance(a)),
            _section(prefix + "health", "Health", _health(a)),
            _section(prefix + "configuration", "Configuration and precision contract", _configuration(a)),
        )
    )


def _section(anchor: str, title: str, inner: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{inner}</section>'


def _headline(a: Analysis) -> str:
    h = a.headline
    accuracy = f"{percent(h['accuracy_warmup'])} → {percent(h['accuracy_final'])}" if h["accuracy_final"] is not None else "–"
    counted = {severity: sum(f.severity == severity for f in a.findings) for severity in SEVERITIES}
    words = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counted.items() if n) or "none"
    rows = [
        ("Findings", words, ""),
        ("Held-out accuracy", accuracy, "after warm-up → at the end"),
        ("Reward", f"{figure(h['reward_first'])} → {figure(h['reward_recent'])}", "first step → mean of the last ten"),
        ("|Δ log p|", figure(h["dlogp_recent"]), "mean of the last ten steps"),
        ("KL(rollout ‖ trainer)", figure(h["kl_recent"]), "nats per token, last ten steps"),
        (
            "Guidance",
            f"{figure(h['guidance_bytes_per_token'])} <small>bytes/token</small>",
            f"{_bytes(h['guidance_bytes'])} for all responses",
        ),
        ("Speed", f"{figure(h['tokens_per_second'])} <small>tokens/s</small>", f"{figure(h['seconds_per_step'])} s a step"),
        ("Time and memory", f"{_duration(h['seconds'])}", f"peak {figure(h['peak_rss_gib'])} GiB, all ranks"),
    ]
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{value}</dd><span class="muted">{escape(hint)}</span></div>'
        for name, value, hint in rows
    )
    return f'<dl class="figures">{cells}</dl>'


def _curves(a: Analysis) -> str:
    if not a.charts:
        return "<p>No step has been recorded.</p>"
    missing = f'<p class="muted">Not recorded: {escape(", ".join(a.missing))}.</p>' if a.missing else ""
    zero = f'<p class="muted">Zero at every step: {escape(", ".join(a.zero))}.</p>' if a.zero else ""
    return f'<div class="grid">{"".join(chart_figure(chart) for chart in a.charts)}</div>{zero}{missing}'


def _sites(a: Analysis) -> str:
    evidence = a.fresh
    if evidence is None or not evidence.sites:
        return "<p>Not measured: per-layer figures come with a finished run and evidence.enabled=true.</p>"
    age = "the weights that sampled them" if not evidence.updates_newer else f"a policy {evidence.updates_newer} updates newer"
    lead = (
        f"<p>Measured on {evidence.tokens:,} held-out response tokens with {age}. Noise is how far apart the two sides' "
        "values are "
        "before rounding; a gap of 1 means that rounding makes them differ as much as they did before, 0 that it makes "
        "them equal. "
        "A dashed cell had equal inputs on both sides, or was not measured.</p>"
    )
    return lead + f'<div class="grid">{_heat_maps(evidence)}</div>' + _site_table(a, evidence)


def _heat_maps(evidence: Evidence) -> str:
    sites = list(dict.fromkeys(s.site for s in in_compute_order(evidence.sites)))
    layers = sorted({s.layer for s in evidence.sites})
    by_key = {(s.layer, s.site): s for s in evidence.sites}
    figures = []
    for key, title, unit in HEAT_MAPS:
        family = [k for k, _, _ in HEAT_MAPS if k.split("_")[0] == key.split("_")[0]]
        top = max((v for s in evidence.sites for k in family if (v := _measured(s, k)) is not None), default=0.0)
        write = figure if key.startswith("gap") else percent

        def value(row: int, column: int, key: str = key) -> float | None:
            site = by_key.get((layers[column], sites[row]))
            return None if site is None else _measured(site, key)

        known = [(value(r, c), layers[c], sites[r]) for r in range(len(sites)) for c in range(len(layers))]
        largest = max((k for k in known if k[0] is not None), default=None, key=lambda k: k[0])  # type: ignore[arg-type, return-value]
        words = "not measured" if largest is None else f"largest {write(largest[0])} at {largest[2]} of layer {largest[1]}"
        if largest is not None and largest[0] == 0:
            words = "0 everywhere"
        drawing = heat_map(sites, [str(n) for n in layers], value, label=f"{title}: {words}", top_value=top, write=write)
        figures.append(plain_figure(title, unit, drawing, words))
    return "".join(figures)


def _measured(site: SiteGap, key: str) -> float | None:
    kind, _, rule = key.partition("_")
    return site.noise if kind == "noise" else (site.gap if kind == "gap" else site.flips).get(rule)


def _site_table(a: Analysis, evidence: Evidence) -> str:
    parts = {(p.layer, p.site): p for p in a.shares}
    columns = [
        Column("layer"),
        Column("site", left=True),
        Column("guided", left=True, hint="whether the run's own settings guide this site"),
        Column(
            "share of remaining differences",
            hint="codes expected to differ under the run's settings: flips x values (computed)",
        ),
        Column("share of squared error", hint="values x (gap x noise)^2 under the run's settings (computed)"),
        Column("noise"),
        Column("gap, own scales"),
        Column("gap, rollout's scale"),
        Column("gap, whole"),
        Column("gap, one bit"),
        Column("differ, nearest"),
        Column("differ, one bit"),
        Column("adjacent", hint="share of the differing codes under nearest that are one codeword away"),
        Column("values"),
    ]
    rows = []
    for s in in_compute_order(evidence.sites):
        part = parts.get((s.layer, s.site))
        guided = "–" if part is None else (f"yes, {percent(part.coverage)} of tokens" if part.guided else "no")
        shares = (None, None) if part is None else (part.code_share, part.error_share)
        rows.append(
            [
                number_cell(s.layer, str(s.layer)),
                text_cell(s.site),
                text_cell(guided),
                share_cell(shares[0], percent(shares[0])),
                share_cell(shares[1], percent(shares[1])),
                number_cell(s.noise, percent(s.noise)),
                *(number_cell(s.gap[rule], figure(s.gap[rule])) for rule in s.gap),
                number_cell(s.flips["nearest"], percent(s.flips["nearest"])),
                number_cell(s.flips["compact"], percent(s.flips["compact"])),
                number_cell(s.adjacent_share, percent(s.adjacent_share)),
                number_cell(s.values, f"{s.values:,}"),
            ]
        )
    caption = (
        "Every site. Shares are computed from the measured figures and say where to look, not how much |Δ log p| a site causes."
    )
    return page.table(columns, rows, caption=caption)


def _methods(evidence: Sequence[Evidence]) -> str:
    if not any(e.methods for e in evidence):
        return "<p>Not measured: the methods are compared at the end of a run with evidence.enabled=true.</p>"
    names = list(dict.fromkeys(m.name for e in evidence for m in e.methods))
    columns = [Column("method", left=True), Column("what the trainer does", left=True)]
    for e in evidence:
        age = age_words(e)
        columns += [Column(f"mean |Δ log p|, {age}"), Column(f"× BF16, {age}"), Column(f"largest, {age}")]
    rows = []
    for name in names:
        row: list[Cell] = [text_cell(name), text_cell(METHOD_WORDS.get(name, ""))]
        for e in evidence:
            m = e.method(name)
            for value in (None, None, None) if m is None else (m.mean, m.ratio, m.largest):
                row.append(number_cell(value, figure(value)))
        rows.append(row)
    tokens = ", ".join(f"{e.tokens:,} tokens {age_words(e)}" for e in evidence)
    text = page.table(columns, rows, caption=f"The same tokens scored by each rounding of the trainer ({tokens}).")
    return text + f'<div class="grid">{"".join(_method_bars(e) for e in evidence if e.methods)}</div>'


def _method_bars(e: Evidence) -> str:
    bars = [(m.name, m.ratio, METHOD_COLORS.get(m.name, 0)) for m in e.methods]
    words = ", ".join(f"{m.name} {figure(m.ratio)}" for m in e.methods)
    title = f"|Δ log p| over BF16's own, {age_words(e)}"
    return plain_figure(title, "logarithmic", bar_chart(bars, label=f"{title}: {words}", level=("BF16", 1.0)), "")


def age_words(e: Evidence) -> str:
    """``same weights`` or ``2 updates newer``."""
    return "same weights" if e.updates_newer == 0 else f"{e.updates_newer} updates newer"


def _guidance(a: Analysis) -> str:
    t, h = a.treatment, a.headline
    if t is None:
        words = "The configuration does not say how the run was guided."
    elif t.forward != "guided":
        words = f"The trainer's forward is {t.forward}: nothing was guided."
    else:
        layers = ", ".join(map(str, t.layers)) or "none"
        kind = {"1": "one bit and the scale", "4": "whole codewords", "syndrome": "syndromes"}.get(t.bits, f"{t.bits} bits")
        words = (
            f"Guided: {', '.join(t.sites)} in layers {layers}, {kind}; {figure(h['guidance_bytes_per_token'])} bytes per token."
        )
    if not a.counts:
        return f"<p>{escape(words)}</p>"
    columns = [
        Column("site", left=True),
        Column("guided tokens"),
        Column("rounded to nearest for want of a record"),
        Column("coverage"),
        Column("codes that differ, to nearest", hint="mean over steps, training tokens, guided layers"),
        Column("codes that differ, guided", hint="mean over steps, training tokens, guided layers"),
    ]
    rows = []
    for site, (guided, fallback) in a.counts.items():
        share = guided / (guided + fallback) if guided + fallback else None
        without, with_it = (a.run.mean(f"sites.{site}.flip_rate_{k}_guidance") for k in ("without", "with"))
        rows.append(
            [
                text_cell(site),
                number_cell(guided, f"{guided:,.0f}"),
                number_cell(fallback, f"{fallback:,.0f}"),
                number_cell(share, percent(share)),
                number_cell(without, percent(without)),
                number_cell(with_it, percent(with_it)),
            ]
        )
    caption = "Over all steps; a token counts once at each guided layer of a site."
    return f"<p>{escape(words)}</p>" + page.table(columns, rows, caption=caption)


def _health(a: Analysis) -> str:
    rows = [[text_cell(name), _health_cell(name, value)] for name, value in a.health.items()]
    text = page.table([Column("counter", left=True), Column("value")], rows, caption="Over all steps.", sortable=False)
    rows = [
        [text_cell(kind), text_cell(str(operation)), number_cell(number(count), figure(number(count)))]
        for kind, section in (("call", "calls"), ("fallback", "fallbacks"))
        for operation, count in _mapping(lookup(a.run.summary or {}, f"numerics.{section}")).items()
    ]
    if rows:
        columns = [Column("kind", left=True), Column("operation", left=True), Column("count")]
        text += page.table(columns, rows, caption="Which code path rounded, and why a faster one was not taken.")
    return text


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _health_cell(name: str, value: float | None) -> Cell:
    return number_cell(value, percent(value) if "share" in name else figure(value))


def _configuration(a: Analysis) -> str:
    sections = []
    for name, values in a.run.config.items():
        if isinstance(values, Mapping):
            sections.append(_settings(name, values))
    config = f'<details class="panel"><summary>Every setting</summary><div class="config">{"".join(sections)}</div></details>'
    host = {
        k: (a.run.summary or {}).get(k) for k in ("compute", "host", "contract_fingerprint") if (a.run.summary or {}).get(k)
    }
    text = (
        f'<div class="panel config">{_settings("machine and contract", host)}{_contract(a)}</div>'
        if host or a.run.config
        else ""
    )
    return text + (config if sections else "<p>config.json is missing.</p>")


def _contract(a: Analysis) -> str:
    """The precision contract of the configuration, if this version can read it, and whether the run had the same."""
    try:
        contract = RunConfig.model_validate(dict(a.run.config)).contract
    except ValueError:
        return "<div><h3>precision contract</h3><p>This version cannot read the run's configuration.</p></div>"
    values = contract.to_dict()
    recorded = (a.run.summary or {}).get("contract_fingerprint")
    if recorded and recorded != contract.fingerprint:
        values = {"note": "the run's fingerprint is another one: it was made by a version with another contract", **values}
    return _settings("precision contract", values) + _settings(
        "environment", contract.environment() or {"none": "nothing is quantised"}
    )


def _settings(name: str, values: Mapping[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(str(k))}</dt><dd><code>{escape(_setting(v))}</code></dd>" for k, v in _flat(values))
    return f"<div><h3>{escape(name)}</h3><dl>{rows}</dl></div>"


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{before}{key}"
        out += _flat(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return out


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_setting, value)) or "none"
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{figure(value)} {unit}"
        value /= 1024
    raise AssertionError


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
