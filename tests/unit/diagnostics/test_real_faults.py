"""Faults made with the real codec, measured as a run's evidence measures them: the findings must hold for true figures too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_trace.diagnostics import site_findings as local
from megatron_trace.diagnostics.attribution import SiteGap
from megatron_trace.numerics import guided, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord

TOKENS, WIDTH = 96, 128
AMAX = 12.0


def measured(layer: int, site: str, *, own_amax: float = AMAX, recorded_times: float = 1.0) -> SiteGap:
    """One static-scale site of ``TOKENS`` rows, the trainer's values 0.5% off the rollout's.

    ``own_amax``: the amax the trainer itself rounds with; ``recorded_times``: factor on the amax written into the record.
    """
    generator = torch.Generator().manual_seed(layer)
    x_roll = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    x_train = (x_roll.float() * (1 + 0.005 * torch.randn(TOKENS, WIDTH, generator=generator))).bfloat16()
    q = nvfp4.quantize(x_roll, scale_scope="static", global_amax=torch.tensor(AMAX))
    q_roll = q.dequantize(torch.bfloat16)
    wrong = replace(q, global_amax=q.global_amax * recorded_times)
    full, compact = guided.make_record(wrong, bits=4), guided.make_record(wrong, bits=1)
    noise = norm(x_train - x_roll)
    rounded = {
        "qat": guided.fake_quantize(x_train, scale_scope="static", global_amax=torch.tensor(own_amax)),
        "rtn_rollout_scale": guided.nearest_on_record_scale(x_train, full),
        "trace_full": guided.fake_quantize(x_train, record=full),
        "trace_compact": guided.fake_quantize(x_train, record=compact),
    }
    nearest = guided.nearest_codes(x_train, full)
    counts = {name: count(full, nearest, codes) for name, codes in codes_of(x_train, full, compact, nearest).items()}
    return SiteGap(
        layer=layer,
        site=site,
        values=TOKENS * WIDTH,
        noise=noise / norm(x_roll),
        gap={name: norm(values - q_roll) / noise for name, values in rounded.items()},
        flips={name: c.flips / c.values for name, c in counts.items()},
        adjacent_share=counts["nearest"].adjacent / counts["nearest"].flips,
        full_worse_than_rtn=counts["full"].worse_than_nearest,
        compact_worse_than_rtn=counts["compact"].worse_than_nearest,
    )


def codes_of(x: torch.Tensor, full: GuidanceRecord, compact: GuidanceRecord, nearest: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"nearest": nearest, "full": guided.guided_codes(x, full), "compact": guided.guided_codes(x, compact)}


def count(full: GuidanceRecord, nearest: torch.Tensor, codes: torch.Tensor) -> guided.CodeCounts:
    return guided.count_codes(guided.record_codes(full), codes, nearest=nearest)


def norm(x: torch.Tensor) -> float:
    return float(x.double().norm())


def all_findings(sites: list[SiteGap]) -> list[tuple[str, int | None, str | None]]:
    found = [*local.recorded_scale_wrong(sites), *local.own_scale_wrong(sites), *local.worse_than_nearest(sites)]
    return [(finding.code, finding.layer, finding.site) for finding in found]


def test_right_scales_are_silent() -> None:
    assert all_findings([measured(layer, "v") for layer in range(4)]) == []


@pytest.mark.parametrize("times", [0.5, 2.0, 4.0])
def test_a_wrong_recorded_amax_is_named(times: float) -> None:
    sites = [measured(layer, "v", recorded_times=times if layer == 2 else 1.0) for layer in range(4)]
    assert all_findings(sites) == [("recorded_scale_wrong", 2, "v")]


def test_an_amax_of_the_trainer_that_clips_is_named() -> None:
    sites = [measured(layer, "k", own_amax=AMAX / 16 if layer == 1 else AMAX) for layer in range(4)]
    assert all_findings(sites) == [("own_scale_wrong", 1, "k")]


def test_an_amax_of_another_size_that_does_not_clip_is_no_fault() -> None:
    """Block scales make up for it: only their E4M3 rounding differs."""
    sites = [measured(layer, "k", own_amax=AMAX * 8 if layer == 1 else AMAX) for layer in range(4)]
    assert all_findings(sites) == []


def test_a_record_of_other_tokens_is_named() -> None:
    good = [measured(layer, "v") for layer in range(4)]
    generator = torch.Generator().manual_seed(9)
    x_roll, other = (torch.randn(TOKENS, WIDTH, generator=generator).bfloat16() for _ in range(2))
    record = guided.make_record(nvfp4.quantize(other, scale_scope="static", global_amax=torch.tensor(AMAX)), bits=4)
    counts = count(record, guided.nearest_codes(x_roll, record), guided.nearest_codes(x_roll, record))
    swapped = replace(good[3], adjacent_share=counts.adjacent / counts.flips, flips={"nearest": counts.flips / counts.values})
    assert all_findings([*good[:3], swapped]) == [("recorded_scale_wrong", 3, "v")]


def test_the_figures_of_a_healthy_site_are_those_of_the_method() -> None:
    """Nearest on the rollout's scale flips a few codes, all neighbours; guidance leaves none at 0.5% noise."""
    site = measured(0, "v")
    assert 0.004 < site.noise < 0.006  # type: ignore[operator]
    assert 0.001 < site.flips["nearest"] < 0.05 and site.adjacent_share == 1.0  # type: ignore[operator]
    assert site.gap["trace_full"] == 0.0 and site.flips["full"] == 0.0
    assert site.full_worse_than_rtn == 0
