"""Findings that name one layer and one site: inputs that differ before rounding, scales that do not fit, wrong rounding."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megatron_trace.diagnostics.attribution import Evidence, SiteGap, in_compute_order
from megatron_trace.diagnostics.findings import Finding, place

ADJACENT_EXPECTED = 0.99
"""The paper reports more than 99% of differing codes one codeword apart, also some updates stale."""
NOISE_ADJACENT = 0.05
"""Relative input difference up to which differing codes are expected to be neighbours."""
NOISE_JUMP = 4.0
"""Growth of the input difference from one site to the next that rounding noise does not explain."""
NOISE_LARGE = 0.03
"""Relative input difference, same weights on both sides, beyond what BF16 arithmetic (2^-8 a product) adds up to."""
NOISE_FIRST = 2.0**-8
"""The same limit at K and V of layer 0, which one product after the embedding gives: one unit in the last place of BF16."""
OUTLIER = 4.0
"""How many times the median of its own site (over layers) a figure must be to stand out."""
GUIDED_GAP_LIMIT = 0.5
"""Gap left by guidance at low noise; 0 to 0.15 is usual, 1 means rounding differs as much as the inputs do."""


def inputs_differ(evidence: Evidence | None) -> Finding | None:
    """First site, in the order of computation, where trainer and rollout see different values before any rounding."""
    if evidence is None:
        return None
    before: float | None = None
    for s in in_compute_order(evidence.sites):
        if s.noise is None:
            continue
        jumped = before is None or s.noise >= NOISE_JUMP * before
        limit = NOISE_FIRST if before is None and s.layer == 0 and s.site in ("k", "v") else NOISE_LARGE
        if s.noise >= limit and jumped:
            return _inputs_differ(s, before, evidence.updates_newer)
        before = max(before or 0.0, s.noise)
    return None


def _inputs_differ(s: SiteGap, before: float | None, age: int) -> Finding:
    if before is None:
        seen = "already at the first site that is rounded"
        cause = "the two sides run different weights: stale weights in the engine, or a refit that did not arrive"
    else:
        seen = f"after {before:.2%} at most at the sites before it"
        cause = "what is computed between the site before and this one differs: weights, scales or routes there"
    old = f" The policy is {age} updates newer than the weights that sampled, which explains a part." if age else ""
    return Finding(
        "inputs_differ",
        "note" if age else "fault",
        f"Trainer and rollout differ before any rounding, first at {place(s.layer, s.site)}: by {s.noise:.1%} of the "
        "values' size, "
        f"{seen}.{old}",
        f"Rounding cannot cause this; {cause}.",
        layer=s.layer,
        site=s.site,
    )


def recorded_scale_wrong(sites: Sequence[SiteGap]) -> list[Finding]:
    """Sites whose codes differ by more than one codeword, or keep a gap under full guidance: the recorded scale is wrong."""
    out = []
    for s in sites:
        quiet = s.noise is not None and 0 < s.noise <= NOISE_ADJACENT
        far = quiet and s.adjacent_share is not None and s.adjacent_share < ADJACENT_EXPECTED
        gap = s.gap.get("trace_full")
        left = quiet and gap is not None and gap > GUIDED_GAP_LIMIT
        if not (far or left):
            continue
        seen = []
        if far:
            seen.append(f"{1 - (s.adjacent_share or 0):.0%} of the codes that differ are off by more than one codeword")
        if left:
            seen.append(f"even whole recorded codewords leave a gap of {gap:.2g} times the input difference")
        out.append(
            Finding(
                "recorded_scale_wrong",
                "fault",
                f"The recorded scale of {place(s.layer, s.site)} does not fit the trainer's values: {' and '.join(seen)}, "
                "although the "
                f"inputs differ by only {s.noise:.2%}.",
                "Check this site's scale on its way from the engine: the static amax of the refit for K and V, the row "
                "amax in the "
                "record for the others; then whether the record belongs to these tokens.",
                layer=s.layer,
                site=s.site,
            )
        )
    return out


def own_scale_wrong(sites: Sequence[SiteGap]) -> list[Finding]:
    """Sites where rounding with the trainer's own scale is far worse than in other layers, but not on the rollout's scale."""
    out = []
    for s, usual in _against_other_layers(sites, "qat"):
        gap, nearest = s.gap["qat"], s.gap.get("rtn_rollout_scale")
        if gap is None or gap < OUTLIER * usual or (nearest is not None and gap < OUTLIER * nearest):
            continue
        out.append(
            Finding(
                "own_scale_wrong",
                "fault",
                f"The trainer's own scale of {place(s.layer, s.site)} is wrong: rounding with it leaves a gap of {gap:.3g} "
                "times the "
                f"input difference, {gap / usual:.0f} times the {usual:.3g} usual at this site in other layers"
                + (f"; on the rollout's scale it is {nearest:.3g}." if nearest is not None else "."),
                "Compare the amax of this layer on both sides: calibration and its headroom for K and V, the row amax for "
                "the others.",
                layer=s.layer,
                site=s.site,
            )
        )
    return out


def worse_than_nearest(sites: Sequence[SiteGap]) -> list[Finding]:
    """Values that full guidance moved away from the rollout's codeword; by construction there are none."""
    return [
        Finding(
            "worse_than_nearest",
            "fault",
            f"Whole recorded codewords moved {s.full_worse_than_rtn:,} of {s.values:,} values of {place(s.layer, s.site)} "
            "away from the "
            "rollout's codeword; by construction none can move away.",
            "The guided rounding itself is wrong, or bracket and record use different scales.",
            layer=s.layer,
            site=s.site,
        )
        for s in sites
        if s.full_worse_than_rtn
    ]


def _against_other_layers(sites: Sequence[SiteGap], rule: str) -> list[tuple[SiteGap, float]]:
    """Each site with the median of the same site's gap over the other layers, where there is one above 0."""
    out = []
    for s in sites:
        gaps = [o.gap.get(rule) for o in sites if o.site == s.site and o.layer != s.layer]
        others = [gap for gap in gaps if gap is not None]
        if s.gap.get(rule) is not None and others and (usual := median(others)) > 0:
            out.append((s, usual))
    return out
