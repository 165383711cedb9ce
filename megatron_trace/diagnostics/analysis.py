"""All that a report says about one run, as data: curves, evidence, shares, coverage, headline figures, findings. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_trace.diagnostics import findings as f
from megatron_trace.diagnostics import site_findings as local
from megatron_trace.diagnostics.attribution import (
    Evidence,
    SiteShare,
    Treatment,
    coverage,
    read_evidence,
    read_treatment,
    shares,
    site_dict,
)
from megatron_trace.diagnostics.findings import Finding
from megatron_trace.diagnostics.run_data import Point, RunData, is_number, lookup, mean, number, plain_dict

OWN_METHOD = {"guided": "trace", "qat": "qat", "bf16": "bf16_trainer"}
"""Trainer forward -> method of the evidence that rounds alike (for a quantised rollout)."""
RECENT = 10
"""Steps whose mean stands for the end of the run."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Curves that belong together. ``kind``: ``line`` or ``stack`` (stacked areas); ``level``: a line to compare with."""

    key: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    log: bool = False
    kind: str = "line"
    level: tuple[str, float] | None = None


@dataclass(frozen=True)
class Analysis:
    """One run, analysed. ``missing`` names charts without a single value, ``zero`` those that are 0 at every step."""

    run: RunData
    charts: tuple[Chart, ...]
    missing: tuple[str, ...]
    zero: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    treatment: Treatment | None
    counts: Mapping[str, tuple[float, float]]
    shares: tuple[SiteShare, ...]
    headline: Mapping[str, float | None]
    health: Mapping[str, float | None]
    findings: tuple[Finding, ...]

    @property
    def fresh(self) -> Evidence | None:
        """Evidence of the policy that sampled it; else the least stale."""
        return self.evidence[0] if self.evidence else None

    def chart(self, key: str) -> Chart | None:
        return next((chart for chart in self.charts if chart.key == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: what the report shows, machine-readable."""
        return plain_dict(
            {
                "name": self.run.name,
                "directory": str(self.run.directory),
                "finished": self.run.summary is not None,
                "last_step": self.run.last_step,
                "planned_steps": self.run.planned_steps,
                "headline": self.headline,
                "findings": [asdict(finding) for finding in self.findings],
                "health": self.health,
                "coverage": {
                    site: {"guided_tokens": guided, "fallback_tokens": fallback}
                    for site, (guided, fallback) in self.counts.items()
                },
                "treatment": None if self.treatment is None else asdict(self.treatment),
                "evidence": [{**asdict(e), "sites": [site_dict(site) for site in e.sites]} for e in self.evidence],
                "shares": [asdict(share) for share in self.shares],
                "charts": [asdict(chart) for chart in self.charts],
                "not_recorded": self.missing,
                "zero_throughout": self.zero,
            }
        )


def analyse(run: RunData) -> Analysis:
    """Compute everything from what the run left."""
    evidence, treatment, counts = read_evidence(run), read_treatment(run.config), coverage(run)
    parts = shares(evidence[0].sites, treatment, counts) if evidence and treatment is not None else ()
    charts = _charts(run)
    with_values = [chart for chart in charts if any(v is not None for c in chart.curves for _, v in c.points)]
    drawn = tuple(chart for chart in with_values if any(v != 0 for c in chart.curves for _, v in c.points))
    return Analysis(
        run=run,
        charts=drawn,
        missing=tuple(chart.title for chart in charts if chart not in with_values),
        zero=tuple(chart.title for chart in with_values if chart not in drawn),
        evidence=evidence,
        treatment=treatment,
        counts=counts,
        shares=parts,
        headline=_headline(run),
        health=_health(run),
        findings=_findings(run, evidence, treatment, counts, parts),
    )


# ---- figures -------------------------------------------------------------------------------------------------------


def _headline(run: RunData) -> dict[str, float | None]:
    summary = run.summary or {}
    bytes_per_token = number(summary.get("guidance_bytes_per_token"))
    recorded = run.series("guidance_bytes_per_token")
    if bytes_per_token is None and recorded:
        bytes_per_token = recorded[-1][1]
    phases = [sum(v for v in record["seconds"].values() if is_number(v)) for record in run.steps if _has_phases(record)]
    return {
        "accuracy_warmup": number(summary.get("accuracy_warmup")),
        "accuracy_final": number(summary.get("accuracy_final")),
        "reward_first": _first(run.series("reward")),
        "reward_recent": _recent(run.series("reward")),
        "dlogp_recent": _recent(run.series("policy.dlogp_mean")),
        "kl_recent": _recent(run.series("policy.kl_k3")),
        "tokens_per_second": mean(v for _, v in run.series("tokens_per_second")),
        "seconds_per_step": mean(phases),
        "seconds": number(summary.get("seconds")),
        "peak_rss_gib": number(summary.get("peak_rss_gib")),
        "guidance_bytes_per_token": bytes_per_token,
        "guidance_bytes": None if bytes_per_token is None else bytes_per_token * run.total("response_tokens"),
        "guided_fraction": number(summary.get("guided_fraction")),
        "response_tokens": run.total("response_tokens"),
    }


def _health(run: RunData) -> dict[str, float | None]:
    """Counters of what can go wrong, over all steps; None where no step recorded them."""
    policy = "policy"
    return {
        "updates skipped": _total(run, "skipped_updates"),
        "tokens with a non-finite log-probability": _total(run, f"{policy}.nonfinite_tokens"),
        "responses cut at the length limit (mean share)": run.mean("truncated_fraction_of_samples"),
        "prompts without reward variance (mean share)": run.mean("zero_variance_fraction"),
        "tokens clipped (mean share)": run.mean(f"{policy}.clip_fraction"),
        "importance weights truncated (mean share)": run.mean(f"{policy}.truncated_fraction"),
        "smallest effective sample size": _least(run.series(f"{policy}.ess")),
        "largest importance weight": _most(run.series(f"{policy}.rho_max")),
        "largest |Δ log p|": _most(run.series(f"{policy}.dlogp_max")),
        "site tokens rounded to nearest for want of a record": sum(x for _, x in coverage(run).values()) if run.steps else None,
    }


def _findings(
    run: RunData,
    evidence: tuple[Evidence, ...],
    treatment: Treatment | None,
    counts: Mapping[str, tuple[float, float]],
    parts: tuple[SiteShare, ...],
) -> tuple[Finding, ...]:
    config, summary = run.config, run.summary or {}
    fresh = evidence[0] if evidence else None
    sites = fresh.sites if fresh is not None else ()
    per_step = lookup(config, "algorithm.updates_per_rollout")
    quantized = lookup(config, "precision.rollout") != "bf16"
    method = OWN_METHOD.get(treatment.forward) if treatment is not None and quantized else None
    found: list[Finding | None] = [
        f.interrupted(last_step=run.last_step, planned=run.planned_steps, has_summary=run.summary is not None),
        *f.unreadable(run.problems),
        f.no_evidence(enabled=lookup(config, "evidence.enabled"), has_summary=run.summary is not None, entries=len(evidence)),
        f.skipped_updates(
            skipped=run.total("skipped_updates"), updates=len(run.steps) * int(per_step if is_number(per_step) else 1)
        ),
        f.nonfinite_tokens(count=run.total("policy.nonfinite_tokens"), tokens=run.total("policy.tokens")),
        f.nonfinite_metrics(_broken(run)),
        f.length_limit(share=run.mean("truncated_fraction_of_samples"), limit=lookup(config, "rollout.max_new_tokens")),
        f.zero_variance(share=run.mean("zero_variance_fraction")),
        f.reward_fell(run.series("reward")),
        f.accuracy_fell(
            before=number(summary.get("accuracy_warmup")),
            after=number(summary.get("accuracy_final")),
            problems=summary.get("heldout_problems"),
        ),
        f.mismatch_grows(run.series("policy.dlogp_mean")),
        f.mismatch_beyond_evidence(recent=_recent(run.series("policy.dlogp_mean")), evidence=fresh, method=method),
        f.lopsided(run.series("policy.asymmetry")),
        f.importance_weights(truncated=run.mean("policy.truncated_fraction"), smallest_ess=_least(run.series("policy.ess"))),
        f.clipping(share=run.mean("policy.clip_fraction")),
        *f.low_coverage(counts, prompt_tokens=lookup(config, "guidance.prompt_tokens")),
        *f.silent_sites(counts, treatment),
        *f.unguided_sites(treatment, parts),
        f.guidance_does_not_help(fresh, treatment),
        f.beyond_floor(fresh),
        local.inputs_differ(fresh),
        *local.recorded_scale_wrong(sites),
        *local.own_scale_wrong(sites),
        *local.worse_than_nearest(sites),
        f.dominant_site(parts, treatment),
    ]
    kept = [finding for finding in found if finding is not None]
    return tuple(sorted(kept, key=lambda finding: (f.SEVERITIES.index(finding.severity), finding.layer is None)))


def _broken(run: RunData) -> dict[str, int]:
    """Metrics with a NaN or infinite value -> number of steps."""
    paths = ["reward", "loss", "grad_norm", *(f"policy.{key}" for key in run.keys("policy"))]
    counted = {path: sum(value is None for _, value in run.series(path)) for path in paths}
    return {path: count for path, count in counted.items() if count}


# ---- charts --------------------------------------------------------------------------------------------------------


def _charts(run: RunData) -> list[Chart]:
    def chart(key: str, title: str, unit: str, *curves: tuple[str, str], log: bool = False, **more: Any) -> Chart:
        return Chart(key, title, unit, tuple(Curve(name, tuple(run.series(path))) for name, path in curves), log, **more)

    truncation = number(lookup(run.config, "algorithm.truncation"))
    return [
        chart("reward", "Reward", "mean of a step's samples", ("reward", "reward")),
        Chart("accuracy", "Held-out accuracy", "greedy, share of problems", (Curve("accuracy", tuple(_accuracies(run))),)),
        chart(
            "dlogp",
            "|Δ log p|, trainer against rollout",
            "per response token",
            ("mean", "policy.dlogp_mean"),
            ("95th percentile", "policy.dlogp_p95"),
            ("largest", "policy.dlogp_max"),
            log=True,
        ),
        chart("kl", "KL(rollout ‖ trainer)", "k3 estimate, nats per token", ("KL", "policy.kl_k3"), log=True),
        chart("entropy", "Entropy", "nats per token", ("entropy", "policy.entropy")),
        chart(
            "clip",
            "Clipped tokens",
            "share of response tokens",
            ("above", "policy.clip_fraction_high"),
            ("below", "policy.clip_fraction_low"),
        ),
        chart(
            "rho_max",
            "Largest importance weight",
            "trainer over rollout probability",
            ("largest", "policy.rho_max"),
            level=None if truncation is None else ("truncation", truncation),
        ),
        chart("ess", "Effective sample size", "share of tokens", ("ESS", "policy.ess")),
        Chart("flips", "Codes that differ from the rollout's", "share of values at guided sites", _flip_curves(run), True),
        Chart("coverage", "Guidance coverage", "share of site tokens with a valid record", _coverage_curves(run)),
        chart(
            "shape",
            "Responses and prompts",
            "share",
            ("responses cut at the length limit", "truncated_fraction_of_samples"),
            ("prompts without reward variance", "zero_variance_fraction"),
        ),
        chart("loss", "Loss", "per response token", ("loss", "loss")),
        chart("grad_norm", "Gradient norm", "before clipping", ("gradient norm", "grad_norm"), log=True),
        chart(
            "skips",
            "Skipped and non-finite",
            "updates, tokens",
            ("updates skipped", "skipped_updates"),
            ("non-finite tokens", "policy.nonfinite_tokens"),
        ),
        chart("speed", "Tokens per second", "response tokens over rollout time", ("tokens/s", "tokens_per_second")),
        Chart("phases", "Seconds per phase", "each step, stacked", _phase_curves(run), kind="stack"),
        Chart("warmup", "Warm-up loss", "imitation, per token", (Curve("loss", tuple(run.warmup_series("loss"))),), True),
    ]


def _accuracies(run: RunData) -> list[Point]:
    """Evaluations during the run, between those after warm-up and at the end that the summary keeps."""
    points = dict(run.series("accuracy"))
    summary = run.summary or {}
    before, after = number(summary.get("accuracy_warmup")), number(summary.get("accuracy_final"))
    if before is not None:
        points.setdefault(0.0, before)
    if after is not None:
        points.setdefault(number(summary.get("steps")) or float(run.last_step), after)
    return sorted(points.items())


def _flip_curves(run: RunData) -> tuple[Curve, ...]:
    curves = []
    for site in run.keys("sites"):
        for suffix, key in (("to nearest", "flip_rate_without_guidance"), ("guided", "flip_rate_with_guidance")):
            points = tuple(run.series(f"sites.{site}.{key}"))
            if points:
                curves.append(Curve(f"{site} {suffix}", points))
    return tuple(curves)


def _coverage_curves(run: RunData) -> tuple[Curve, ...]:
    curves = []
    for site in run.keys("sites"):
        guided, fallback = run.series(f"sites.{site}.guided_tokens"), dict(run.series(f"sites.{site}.fallback_tokens"))
        points = tuple(
            (step, value / total)
            for step, value in guided
            if value is not None and (total := value + (fallback.get(step) or 0.0)) > 0
        )
        if points:
            curves.append(Curve(site, points))
    return tuple(curves)


def _phase_curves(run: RunData) -> tuple[Curve, ...]:
    """Seconds per phase; a step without a phase spent none in it."""
    names = run.keys("seconds")
    steps = [record for record in run.steps if _has_phases(record)]
    return tuple(Curve(name, tuple((float(r["step"]), number(r["seconds"].get(name)) or 0.0) for r in steps)) for name in names)


def _has_phases(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("seconds"), Mapping)


def _first(points: Sequence[Point]) -> float | None:
    return next((value for _, value in points if value is not None), None)


def _recent(points: Sequence[Point]) -> float | None:
    return mean(value for _, value in points[-RECENT:])


def _least(points: Sequence[Point]) -> float | None:
    return min((value for _, value in points if value is not None), default=None)


def _most(points: Sequence[Point]) -> float | None:
    return max((value for _, value in points if value is not None), default=None)


def _total(run: RunData, path: str) -> float | None:
    return run.total(path) if run.series(path) else None
