"""Attribution of a run's mismatch, as tables for a terminal and as JSON that marks what is measured and what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_trace.diagnostics.analysis import Analysis
from megatron_trace.diagnostics.attribution import (
    FLIP_RULES,
    GAP_RULES,
    Evidence,
    in_compute_order,
    pooled,
    pooled_adjacent,
    rule_shares,
    shares,
)
from megatron_trace.diagnostics.run_data import plain_dict
from megatron_trace.diagnostics.svg import figure, percent

MEASURED = ("noise", "gap", "flips", "adjacent_share", "values", "dlogp_alone", "dlogp_without")
COMPUTED = ("relative_error", "code_share_nearest", "code_share_run", "error_share_run", "coverage")
SWITCHES_MISSING = (
    "Contributions to |dlogp| by switching sites on one at a time were not measured in this run: the shares only count codes."
)


class NoEvidenceError(ValueError):
    """The run measured nothing per layer; the message names the setting that does."""


def attribute(a: Analysis, *, updates_newer: int | None = None) -> dict[str, Any]:
    """The JSON object of ``tools/replay_mismatch.py``; one entry per policy age, or that of ``updates_newer`` alone.

    Raises NoEvidenceError when there is none, or none of that age.
    """
    if not a.evidence:
        raise NoEvidenceError(
            f"{a.run.directory}: summary.json holds no evidence; finish a run with evidence.enabled=true to measure it"
        )
    chosen = [e for e in a.evidence if updates_newer in (None, e.updates_newer)]
    if not chosen:
        ages = ", ".join(str(e.updates_newer) for e in a.evidence)
        raise NoEvidenceError(f"--updates-newer={updates_newer}: this run measured policies {ages} updates newer")
    return plain_dict(
        {
            "run": a.run.name,
            "forward": None if a.treatment is None else a.treatment.forward,
            "measured": MEASURED,
            "computed": COMPUTED,
            "evidence": [_entry(a, e) for e in chosen],
            "errors": [],
        }
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Print ``attribute``'s result as tables."""
    for entry in result["evidence"]:
        age = entry["updates_newer"]
        policy = "the weights that sampled" if age == 0 else f"a policy {age} updates newer"
        console.print(f"\n[bold]{result['run']}[/]: {entry['tokens']:,} tokens, trainer with {policy}")
        console.print(_method_table(entry["methods"]))
        console.print(_site_table(entry["sites"], run=result["forward"]))
        console.print(
            f"All sites: {percent(entry['totals']['flips']['nearest'])} of codes differ to nearest, "
            f"{percent(entry['totals']['adjacent_share'])} of them by one codeword; whole codewords leave "
            f"{percent(entry['totals']['flips']['full'])}, one bit {percent(entry['totals']['flips']['compact'])}."
        )
        if not entry["site_switches_measured"]:
            console.print(SWITCHES_MISSING)


def _entry(a: Analysis, e: Evidence) -> dict[str, Any]:
    sites = in_compute_order(e.sites)
    nearest = rule_shares(sites, "nearest")
    own = {(s.layer, s.site): s for s in (shares(sites, a.treatment, a.counts) if a.treatment is not None else ())}
    switches = {(s.layer, s.site): s for s in e.switches}
    rows = []
    for site, share in zip(sites, nearest, strict=True):
        part, switch = own.get((site.layer, site.site)), switches.get((site.layer, site.site))
        rows.append(
            {
                "layer": site.layer,
                "site": site.site,
                "values": site.values,
                "noise": site.noise,
                "gap": dict(site.gap),
                "flips": dict(site.flips),
                "adjacent_share": site.adjacent_share,
                "full_worse_than_rtn": site.full_worse_than_rtn,
                "compact_worse_than_rtn": site.compact_worse_than_rtn,
                "relative_error": {rule: site.relative_error(rule) for rule in GAP_RULES},
                "code_share_nearest": share,
                "guided": None if part is None else part.guided,
                "coverage": None if part is None else part.coverage,
                "code_share_run": None if part is None else part.code_share,
                "error_share_run": None if part is None else part.error_share,
                "dlogp_alone": None if switch is None else switch.alone,
                "dlogp_without": None if switch is None else switch.without,
            }
        )
    return {
        "updates_newer": e.updates_newer,
        "tokens": e.tokens,
        "methods": [{"name": m.name, "mean": m.mean, "max": m.largest, "ratio_to_bf16": m.ratio} for m in e.methods],
        "sites": rows,
        "totals": {"flips": {rule: pooled(sites, rule) for rule in FLIP_RULES}, "adjacent_share": pooled_adjacent(sites)},
        "site_switches_measured": bool(switches),
    }


def _method_table(methods: Sequence[dict[str, Any]]) -> Table:
    view = Table(title="|dlogp| per token, measured on the same tokens", title_justify="left")
    view.add_column("method")
    for name in ("mean", "x BF16", "largest"):
        view.add_column(name, justify="right")
    for m in methods:
        view.add_row(m["name"], figure(m["mean"]), figure(m["ratio_to_bf16"]), figure(m["max"]))
    return view


def _site_table(sites: Sequence[dict[str, Any]], *, run: str | None) -> Table:
    switched = any(s["dlogp_alone"] is not None or s["dlogp_without"] is not None for s in sites)
    own = any(s["code_share_run"] is not None for s in sites)
    view = Table(title="By layer and site: measured, then shares computed from flips x values (*)", title_justify="left")
    heads = ["noise", "gap qat", "gap nearest", "gap full", "gap 1 bit", "differ nearest", "differ 1 bit", "adjacent"]
    heads += ["|dlogp| alone", "|dlogp| without"] if switched else []
    heads += ["share* nearest"] + ([f"share* {run}"] if own else [])
    view.add_column("layer", justify="right")
    view.add_column("site")
    for name in heads:
        view.add_column(name, justify="right")
    for s in sites:
        cells = [percent(s["noise"]), *(figure(s["gap"][rule]) for rule in GAP_RULES)]
        cells += [percent(s["flips"]["nearest"]), percent(s["flips"]["compact"]), percent(s["adjacent_share"])]
        cells += [figure(s["dlogp_alone"]), figure(s["dlogp_without"])] if switched else []
        cells += [percent(s["code_share_nearest"])] + ([percent(s["code_share_run"])] if own else [])
        view.add_row(str(s["layer"]), s["site"], *cells)
    return view
