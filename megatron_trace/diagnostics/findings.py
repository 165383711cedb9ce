"""What a reader of a run should know, in words. Every finding is a pure function of a few figures; the constants are limits.

A fault is something that should not happen by construction, a warning weakens the run or its evidence, a note explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from megatron_trace.diagnostics.attribution import Evidence, SiteShare, Treatment
from megatron_trace.diagnostics.run_data import Point

Severity = Literal["fault", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")

SITE_WORDS = {
    "fc1_in": "fc1_in (routed-expert input)",
    "k": "K",
    "v": "V",
    "fc2_in": "fc2_in (expert activation)",
}
COVERAGE_EXPECTED = 0.99
LENGTH_LIMIT_SHARE = 0.1


@dataclass(frozen=True)
class Finding:
    """One thing to know. ``text`` says what was seen, ``advice`` what to look at; ``layer`` and ``site`` where it is local."""

    code: str
    severity: Severity
    text: str
    advice: str
    layer: int | None = None
    site: str | None = None


def place(layer: int, site: str) -> str:
    """``V of layer 3``."""
    return f"{SITE_WORDS.get(site, site)} of layer {layer}"


# ---- the run as a whole --------------------------------------------------------------------------------------------


def interrupted(*, last_step: int, planned: int | None, has_summary: bool) -> Finding | None:
    """The run has no summary, or stopped before its planned steps."""
    if has_summary:
        return None
    of = f" of {planned}" if planned is not None else ""
    return Finding(
        "interrupted",
        "warning",
        f"The run has not finished: the last step on record is {last_step}{of}, and there is no summary.",
        "Per-layer figures and methods come at the end; a run that was interrupted continues with checkpoint.resume=true.",
    )


def unreadable(problems: Sequence[str]) -> list[Finding]:
    """One finding per file or line that could not be read."""
    return [Finding("unreadable", "warning", f"{text}.", "The figures here are of what could be read.") for text in problems]


def no_evidence(*, enabled: bool | None, has_summary: bool, entries: int) -> Finding | None:
    """A finished run without per-layer measurements."""
    if not has_summary or entries:
        return None
    why = "evidence.enabled is false" if enabled is False else "its summary holds no evidence"
    return Finding(
        "no_evidence",
        "note",
        f"No per-layer figures: {why}.",
        "Run with evidence.enabled=true to measure gaps, flips and the methods on held-out trajectories.",
    )


def skipped_updates(*, skipped: float, updates: int) -> Finding | None:
    """Optimiser steps that were not applied."""
    if not skipped:
        return None
    severity: Severity = "fault" if updates and skipped / updates > 0.5 else "warning"
    return Finding(
        "skipped_updates",
        severity,
        f"{skipped:.0f} of {updates} updates were skipped.",
        "An update is skipped when its gradient is not finite or no token is trained on: see the gradient norm, the tokens "
        "with a "
        "non-finite log-probability, and the prompts without reward variance.",
    )


def nonfinite_tokens(*, count: float, tokens: float) -> Finding | None:
    """Tokens whose log-probability difference was NaN or infinite."""
    if not count:
        return None
    return Finding(
        "nonfinite_tokens",
        "fault",
        f"{count:.0f} of {tokens:.0f} response tokens had a log-probability that was NaN or infinite; they were left out.",
        "Find the first step with one in the curve of skipped and non-finite figures; check the engine's log-probabilities "
        "first.",
    )


def nonfinite_metrics(broken: Mapping[str, int]) -> Finding | None:
    """Metrics that were NaN or infinite, with the number of steps each."""
    if not broken:
        return None
    named = ", ".join(f"{name} in {count} step{'s' if count > 1 else ''}" for name, count in broken.items())
    return Finding("nonfinite_metrics", "fault", f"Not a number: {named}.", "Curves are broken at these steps.")


def length_limit(*, share: float | None, limit: object) -> Finding | None:
    """Responses cut off by the length limit, mean over steps."""
    if share is None or share < LENGTH_LIMIT_SHARE:
        return None
    return Finding(
        "length_limit",
        "warning",
        f"Responses cut at the length limit: {share:.0%}.",
        f"A cut response rarely earns its reward. rollout.max_new_tokens is {limit}: raise it, or shape the reward by length.",
    )


def zero_variance(*, share: float | None) -> Finding | None:
    """Prompts whose samples all got the same reward, mean over steps."""
    if share is None or share < 0.7:
        return None
    return Finding(
        "zero_variance",
        "warning",
        f"{share:.0%} of the prompts gave the same reward for all their samples and taught nothing.",
        "The problems are too easy or too hard for this policy: change their difficulty, or draw more samples per prompt.",
    )


def reward_fell(points: Sequence[Point], *, window: int = 5) -> Finding | None:
    """The last ``window`` steps' mean reward well below the best ``window`` steps before them."""
    known = [(step, value) for step, value in points if value is not None]
    if len(known) < 3 * window:
        return None
    means = [(known[i][0], sum(v for _, v in known[i - window + 1 : i + 1]) / window) for i in range(window - 1, len(known))]
    step, best = max(means[:-1], key=lambda item: item[1])
    last = means[-1][1]
    if best <= 0 or last > 0.75 * best:
        return None
    return Finding(
        "reward_fell",
        "warning",
        f"The reward fell from {best:.3g} (mean of {window} steps up to step {step:.0f}) to {last:.3g} at the end.",
        "Compare with the curves of |Δ log p|, KL and clipped tokens at that step: a mismatch that grows first is the "
        "usual cause.",
    )


def accuracy_fell(*, before: float | None, after: float | None, problems: object) -> Finding | None:
    """Held-out accuracy at the end below the one after warm-up by more than two standard deviations of the difference."""
    if before is None or after is None or not isinstance(problems, int) or problems < 1:
        return None
    if not (0 <= before <= 1 and 0 <= after <= 1):
        return None
    spread = (before * (1 - before) / problems + after * (1 - after) / problems) ** 0.5
    if before - after <= 2 * spread:
        return None
    return Finding(
        "accuracy_fell",
        "warning",
        f"Held-out accuracy fell from {before:.1%} to {after:.1%} ({problems} problems; two standard deviations are "
        f"{2 * spread:.1%}).",
        "Reinforcement made the policy worse: look at the learning rate, the reward and the mismatch curves.",
    )


# ---- the mismatch over steps ---------------------------------------------------------------------------------------


def mismatch_grows(points: Sequence[Point]) -> Finding | None:
    """Median \\|dlogp\\| of the last fifth of the steps at least three times that of the first fifth."""
    known = [value for _, value in points if value is not None]
    part = len(known) // 5
    if part < 2:
        return None
    first, last = median(known[:part]), median(known[-part:])
    if first <= 0 or last < 3 * first:
        return None
    return Finding(
        "mismatch_grows",
        "warning",
        f"|Δ log p| between trainer and rollout grew {last / first:.1f}-fold: median {first:.2g} in the first fifth of the "
        "steps, "
        f"{last:.2g} in the last.",
        "If it grows from the first refit on, the engine may serve old weights; otherwise see which layer and site "
        "dominate below.",
    )


def mismatch_beyond_evidence(*, recent: float | None, evidence: Evidence | None, method: str | None) -> Finding | None:
    """Training tokens that differ far more than evidence tokens sampled with freshly served weights under the same rounding."""
    row = evidence.method(method) if evidence is not None and method is not None else None
    if recent is None or row is None or not row.mean or recent < 5 * row.mean:
        return None
    return Finding(
        "mismatch_beyond_evidence",
        "fault",
        f"|Δ log p| in training was {recent:.2g} at the end, {recent / row.mean:.0f} times the {row.mean:.2g} measured with "
        "freshly served weights and the same rounding: the rollout of the loop ran other weights than the trainer (stale "
        "weights).",
        "Check that every refit reached every engine and that the weight version of the tokens is the trainer's.",
    )


def lopsided(points: Sequence[Point]) -> Finding | None:
    """Recent mass of negative over positive log-ratio differences far from balance, as seen before a collapse."""
    recent = [value for _, value in points[-5:] if value is not None]
    if len(recent) < 3 or (typical := median(recent)) < 2.0:
        return None
    return Finding(
        "lopsided",
        "warning",
        f"The differences lean to one side: negative ones weigh {typical:.1f} times the positive ones in the last steps.",
        "A growing lean precedes collapse under uncorrected mismatch: tighten the truncation, or guide more layers.",
    )


def importance_weights(*, truncated: float | None, smallest_ess: float | None) -> Finding | None:
    """Importance weights that cost information: truncated tokens, or an effective sample size well below the token count."""
    parts = []
    if truncated is not None and truncated > 0.01:
        parts.append(f"{truncated:.1%} of the importance weights were truncated")
    if smallest_ess is not None and smallest_ess < 0.9:
        parts.append(f"the effective sample size fell to {smallest_ess:.0%} of the tokens")
    if not parts:
        return None
    return Finding(
        "importance_weights",
        "warning",
        f"Rollout and trainer disagree enough to cost data: {' and '.join(parts)}.",
        "Reduce the mismatch (more guided layers or sites, fresher weights) rather than the correction.",
    )


def clipping(*, share: float | None) -> Finding | None:
    """A large share of tokens without gradient because their ratio was clipped, mean over steps."""
    if share is None or share < 0.2:
        return None
    return Finding(
        "clipping",
        "warning",
        f"{share:.0%} of the tokens were clipped and gave no gradient.",
        "Lower the learning rate or the number of updates per rollout, or widen the clipping range.",
    )


# ---- guidance ------------------------------------------------------------------------------------------------------


def low_coverage(counts: Mapping[str, tuple[float, float]], *, prompt_tokens: bool | None) -> list[Finding]:
    """Sites whose records were missing or invalid for part of the tokens; K and V in one finding when they agree."""
    found: dict[tuple[float, float], list[str]] = {}
    for site, (guided, fallback) in counts.items():
        if fallback > 0 and guided / (guided + fallback) < COVERAGE_EXPECTED:
            found.setdefault((guided, fallback), []).append(site)
    out = []
    for (guided, fallback), sites in found.items():
        share = guided / (guided + fallback)
        name = "KV" if set(sites) == {"k", "v"} else " and ".join(SITE_WORDS.get(site, site) for site in sites)
        reason = (
            "Prompt tokens are not captured (guidance.prompt_tokens=false)."
            if prompt_tokens is False
            else "Look for cached prefix rows of older weights, rows prefilled again, and samples that the store dropped."
        )
        out.append(
            Finding(
                "low_coverage",
                "fault" if share < 0.5 else "warning",
                f"{name} guidance covered {share:.0%} of tokens: {fallback:,.0f} site tokens had no valid record and were "
                "rounded to "
                "nearest.",
                reason,
                site=sites[0] if len(sites) == 1 else None,
            )
        )
    return out


def unguided_sites(treatment: Treatment | None, shares: Sequence[SiteShare]) -> list[Finding]:
    """Sites left unguided in layers that guide others: names the layer where most codes still differ."""
    if treatment is None or treatment.forward != "guided":
        return []
    out = []
    for site in dict.fromkeys(s.site for s in shares):
        rows = [s for s in shares if s.site == site and s.layer in treatment.layers]
        if site in treatment.sites or not rows:
            continue
        worst = max(rows, key=lambda s: s.code_share or 0.0)
        total = sum(s.code_share or 0.0 for s in rows)
        layers = ", ".join(str(s.layer) for s in rows)
        others = ", ".join(SITE_WORDS.get(name, name) for name in treatment.sites)
        out.append(
            Finding(
                "unguided_site",
                "warning",
                f"{SITE_WORDS.get(site, site)} is not guided in layers {layers}, which guide {others}: it makes {total:.0%} "
                "of the "
                f"codes that still differ, {place(worst.layer, site)} alone {worst.code_share or 0:.0%}.",
                f"Add {site} to guidance.sites (now {', '.join(treatment.sites)}).",
                layer=worst.layer,
                site=site,
            )
        )
    return out


def silent_sites(counts: Mapping[str, tuple[float, float]], treatment: Treatment | None) -> list[Finding]:
    """Sites that the run meant to guide and that guided no token at all while others did."""
    if treatment is None or treatment.forward != "guided" or not any(guided for guided, _ in counts.values()):
        return []
    first = min(treatment.layers, default=0)
    return [
        Finding(
            "silent_site",
            "fault",
            f"{SITE_WORDS.get(site, site)} is in guidance.sites and guided no token, from layer {first} on, while other "
            "sites were "
            "guided: its records never reached the trainer.",
            f"Check that the engine captures {site} and that the record layout has it.",
            layer=first,
            site=site,
        )
        for site in treatment.sites
        if counts.get(site, (0.0, 0.0))[0] == 0
    ]


def dominant_site(shares: Sequence[SiteShare], treatment: Treatment | None) -> Finding | None:
    """One site that makes most of what still differs: half of it, or a quarter and four times its fair part."""
    ranked = sorted((s for s in shares if s.code_share), key=lambda s: -(s.code_share or 0.0))
    if len(ranked) < 2 or treatment is None:
        return None
    top = ranked[0]
    share = top.code_share or 0.0
    if share < 0.5 and not (share >= 0.25 and share >= 4 / len(shares)):
        return None
    if treatment.forward != "guided":
        why = f"The trainer's forward is {treatment.forward}: precision.trainer_forward=guided removes most of it."
    elif not top.guided and top.site in treatment.sites:
        why = f"It is not guided: guidance.layers covers {_listed(treatment.layers)}; add layer {top.layer} if the bytes allow."
    elif not top.guided:
        why = f"It is not guided: add {top.site} to guidance.sites."
    else:
        why = "It is guided, so its codes should not differ: compare its noise, gap and adjacency with the other layers' below."
    return Finding(
        "dominant_site",
        "warning" if top.guided else "note",
        f"The site {top.site} of layer {top.layer} makes {share:.0%} of the remaining mismatch, counted in codes that differ "
        f"({top.codes:.2%} of its values).",
        why,
        layer=top.layer,
        site=top.site,
    )


def guidance_does_not_help(evidence: Evidence | None, treatment: Treatment | None) -> Finding | None:
    """The run's own guidance leaves no less \\|dlogp\\| than rounding to nearest with own scales."""
    own, qat = (evidence.method("trace"), evidence.method("qat")) if evidence is not None else (None, None)
    if treatment is None or treatment.forward != "guided" or own is None or qat is None or not own.mean or not qat.mean:
        return None
    if own.mean < 0.9 * qat.mean:
        return None
    return Finding(
        "guidance_does_not_help",
        "fault",
        f"Guidance does not help: |Δ log p| is {own.mean:.2g} with it and {qat.mean:.2g} without (own scales, to nearest).",
        "Records that do not belong to these tokens, a wrong scale, or weights that differ: see the faults that name a layer.",
    )


def beyond_floor(evidence: Evidence | None) -> Finding | None:
    """Guiding every layer should leave at most BF16's own mismatch."""
    row = evidence.method("trace_all") if evidence is not None else None
    if row is None or row.ratio is None or row.ratio <= 1.0:
        return None
    return Finding(
        "beyond_floor",
        "warning",
        f"Guiding all layers leaves {row.ratio:.2f} times the mismatch of a BF16 rollout; at most 1 is expected.",
        "A difference that is not rounding remains: see the noise by layer and site.",
    )


def _listed(layers: Sequence[int]) -> str:
    if not layers:
        return "no layer"
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
