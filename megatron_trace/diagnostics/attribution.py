"""Where the mismatch comes from: what a run's evidence measured per layer and site, and each site's share. No torch.

Measured: noise, gaps, flips, adjacency, |dlogp| per method (``summary.json``, key ``evidence``). Computed here: shares of
differing codes (flips x values) and of squared rounding error, which rank sites but are no measurement of |dlogp|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_trace.diagnostics.run_data import RunData, is_number, lookup, number

GAP_RULES = ("qat", "rtn_rollout_scale", "trace_full", "trace_compact")
"""Rounding rules of the local gap: own scales to nearest; the rollout's scale to nearest; whole codewords; one bit each."""
FLIP_RULES = ("nearest", "full", "compact")
"""Rules under which differing codes are counted, all on the rollout's scale."""
SITE_ORDER = ("k", "v", "fc1_in", "fc2_in")
"""Sites in the order in which a layer computes them."""


@dataclass(frozen=True)
class SiteGap:
    """Measured at one layer and site. Gaps are rounding difference over input difference; None where the inputs are equal.

    ``noise``: ||X_train - X_rollout|| / ||X_rollout||; ``flips``: share of values whose code differs from the rollout's;
    ``adjacent_share``: share of the flips under nearest that are off by one codeword.
    """

    layer: int
    site: str
    values: int
    noise: float | None
    gap: Mapping[str, float | None]
    flips: Mapping[str, float | None]
    adjacent_share: float | None
    full_worse_than_rtn: int
    compact_worse_than_rtn: int

    def relative_error(self, rule: str) -> float | None:
        """||Q_train - Q_rollout|| / ||X_rollout|| under a gap rule: gap x noise; None where equal inputs left no gap."""
        gap, noise = self.gap.get(rule), self.noise
        return None if gap is None or noise is None else gap * noise


@dataclass(frozen=True)
class MethodFigure:
    """\\|dlogp\\| of one method on the evidence tokens; ``ratio``: mean over BF16's own."""

    name: str
    mean: float | None
    largest: float | None
    ratio: float | None


@dataclass(frozen=True)
class SiteSwitch:
    """Mean \\|dlogp\\| with guidance at one site alone, and with it at every site but this one (measured)."""

    layer: int
    site: str
    alone: float | None
    without: float | None


@dataclass(frozen=True)
class Evidence:
    """One entry of the summary's evidence: a policy ``updates_newer`` than the weights that sampled the tokens."""

    updates_newer: int
    tokens: int
    methods: tuple[MethodFigure, ...]
    sites: tuple[SiteGap, ...]
    switches: tuple[SiteSwitch, ...] = ()

    def method(self, name: str) -> MethodFigure | None:
        """The row called ``name``, if it was measured."""
        return next((m for m in self.methods if m.name == name), None)


@dataclass(frozen=True)
class Treatment:
    """How the run's own trainer forward rounds: ``forward`` guided, qat, w4a16 or bf16; ``bits`` 1, 4 or syndrome."""

    forward: str
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    bits: str

    def guides(self, layer: int, site: str) -> bool:
        return self.forward == "guided" and layer in self.layers and site in self.sites

    @property
    def rounds_activations(self) -> bool:
        """Whether activations and KV are rounded at all, so that counting codes says something about the run."""
        return self.forward in ("guided", "qat")


@dataclass(frozen=True)
class SiteShare:
    """One site's part in what still differs. ``codes``: expected share of values with another code; shares sum to 1 over sites.

    ``error_share`` weighs squared relative error by values: it takes every site's values to be of one size.
    """

    layer: int
    site: str
    guided: bool
    coverage: float
    codes: float
    code_share: float | None
    error_share: float | None


def read_evidence(run: RunData) -> tuple[Evidence, ...]:
    """The run's evidence, freshest policy first; entries that cannot be read are left out."""
    entries = _items((run.summary or {}).get("evidence"))
    found = [_evidence(e) for e in entries if isinstance(e, Mapping) and is_number(e.get("updates_newer"))]
    return tuple(sorted(found, key=lambda e: e.updates_newer))


def read_treatment(config: Mapping[str, Any]) -> Treatment | None:
    """From a resolved configuration; None when it lacks what this needs."""
    total, section = lookup(config, "model.num_layers"), lookup(config, "guidance")
    rollout, forward = lookup(config, "precision.rollout"), lookup(config, "precision.trainer_forward")
    if not is_number(total) or not isinstance(section, Mapping) or not isinstance(rollout, str) or not isinstance(forward, str):
        return None
    if forward == "auto":
        forward = "guided" if rollout == "nvfp4" else "bf16"
    excluded = _items(lookup(config, "precision.bf16_layers"))
    layers = tuple(n for n in _layers(section.get("layers"), int(total)) if n not in excluded) if forward == "guided" else ()
    sites = tuple(name for name in _items(section.get("sites")) if isinstance(name, str))
    return Treatment(forward=forward, layers=layers, sites=sites, bits=str(section.get("bits")))


def coverage(run: RunData) -> dict[str, tuple[float, float]]:
    """Site -> (guided tokens, tokens rounded to nearest for want of a valid record), summed over steps and layers."""
    return {
        site: (run.total(f"sites.{site}.guided_tokens"), run.total(f"sites.{site}.fallback_tokens"))
        for site in run.keys("sites")
    }


def covered(counts: Mapping[str, tuple[float, float]], site: str) -> float:
    """Share of a site's tokens that had a valid record; 1 when none was counted."""
    guided, fallback = counts.get(site, (0.0, 0.0))
    return guided / (guided + fallback) if guided + fallback else 1.0


def shares(
    sites: Sequence[SiteGap], treatment: Treatment, counts: Mapping[str, tuple[float, float]] | None = None
) -> tuple[SiteShare, ...]:
    """Each site's share of what still differs under the run's own rounding; empty if its forward rounds no activations."""
    if not treatment.rounds_activations:
        return ()
    rows = []
    for s in sites:
        is_guided = treatment.guides(s.layer, s.site)
        part = covered(counts or {}, s.site) if is_guided else 0.0
        flip_rule, gap_rule = ("compact", "trace_compact") if treatment.bits == "1" else ("full", "trace_full")
        codes = _blend(part, s.flips.get(flip_rule), s.flips.get("nearest"))
        with_record, without = s.relative_error(gap_rule), s.relative_error("qat")
        squared = _blend(part, _square(with_record), _square(without))
        rows.append((s, is_guided, part, codes or 0.0, squared or 0.0))
    all_codes = sum(codes * s.values for s, _, _, codes, _ in rows)
    all_error = sum(squared * s.values for s, _, _, _, squared in rows)
    return tuple(
        SiteShare(
            layer=s.layer,
            site=s.site,
            guided=is_guided,
            coverage=part,
            codes=codes,
            code_share=codes * s.values / all_codes if all_codes else None,
            error_share=squared * s.values / all_error if all_error else None,
        )
        for s, is_guided, part, codes, squared in rows
    )


def rule_shares(sites: Sequence[SiteGap], rule: str) -> tuple[float | None, ...]:
    """Each site's share of all differing codes if every site were rounded by one flip rule."""
    weights = [(s.flips.get(rule) or 0.0) * s.values for s in sites]
    total = sum(weights)
    return tuple(w / total if total else None for w in weights)


def pooled(sites: Sequence[SiteGap], rule: str) -> float | None:
    """Share of differing codes over all sites under a flip rule, weighed by values."""
    known = [(flips, s.values) for s in sites if (flips := s.flips.get(rule)) is not None]
    total = sum(values for _, values in known)
    return sum(flips * values for flips, values in known) / total if total else None


def pooled_adjacent(sites: Sequence[SiteGap]) -> float | None:
    """Share of all flips under nearest that are off by one codeword, over all sites."""
    known = [(s.adjacent_share, (s.flips.get("nearest") or 0.0) * s.values) for s in sites if s.adjacent_share is not None]
    total = sum(flips for _, flips in known)
    return sum(share * flips for share, flips in known) / total if total else None


def in_compute_order(sites: Sequence[SiteGap]) -> list[SiteGap]:
    """Layers ascending and, within a layer, sites as the layer computes them."""
    return sorted(sites, key=lambda s: (s.layer, _site_rank(s.site), s.site))


def site_dict(site: SiteGap) -> dict[str, Any]:
    """Plain dict with the measured figures and the relative errors they imply."""
    return {**asdict(site), "relative_error": {rule: site.relative_error(rule) for rule in GAP_RULES}}


def _site_rank(site: str) -> int:
    return SITE_ORDER.index(site) if site in SITE_ORDER else len(SITE_ORDER)


def _layers(choice: object, total: int) -> tuple[int, ...]:
    if choice == "latter_half":
        return tuple(range(total - total // 2, total))
    if choice == "all":
        return tuple(range(total))
    return tuple(sorted(int(n) for n in _items(choice) if is_number(n)))


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _evidence(entry: Mapping[str, Any]) -> Evidence:
    rows = entry.get("dlogp") if isinstance(entry.get("dlogp"), Mapping) else {}
    floor = number(lookup(entry, "dlogp.bf16.mean"))
    methods = tuple(_method(name, row, floor) for name, row in rows.items() if isinstance(row, Mapping))  # type: ignore[union-attr]
    return Evidence(
        updates_newer=int(entry["updates_newer"]),
        tokens=int(number(entry.get("tokens")) or 0),
        methods=methods,
        sites=tuple(_site(row) for row in _rows(entry, "sites")),
        switches=tuple(
            SiteSwitch(
                int(row["layer"]), row["site"], number(row.get("dlogp_mean_alone")), number(row.get("dlogp_mean_without"))
            )
            for row in _rows(entry, "site_switches")
        ),
    )


def _rows(entry: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = entry.get(key)
    if not isinstance(rows, list):
        return []
    return [r for r in rows if isinstance(r, Mapping) and is_number(r.get("layer")) and isinstance(r.get("site"), str)]


def _method(name: str, row: Mapping[str, Any], floor: float | None) -> MethodFigure:
    mean = number(row.get("mean"))
    ratio = mean / floor if mean is not None and floor else None
    return MethodFigure(name=name, mean=mean, largest=number(row.get("max")), ratio=ratio)


def _site(row: Mapping[str, Any]) -> SiteGap:
    return SiteGap(
        layer=int(row["layer"]),
        site=row["site"],
        values=int(number(row.get("values")) or 0),
        noise=number(row.get("noise")),
        gap={rule: number(row.get(f"gap_{rule}")) for rule in GAP_RULES},
        flips={rule: number(row.get(f"flips_{rule}")) for rule in FLIP_RULES},
        adjacent_share=number(row.get("adjacent_share")),
        full_worse_than_rtn=int(number(row.get("full_worse_than_rtn")) or 0),
        compact_worse_than_rtn=int(number(row.get("compact_worse_than_rtn")) or 0),
    )


def _blend(part: float, inside: float | None, outside: float | None) -> float | None:
    """``part`` of the rows by one figure, the rest by the other; a figure with no weight may be unknown."""
    if (part > 0 and inside is None) or (part < 1 and outside is None):
        return None
    return part * (inside or 0.0) + (1 - part) * (outside or 0.0)


def _square(value: float | None) -> float | None:
    return None if value is None else value * value
