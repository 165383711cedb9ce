"""Which columns to record for a given number of bytes: those that remove the most mismatch.

For each (layer, site) and each kind of record the trainer measures what recording it gains, on the same trajectories: flips per
token avoided (codes that nearest rounding on the rollout's scale gets wrong), or, better, how much the mean |dlogp| grows when
that column alone is left out. ``choose`` takes the best set within the budget, exactly, and gives the same answer for the same
table. The choice is part of the run: ``spec_of`` turns it into a ``GuidanceSpec``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance.spec import ALL_SITES, BLOCK, Bits, GuidanceSpec, GuidedShape, RecordLayout, Site


@dataclass(frozen=True)
class ColumnGain:
    """What recording one column buys: ``gain`` (any unit, the same in one table) for ``nbytes`` per token.

    ``block_bits`` bits per 16 codes of a syndrome record; 16 where the mantissa bits are recorded as they are.
    """

    layer: int
    site: Site
    block_bits: int
    nbytes: int
    gain: float


def column_bytes(model: ModelConfig | GuidedShape, layer: int, site: Site, *, bits: Bits, block_bits: int = BLOCK) -> int:
    """Bytes per token of one column recorded alone; 0 where the layer lacks the site."""
    spec = GuidanceSpec(bits=bits, layers=(layer,), sites=(site,), syndrome_bits=block_bits if bits == "syndrome" else 5)
    return RecordLayout.build(spec, model).row_bytes


def choose(gains: Sequence[ColumnGain], *, budget: int) -> list[ColumnGain]:
    """At most one entry per (layer, site), ``budget`` bytes per token in all, largest sum of gains; by layer and site.

    Exact, by dynamic programming over bytes (multiple-choice knapsack). Of equally good choices the one with fewer bytes.
    """
    groups: dict[tuple[int, str], list[ColumnGain]] = {}
    for gain in gains:
        if gain.nbytes < 1:
            raise ValueError(f"{gain.site} of layer {gain.layer}: a column of {gain.nbytes} bytes cannot be chosen")
        groups.setdefault((gain.layer, gain.site), []).append(gain)
    keys = sorted(groups, key=lambda key: (key[0], ALL_SITES.index(key[1])))  # type: ignore[arg-type]
    best = np.zeros(max(budget, 0) + 1)
    picks = np.full((len(keys), len(best)), -1, dtype=np.int16)
    for row, key in enumerate(keys):
        better = best.copy()
        for index, gain in enumerate(sorted(groups[key], key=lambda g: (g.nbytes, g.block_bits))):
            if gain.nbytes >= len(best) or gain.gain <= 0:
                continue
            value = np.full_like(best, -np.inf)
            value[gain.nbytes :] = best[: len(best) - gain.nbytes] + gain.gain
            wins = value > better
            better[wins], picks[row, wins] = value[wins], index
        best = better
    left = int(np.argmax(best >= best[-1]))
    chosen: list[ColumnGain] = []
    for row in range(len(keys) - 1, -1, -1):
        index = picks[row, left]
        if index >= 0:
            gain = sorted(groups[keys[row]], key=lambda g: (g.nbytes, g.block_bits))[index]
            chosen.append(gain)
            left -= gain.nbytes
    return chosen[::-1]


def spec_of(chosen: Sequence[ColumnGain], *, bits: Bits, prompt_tokens: bool = True) -> GuidanceSpec:
    """The spec that records exactly ``chosen``; ValueError when nothing is."""
    if not chosen:
        raise ValueError("guidance budget: no column fits; raise it")
    layers = tuple(sorted({g.layer for g in chosen}))
    sites: tuple[Site, ...] = tuple(s for s in ALL_SITES if any(g.site == s for g in chosen))
    held = {(g.layer, g.site) for g in chosen}
    return GuidanceSpec(
        bits=bits,
        layers=layers,
        sites=sites,
        prompt_tokens=prompt_tokens,
        syndrome_overrides=tuple((g.layer, g.site, g.block_bits) for g in chosen) if bits == "syndrome" else (),
        left_out=tuple((layer, s) for layer in layers for s in sites if (layer, s) not in held),
    )


def table(gains: Sequence[ColumnGain], chosen: Sequence[ColumnGain]) -> list[dict[str, object]]:
    """The choice as rows for the run's summary, best gain per byte first; the same for the same measurements."""
    ordered = sorted(gains, key=lambda g: (-g.gain / g.nbytes, g.layer, ALL_SITES.index(g.site), g.block_bits))
    taken = set(chosen)
    return [
        {
            "layer": g.layer,
            "site": g.site,
            "block_bits": g.block_bits,
            "bytes": g.nbytes,
            "gain": g.gain,
            "gain_per_byte": g.gain / g.nbytes,
            "chosen": g in taken,
        }
        for g in ordered
    ]
