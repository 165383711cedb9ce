"""Shares and pooled figures against hand-made numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_runs import LAYERS, config, write_run

from megatron_trace.diagnostics.attribution import (
    SiteGap,
    Treatment,
    coverage,
    covered,
    in_compute_order,
    pooled,
    pooled_adjacent,
    read_evidence,
    read_treatment,
    rule_shares,
    shares,
)
from megatron_trace.diagnostics.run_data import read_run


def site(layer: int, name: str, *, values: int = 100, noise: float | None = 0.01, **figures: float | None) -> SiteGap:
    gap = {"qat": 8.0, "rtn_rollout_scale": 6.0, "trace_full": 0.0, "trace_compact": 0.0}
    flips = {"nearest": 0.1, "full": 0.0, "compact": 0.0}
    gap |= {k: v for k, v in figures.items() if k in gap}  # type: ignore[misc]
    flips |= {k: v for k, v in figures.items() if k in flips}  # type: ignore[misc]
    adjacent = figures.get("adjacent", 1.0)
    return SiteGap(layer, name, values, noise, gap, flips, adjacent, 0, 0)


GUIDED = Treatment(forward="guided", layers=(1,), sites=("fc1_in", "k"), bits="1")


def test_unguided_sites_make_what_remains_by_flips_times_values() -> None:
    found = shares([site(0, "fc1_in", values=300), site(0, "k", values=100), site(1, "fc1_in", values=300)], GUIDED)
    assert [s.guided for s in found] == [False, False, True]
    assert [s.code_share for s in found] == [pytest.approx(0.75), pytest.approx(0.25), 0.0]
    assert found[2].codes == 0.0


def test_rows_without_a_record_count_as_nearest_with_own_scales() -> None:
    (found,) = shares([site(1, "k", compact=0.01)], GUIDED, {"k": (30.0, 70.0)})
    assert found.coverage == pytest.approx(0.3)
    assert found.codes == pytest.approx(0.3 * 0.01 + 0.7 * 0.1)


def test_error_share_weighs_the_squared_gap_times_noise() -> None:
    rows = [site(0, "k", noise=0.01, qat=8.0), site(0, "v", noise=0.02, qat=8.0), site(1, "v", values=200, noise=0.01)]
    found = shares(rows, GUIDED)  # errors 0.08, 0.16, 0.08 squared, times 100, 100, 200 values
    assert [s.error_share for s in found] == [pytest.approx(1 / 7), pytest.approx(4 / 7), pytest.approx(2 / 7)]


def test_whole_codewords_and_syndromes_count_full_flips() -> None:
    row = site(1, "k", full=0.02, compact=0.05)
    for bits, expected in (("1", 0.05), ("4", 0.02), ("syndrome", 0.02)):
        (found,) = shares([row], Treatment("guided", (1,), ("k",), bits))
        assert found.codes == expected


def test_a_trainer_that_rounds_no_activations_has_no_shares() -> None:
    for forward, expected in (("bf16", 0), ("w4a16", 0), ("qat", 1)):
        assert len(shares([site(0, "k")], Treatment(forward, (), (), "1"))) == expected


def test_no_differing_code_gives_no_share() -> None:
    (found,) = shares([site(0, "k", nearest=0.0)], GUIDED)
    assert found.code_share is None
    assert rule_shares([site(0, "k", nearest=0.0)], "nearest") == (None,)


def test_pooled_figures_weigh_by_values_and_flips() -> None:
    rows = [site(0, "k", values=100, nearest=0.3, adjacent=1.0), site(0, "v", values=300, nearest=0.1, adjacent=0.5)]
    assert pooled(rows, "nearest") == pytest.approx((30 + 30) / 400)
    assert pooled_adjacent(rows) == pytest.approx(0.75)
    assert rule_shares(rows, "nearest") == (pytest.approx(0.5), pytest.approx(0.5))
    assert pooled([], "nearest") is None and pooled_adjacent([]) is None


def test_relative_error_is_gap_times_noise_and_unknown_without_a_gap() -> None:
    assert site(0, "k", noise=0.02).relative_error("qat") == pytest.approx(0.16)
    assert site(0, "k", noise=0.0, qat=None).relative_error("qat") is None


def test_sites_come_in_the_order_a_layer_computes_them() -> None:
    rows = [site(1, "k"), site(0, "fc1_in"), site(0, "v"), site(0, "k"), site(0, "fc2_in")]
    assert [(s.layer, s.site) for s in in_compute_order(rows)] == [(0, "k"), (0, "v"), (0, "fc1_in"), (0, "fc2_in"), (1, "k")]


@pytest.mark.parametrize(
    ("precision", "layers", "expected"),
    [
        ({"rollout": "nvfp4", "trainer_forward": "auto"}, "latter_half", ("guided", (2, 3))),
        ({"rollout": "nvfp4", "trainer_forward": "auto", "bf16_layers": [3]}, "latter_half", ("guided", (2,))),
        ({"rollout": "nvfp4", "trainer_forward": "guided"}, "all", ("guided", (0, 1, 2, 3))),
        ({"rollout": "nvfp4", "trainer_forward": "guided"}, [3, 1], ("guided", (1, 3))),
        ({"rollout": "nvfp4", "trainer_forward": "qat"}, "all", ("qat", ())),
        ({"rollout": "bf16", "trainer_forward": "auto"}, "all", ("bf16", ())),
    ],
)
def test_treatment_resolves_the_configuration(precision: dict, layers: object, expected: tuple) -> None:
    found = read_treatment(config(precision=precision, guidance={"bits": 1, "layers": layers, "sites": ["k"]}))
    assert found is not None
    assert (found.forward, found.layers) == expected
    assert found.guides(3, "k") == (3 in expected[1])
    assert not found.guides(3, "v")


def test_treatment_is_unknown_without_its_sections() -> None:
    assert read_treatment({}) is None
    assert read_treatment({"model": {"num_layers": 4}, "guidance": {"layers": "all"}}) is None


def test_evidence_is_read_freshest_first_with_ratios_to_its_own_floor(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    fresh, stale = read_evidence(run)
    assert (fresh.updates_newer, stale.updates_newer) == (0, 2)
    assert len(fresh.sites) == 3 * LAYERS
    trace = fresh.method("trace_half")
    assert trace is not None and trace.ratio == pytest.approx(1.2) and trace.largest == pytest.approx(0.12)
    assert fresh.switches == ()
    assert coverage(run) == {s: (40 * 16000.0, 0.0) for s in ("fc1_in", "k", "v")}
    assert covered({"k": (1.0, 3.0)}, "k") == 0.25 and covered({}, "k") == 1.0


def test_evidence_with_holes_and_site_switches(tmp_path: Path) -> None:
    def change(values: dict) -> None:
        entry = values["evidence"][1]
        del entry["dlogp"]["bf16"]
        entry["sites"] = [{"layer": 0, "site": "k", "gap_qat": None}, {"site": "v"}, 7]
        entry["site_switches"] = [{"layer": 0, "site": "k", "dlogp_mean_alone": 0.009, "dlogp_mean_without": 0.002}]
        values["evidence"] += [None, {"updates_newer": "soon"}]

    fresh = read_evidence(read_run(write_run(tmp_path, change_summary=change)))[0]
    assert [m.ratio for m in fresh.methods] == [None] * 7
    (row,) = fresh.sites
    assert (row.values, row.noise, row.gap["qat"], row.adjacent_share) == (0, None, None, None)
    (switch,) = fresh.switches
    assert (switch.alone, switch.without) == (0.009, 0.002)
