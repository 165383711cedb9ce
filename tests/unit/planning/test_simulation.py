"""Event simulation: cases with an exact answer, and the paper's step times from its shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_trace.config import ConfigError, load
from megatron_trace.planning.simulation import PAPER_SHARES, Constants, paper_ratio, simulate, simulate_config

# Every response has the longest length, so that all times are exact.
EQUAL = Constants(
    slots=4,
    trajectories=8,
    median_tokens=1e9,
    longest_tokens=100,
    token_time=1.0,
    guidance_share=0.0,
    upload_time=0.0,
    train_time=50.0,
    refit_time=0.0,
    max_version_lag=1,
)


def test_a_step_bound_by_its_rollout() -> None:
    found = simulate(EQUAL)
    assert (found.step_time, found.rollout_time, found.waits_for) == (200.0, 200.0, "rollout")


def test_a_step_bound_by_training() -> None:
    found = simulate(replace(EQUAL, train_time=500.0))
    assert (found.step_time, found.waits_for) == (500.0, "nothing")


def test_without_staleness_the_parts_add_up() -> None:
    assert simulate(replace(EQUAL, max_version_lag=0, refit_time=7.0)).step_time == 200.0 + 50.0 + 7.0


def test_an_upload_longer_than_the_rollout_bounds_the_step() -> None:
    found = simulate(replace(EQUAL, upload_time=900.0, max_version_lag=3))
    assert (found.step_time, found.waits_for) == (900.0, "guidance upload")


def test_recording_stretches_the_rollout_by_its_share() -> None:
    assert simulate(replace(EQUAL, guidance_share=0.2)).step_time == pytest.approx(250.0)


def test_the_papers_step_from_its_shares() -> None:
    assert sum(PAPER_SHARES.values()) == pytest.approx(1.0)
    found = paper_ratio()
    assert found.plain == pytest.approx(664)
    assert found.computed_guided == pytest.approx(664 / 0.94)
    # Shares rounded to a percent explain 706 of the published 713: within one percent of it.
    assert found.computed_guided == pytest.approx(found.published_guided, rel=0.01)


def test_what_a_simulation_lacks_is_named(tiny_config_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate_config(load(tiny_config_path))
    assert (
        caught.value.problems[0]
        == "cluster.device_bandwidth_gb_s: needed to simulate; give cluster.device_bandwidth_gb_s=VALUE"
    )


def test_storage_bounds_large_runs_first(repository: Path) -> None:
    config = load(repository / "configs/presets/qwen3_5_35b_a3b.yaml", planned_only=True)
    report = simulate_config(config)
    assert [row.devices for row in report.rows] == [128, 256, 512, 1024, 2048, 4096]
    assert report.rows[-1].guided.waits_for == "guidance upload"
    assert report.rows[-1].guided.step_time > report.rows[0].guided.step_time
    assert "computed by event simulation, not measured" in report.text()
    assert report.to_dict()["computed"] is True
