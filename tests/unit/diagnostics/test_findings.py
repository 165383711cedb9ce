"""Every finding: the words it says, the limit at which it starts, and that a healthy figure keeps it silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_runs
from synthetic_runs import Row, config, write_run

from megatron_trace.diagnostics import findings as f
from megatron_trace.diagnostics import site_findings as local
from megatron_trace.diagnostics.analysis import Analysis, analyse
from megatron_trace.diagnostics.attribution import Evidence, MethodFigure, SiteGap, SiteShare, Treatment
from megatron_trace.diagnostics.findings import Finding
from megatron_trace.diagnostics.run_data import read_run

GUIDED = Treatment(forward="guided", layers=(2, 3), sites=("fc1_in", "k", "v"), bits="1")


def site(layer: int, name: str = "k", **changes: object) -> SiteGap:
    gap = {"qat": 8.0, "rtn_rollout_scale": 6.0, "trace_full": 0.0, "trace_compact": 0.05}
    flips = {"nearest": 0.01, "full": 0.0, "compact": 0.0}
    row = SiteGap(layer, name, 1000, 0.004, gap, flips, 1.0, 0, 0)
    for key, value in changes.items():
        row = replace(row, gap={**row.gap, key: value}) if key in gap else replace(row, **{key: value})  # type: ignore[arg-type]
    return row


def share(layer: int, name: str, part: float, *, guided: bool = False) -> SiteShare:
    return SiteShare(layer, name, guided, 1.0 if guided else 0.0, 0.01, part, part)


def measured(**means: float) -> Evidence:
    rows = tuple(MethodFigure(name, mean, None, mean / means.get("bf16", 1.0)) for name, mean in means.items())
    return Evidence(updates_newer=0, tokens=100, methods=rows, sites=())


def points(*values: float | None) -> list[tuple[float, float | None]]:
    return [(float(i + 1), v) for i, v in enumerate(values)]


# ---- the run as a whole --------------------------------------------------------------------------------------------


def test_interrupted() -> None:
    assert f.interrupted(last_step=40, planned=40, has_summary=True) is None
    found = f.interrupted(last_step=17, planned=40, has_summary=False)
    assert found is not None
    assert found.text == "The run has not finished: the last step on record is 17 of 40, and there is no summary."


def test_no_evidence() -> None:
    assert f.no_evidence(enabled=True, has_summary=True, entries=2) is None
    assert f.no_evidence(enabled=False, has_summary=False, entries=0) is None  # said by ``interrupted``
    found = f.no_evidence(enabled=False, has_summary=True, entries=0)
    assert found is not None and "evidence.enabled is false" in found.text


@pytest.mark.parametrize(("skipped", "severity"), [(0, None), (8, "warning"), (21, "fault")])
def test_skipped_updates(skipped: int, severity: str | None) -> None:
    found = f.skipped_updates(skipped=skipped, updates=40)
    if severity is None:
        assert found is None
    else:
        assert found is not None
        assert (found.text, found.severity) == (f"{skipped} of 40 updates were skipped.", severity)


def test_nonfinite_tokens_and_metrics() -> None:
    assert f.nonfinite_tokens(count=0, tokens=10) is None
    found = f.nonfinite_tokens(count=3, tokens=1000)
    assert found is not None and found.text.startswith("3 of 1000 response tokens") and found.severity == "fault"
    assert f.nonfinite_metrics({}) is None
    found = f.nonfinite_metrics({"loss": 2, "reward": 1})
    assert found is not None and found.text == "Not a number: loss in 2 steps, reward in 1 step."


def test_length_limit() -> None:
    assert f.length_limit(share=None, limit=24) is None
    assert f.length_limit(share=0.09, limit=24) is None
    found = f.length_limit(share=0.3, limit=24)
    assert found is not None
    assert found.text == "Responses cut at the length limit: 30%." and "rollout.max_new_tokens is 24" in found.advice


def test_zero_variance_and_clipping() -> None:
    assert f.zero_variance(share=0.5) is None and f.clipping(share=0.1) is None
    found = f.zero_variance(share=0.85)
    assert found is not None and found.text.startswith("85% of the prompts")
    found = f.clipping(share=0.4)
    assert found is not None and found.text == "40% of the tokens were clipped and gave no gradient."


def test_reward_fell() -> None:
    rise, fall = [0.1 * i for i in range(10)], [0.5, 0.3, 0.2, 0.2, 0.2, 0.2]
    assert f.reward_fell(points(*rise, *rise[::-1][:2], *rise[-3:])) is None
    assert f.reward_fell(points(0.9, *[0.1] * 8)) is None  # too short to tell
    found = f.reward_fell(points(*rise, *fall))
    assert found is not None  # the best five steps end at step 10 with 0.5 .. 0.9
    assert "from 0.7 (mean of 5 steps up to step 10) to 0.22" in found.text


def test_accuracy_fell_by_more_than_chance() -> None:
    assert f.accuracy_fell(before=0.5, after=0.46, problems=512) is None  # two deviations are 6.2 points
    assert f.accuracy_fell(before=0.5, after=None, problems=512) is None
    found = f.accuracy_fell(before=0.5, after=0.4, problems=512)
    assert found is not None and "fell from 50.0% to 40.0%" in found.text


# ---- the mismatch over steps ---------------------------------------------------------------------------------------


def test_mismatch_grows() -> None:
    assert f.mismatch_grows(points(*[0.001] * 20)) is None
    assert f.mismatch_grows(points(0.001, 0.1)) is None
    found = f.mismatch_grows(points(*[0.001] * 10, *[0.004] * 10))
    assert found is not None and "grew 4.0-fold: median 0.001 in the first fifth of the steps, 0.004 in the last" in found.text


def test_mismatch_beyond_evidence() -> None:
    fresh = measured(bf16=0.001, trace=0.002)
    assert f.mismatch_beyond_evidence(recent=0.009, evidence=fresh, method="trace") is None
    assert f.mismatch_beyond_evidence(recent=0.9, evidence=None, method="trace") is None
    assert f.mismatch_beyond_evidence(recent=0.9, evidence=fresh, method=None) is None
    found = f.mismatch_beyond_evidence(recent=0.04, evidence=fresh, method="trace")
    assert found is not None and found.severity == "fault"
    assert "20 times the 0.002" in found.text and "stale weights" in found.text


def test_lopsided() -> None:
    assert f.lopsided(points(1.0, 1.2, 0.8)) is None
    assert f.lopsided(points(3.0, 3.0)) is None
    found = f.lopsided(points(*[1.0] * 9, 2.0, 3.0, 4.0, 3.0, 3.0))
    assert found is not None and "3.0 times" in found.text


def test_importance_weights() -> None:
    assert f.importance_weights(truncated=0.005, smallest_ess=0.95) is None
    found = f.importance_weights(truncated=0.02, smallest_ess=0.7)
    assert found is not None
    assert "2.0% of the importance weights were truncated and the effective sample size fell to 70% of the tokens" in found.text


# ---- guidance ------------------------------------------------------------------------------------------------------


def test_low_coverage_joins_k_and_v() -> None:
    counts = {"fc1_in": (995.0, 5.0), "k": (410.0, 590.0), "v": (410.0, 590.0)}
    (found,) = f.low_coverage(counts, prompt_tokens=True)
    assert found.text.startswith("KV guidance covered 41% of tokens: 590 site tokens had no valid record")
    assert found.severity == "fault" and "prefix rows of older weights" in found.advice


def test_low_coverage_of_one_site_and_uncaptured_prompts() -> None:
    (found,) = f.low_coverage({"fc1_in": (80.0, 20.0), "k": (10.0, 0.0)}, prompt_tokens=False)
    assert found.text.startswith("fc1_in (routed-expert input) guidance covered 80% of tokens")
    assert (found.severity, found.site) == ("warning", "fc1_in")
    assert found.advice == "Prompt tokens are not captured (guidance.prompt_tokens=false)."
    assert f.low_coverage({"k": (0.0, 0.0), "v": (99.0, 1.0)}, prompt_tokens=True) == []


def test_unguided_sites_name_the_worst_layer() -> None:
    parts = [share(1, "v", 0.3), share(2, "k", 0.0, guided=True), share(2, "v", 0.2), share(3, "v", 0.5)]
    narrow = replace(GUIDED, sites=("fc1_in", "k"))
    (found,) = f.unguided_sites(narrow, parts)
    assert (found.layer, found.site) == (3, "v")
    assert found.text.startswith("V is not guided in layers 2, 3, which guide fc1_in (routed-expert input), K: it makes 70%")
    assert "V of layer 3 alone 50%" in found.text
    assert f.unguided_sites(GUIDED, parts) == []
    assert f.unguided_sites(replace(narrow, forward="qat"), parts) == []


def test_silent_sites() -> None:
    counts = {"fc1_in": (10.0, 0.0), "k": (10.0, 0.0), "v": (0.0, 0.0)}
    (found,) = f.silent_sites(counts, GUIDED)
    assert (found.layer, found.site, found.severity) == (2, "v", "fault")
    assert f.silent_sites({"k": (0.0, 0.0)}, GUIDED) == []  # nothing counted at all: no conclusion
    assert f.silent_sites(counts, replace(GUIDED, forward="qat")) == []


def test_dominant_site_in_the_words_of_its_remedy() -> None:
    parts = [share(0, "k", 0.38), share(1, "fc1_in", 0.62)]
    found = f.dominant_site(parts, GUIDED)
    assert found is not None
    assert found.text.startswith("The site fc1_in of layer 1 makes 62% of the remaining mismatch")
    assert "guidance.layers covers layers 2, 3; add layer 1" in found.advice and found.severity == "note"
    found = f.dominant_site([share(3, "k", 0.9, guided=True), share(1, "v", 0.1)], GUIDED)
    assert found is not None and found.severity == "warning" and "its codes should not differ" in found.advice
    found = f.dominant_site([share(3, "fc2_in", 0.9), share(1, "v", 0.1)], GUIDED)
    assert found is not None and "add fc2_in to guidance.sites" in found.advice
    found = f.dominant_site(parts, replace(GUIDED, forward="qat"))
    assert found is not None and "forward is qat" in found.advice


def test_no_site_dominates_evenly_spread_differences() -> None:
    even = [share(layer, "k", 1 / 8) for layer in range(8)]
    assert f.dominant_site(even, GUIDED) is None
    assert f.dominant_site([share(0, "k", 1.0)], GUIDED) is None
    uneven = [share(0, "k", 0.3), *(share(layer, "k", 0.7 / 19) for layer in range(1, 20))]
    assert f.dominant_site(uneven, GUIDED) is not None  # 0.3 of 20 sites is six times its fair part


def test_guidance_does_not_help_and_beyond_floor() -> None:
    assert f.guidance_does_not_help(measured(trace=0.001, qat=0.01), GUIDED) is None
    assert f.guidance_does_not_help(measured(trace=0.01, qat=0.01), replace(GUIDED, forward="qat")) is None
    found = f.guidance_does_not_help(measured(trace=0.0095, qat=0.01), GUIDED)
    assert found is not None and found.severity == "fault"
    assert f.beyond_floor(measured(bf16=0.001, trace_all=0.0009)) is None
    found = f.beyond_floor(measured(bf16=0.001, trace_all=0.0013))
    assert found is not None and found.text.startswith("Guiding all layers leaves 1.30 times")


# ---- one layer, one site -------------------------------------------------------------------------------------------


def evidence_of(*sites: SiteGap, age: int = 0) -> Evidence:
    return Evidence(updates_newer=age, tokens=1, methods=(), sites=sites)


def test_inputs_differ_from_the_start_is_stale_weights() -> None:
    found = local.inputs_differ(evidence_of(site(0, "fc1_in", noise=0.2), site(0, "k", noise=0.12), site(1, noise=0.3)))
    assert found is not None and (found.layer, found.site) == (0, "k")
    assert "by 12.0%" in found.text and "stale weights" in found.advice


def test_inputs_differ_from_a_later_site_on_names_it() -> None:
    rows = (site(0, "k", noise=0.002), site(0, "fc1_in", noise=0.004), site(1, "k", noise=0.05), site(1, "v", noise=0.05))
    found = local.inputs_differ(evidence_of(*rows))
    assert found is not None and (found.layer, found.site, found.severity) == (1, "k", "fault")
    assert "after 0.40% at most" in found.text and "between the site before and this one" in found.advice
    aged = local.inputs_differ(evidence_of(*rows, age=3))
    assert aged is not None and aged.severity == "note" and "3 updates newer" in aged.text


def test_the_first_product_after_the_embedding_may_differ_by_one_last_place_only() -> None:
    found = local.inputs_differ(evidence_of(site(0, "v", noise=0.005), site(0, "fc1_in", noise=0.006)))
    assert found is not None and (found.layer, found.site) == (0, "v") and "by 0.5%" in found.text
    assert local.inputs_differ(evidence_of(site(0, "v", noise=0.0035), site(0, "fc1_in", noise=0.012))) is None
    assert local.inputs_differ(evidence_of(site(0, "fc1_in", noise=0.005))) is None  # after attention: the common limit


def test_noise_that_grows_slowly_with_depth_is_no_finding() -> None:
    assert local.inputs_differ(evidence_of(*(site(n, noise=0.003 * 1.3**n) for n in range(20)))) is None
    assert local.inputs_differ(evidence_of(site(0, noise=None), site(1, noise=0.0))) is None
    assert local.inputs_differ(None) is None


def test_recorded_scale_wrong() -> None:
    assert local.recorded_scale_wrong([site(0), site(1, adjacent_share=0.995), site(2, trace_full=0.3)]) == []
    assert local.recorded_scale_wrong([site(0, noise=0.2, adjacent_share=0.5)]) == []  # far apart inputs explain it
    assert local.recorded_scale_wrong([site(0, noise=0.0, adjacent_share=None)]) == []
    far, left = local.recorded_scale_wrong([site(0), site(3, "v", adjacent_share=0.4), site(1, "k", trace_full=12.0)])
    assert (far.layer, far.site) == (3, "v") and "60% of the codes that differ are off by more than one codeword" in far.text
    assert (left.layer, left.site) == (1, "k") and "leave a gap of 12 times" in left.text


def test_own_scale_wrong() -> None:
    rows = [site(layer) for layer in range(4)]
    assert local.own_scale_wrong(rows) == []
    assert local.own_scale_wrong([*rows, site(4, qat=24.0)]) == []  # three times: static scales do differ
    assert local.own_scale_wrong([*rows, site(4, qat=90.0, rtn_rollout_scale=60.0)]) == []  # the rollout's scale is no better
    (found,) = local.own_scale_wrong([*rows, site(4, qat=90.0), site(0, "v", qat=90.0)])  # V has no other layer to compare with
    assert (found.layer, found.site) == (4, "k")
    assert "11 times the 8 usual" in found.text


def test_worse_than_nearest() -> None:
    assert local.worse_than_nearest([site(0)]) == []
    (found,) = local.worse_than_nearest([site(0), site(2, "v", full_worse_than_rtn=7)])
    assert "moved 7 of 1,000 values of V of layer 2" in found.text and found.severity == "fault"


# ---- injected faults: the first thing a reader sees names the layer and the site ------------------------------------


@pytest.mark.parametrize(
    ("make", "code", "layer", "name", "words"),
    [
        (synthetic_runs.with_wrong_own_scale, "own_scale_wrong", 2, "v", "own scale of V of layer 2 is wrong"),
        (synthetic_runs.with_wrong_recorded_scale, "recorded_scale_wrong", 3, "fc1_in", "recorded scale of fc1_in"),
        (synthetic_runs.with_k_guided_and_v_not, "unguided_site", 3, "v", "V is not guided in layers 0, 1, 2, 3"),
        (synthetic_runs.with_stale_weights, "inputs_differ", 0, "k", "first at K of layer 0"),
    ],
)
def test_an_injected_fault_is_the_first_finding(
    tmp_path: Path, make: Callable[[Path], Path], code: str, layer: int, name: str, words: str
) -> None:
    first = analyse(read_run(make(tmp_path))).findings[0]
    assert (first.code, first.layer, first.site) == (code, layer, name)
    assert words in first.text


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    assert analyse(read_run(write_run(tmp_path))).findings == ()


def found_codes(a: Analysis) -> dict[str, Finding]:
    return {finding.code: finding for finding in a.findings}


def test_training_on_stale_weights_shows_against_fresh_evidence(tmp_path: Path) -> None:
    def change(record: Row) -> None:
        record["policy"]["dlogp_mean"] = 0.001 + 0.0005 * record["step"]

    codes = found_codes(analyse(read_run(write_run(tmp_path, change_step=change))))
    assert set(codes) == {"mismatch_beyond_evidence", "mismatch_grows"}
    assert "0.019 at the end, 62 times the 0.0003" in codes["mismatch_beyond_evidence"].text  # 0.001 + 0.0005 x 35.5


def test_an_interrupted_run_with_trouble_says_all_of_it(tmp_path: Path) -> None:
    def change(record: Row) -> None:
        record["skipped_updates"] = int(record["step"] <= 8)
        record["truncated_fraction_of_samples"] = 0.3
        if record["step"] == 5:
            record["loss"] = float("nan")
        for name in ("k", "v"):
            record["sites"][name] |= {"guided_tokens": 410, "fallback_tokens": 590}

    run = read_run(write_run(tmp_path, settings=config(), change_step=change, steps=20, finished=False))
    codes = found_codes(analyse(run))
    assert set(codes) == {"interrupted", "skipped_updates", "length_limit", "nonfinite_metrics", "low_coverage"}
    assert codes["skipped_updates"].text == "8 of 20 updates were skipped."
    assert codes["length_limit"].text == "Responses cut at the length limit: 30%."
    assert codes["low_coverage"].text.startswith("KV guidance covered 41% of tokens")
    assert codes["nonfinite_metrics"].text == "Not a number: loss in 1 step."
