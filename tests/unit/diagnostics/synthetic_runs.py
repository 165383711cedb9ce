"""Runs on disk with known figures: a healthy one, and the same with one fault. No trainer is involved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, STEPS = 4, 40
SITES = ("fc1_in", "k", "v")
VALUES = {"fc1_in": 400_000, "k": 100_000, "v": 100_000}
Row = dict[str, Any]


def config(**changes: Any) -> Row:
    """Settings of a guided run; ``changes`` replace whole sections."""
    return {
        "run": {"name": "healthy", "output_dir": "runs", "seed": 0},
        "model": {"num_layers": LAYERS},
        "precision": {"rollout": "nvfp4", "trainer_forward": "auto", "bf16_layers": []},
        "guidance": {"bits": 1, "layers": "all", "sites": list(SITES), "prompt_tokens": True},
        "rollout": {"max_new_tokens": 24},
        "algorithm": {"updates_per_rollout": 1, "truncation": 5.0},
        "trainer": {"steps": STEPS},
        "evidence": {"enabled": True},
    } | changes


def step_record(step: int) -> Row:
    """Metrics of one healthy reinforcement step; every figure is a simple function of the step."""
    wave = 1.0 + 0.1 * (step % 3)
    return {
        "phase": "rl",
        "step": step,
        "version": 300 + step,
        "reward": 0.3 + 0.005 * step,
        "accuracy": 0.5 + 0.002 * step if step % 10 == 0 else None,
        "loss": -0.1 / wave,
        "grad_norm": 0.5 * wave,
        "skipped_updates": 0,
        "truncated_fraction_of_samples": 0.01,
        "zero_variance_fraction": 0.2,
        "response_tokens": 4000.0,
        "policy": {
            "tokens": 4000.0,
            "nonfinite_tokens": 0.0,
            "dlogp_mean": 0.001 * wave,
            "dlogp_p95": 0.003 * wave,
            "dlogp_max": 0.2 * wave,
            "kl_k1": 1e-5,
            "kl_k3": 2e-5 * wave,
            "rho_max": 1.2 * wave,
            "ess": 0.999,
            "truncated_fraction": 0.0,
            "clip_fraction": 0.01,
            "clip_fraction_high": 0.006,
            "clip_fraction_low": 0.004,
            "asymmetry": 1.05,
        },
        "sites": {
            site: {
                "guided_tokens": 16000,
                "fallback_tokens": 0,
                "flip_rate_without_guidance": 0.03 * wave,
                "flip_rate_with_guidance": 0.0 if step % 2 else 1e-5,
            }
            for site in SITES
        },
        "guidance_bytes_per_token": 80,
        "tokens_per_second": 12000.0 * wave,
        "seconds": {"rollout": 0.3 * wave, "train": 1.2, "refit": 0.03},
    }


def site_row(layer: int, site: str) -> Row:
    """A healthy site: noise grows slowly with depth, guidance leaves nothing, flips are neighbours."""
    return {
        "layer": layer,
        "site": site,
        "values": VALUES[site],
        "noise": 0.002 + 0.001 * layer,
        "gap_qat": 8.0,
        "gap_rtn_rollout_scale": 6.0,
        "gap_trace_full": 0.0,
        "gap_trace_compact": 0.05,
        "flips_nearest": 0.01,
        "flips_full": 0.0,
        "flips_compact": 1e-5,
        "adjacent_share": 1.0,
        "full_worse_than_rtn": 0,
        "compact_worse_than_rtn": 0,
    }


def evidence(updates_newer: int = 0) -> Row:
    """|dlogp| of the methods and all sites, for one policy age."""
    scale = 1.0 + updates_newer / 2
    means = {"bf16": 0.001, "bf16_trainer": 0.02, "qat": 0.01, "rtn_rollout_scale": 0.006, "full": 0.0003}
    means |= {"trace_all": 0.0003, "trace_half": 0.0012, "trace": 0.0003}
    return {
        "updates_newer": updates_newer,
        "tokens": 2000.0,
        "dlogp": {name: {"mean": mean * scale, "max": 100 * mean, "tokens": 2000.0} for name, mean in means.items()},
        "sites": [site_row(layer, site) for layer in range(LAYERS) for site in SITES],
    }


def summary() -> Row:
    """What a finished healthy run sums up to."""
    return {
        "name": "healthy",
        "steps": STEPS,
        "heldout_problems": 512,
        "accuracy_warmup": 0.5,
        "accuracy_final": 0.6,
        "guidance_bytes_per_token": 80,
        "guided_fraction": 1.0,
        "seconds": 100.0,
        "peak_rss_gib": 1.5,
        "contract_fingerprint": "ab" * 32,
        "numerics": {"calls": {"quantize: eager": 12}, "fallbacks": {"quantize: no compiler": 3}},
        "evidence": [evidence(2), evidence(0)],
    }


def write_run(
    directory: Path,
    *,
    settings: Row | None = None,
    change_step: Callable[[Row], None] | None = None,
    change_site: Callable[[Row], None] | None = None,
    change_summary: Callable[[Row], None] | None = None,
    steps: int = STEPS,
    finished: bool = True,
) -> Path:
    """Write a run's three files below ``directory``; each ``change_...`` may spoil one record in place."""
    directory.mkdir(parents=True, exist_ok=True)
    warmup = [{"phase": "warmup", "step": s, "loss": 4.0 / s, "seconds": {"train": 0.5}} for s in range(1, 31)]
    records = [step_record(s) for s in range(1, steps + 1)]
    for record in records if change_step is not None else ():
        change_step(record)  # type: ignore[misc]
    (directory / "config.json").write_text(json.dumps(settings or config()))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*warmup, *records]))
    if finished:
        values = summary()
        for entry in values["evidence"]:
            for row in entry["sites"] if change_site is not None else ():
                change_site(row)  # type: ignore[misc]
        if change_summary is not None:
            change_summary(values)
        (directory / "summary.json").write_text(json.dumps(values))
    return directory


# ---- one fault each ------------------------------------------------------------------------------------------------


def with_wrong_own_scale(directory: Path) -> Path:
    """The trainer rounds V of layer 2 with an amax sixteen times too small, so that it clips; the recorded one is right."""

    def change(row: Row) -> None:
        if (row["layer"], row["site"]) == (2, "v"):
            row["gap_qat"] = 90.0

    return write_run(directory, settings=config(run={"name": "own-scale"}), change_site=change)


def with_wrong_recorded_scale(directory: Path) -> Path:
    """The amax recorded for the routed-expert input of layer 3 is twice the true one; figures as ``test_real_faults`` finds."""

    def change(row: Row) -> None:
        if (row["layer"], row["site"]) == (3, "fc1_in"):
            row |= {"gap_rtn_rollout_scale": 18.2, "gap_trace_full": 56.0, "gap_trace_compact": 30.2, "adjacent_share": 0.29}
            row |= {"flips_nearest": 0.86, "flips_full": 0.73, "flips_compact": 0.73}

    return write_run(directory, settings=config(run={"name": "recorded-scale"}), change_site=change)


def with_k_guided_and_v_not(directory: Path) -> Path:
    """V is left out of the guided sites; layer 3's V differs most."""

    def change_step(record: Row) -> None:
        record["sites"]["v"] = {
            "guided_tokens": 0,
            "fallback_tokens": 0,
            "flip_rate_without_guidance": None,
            "flip_rate_with_guidance": None,
        }

    def change_site(row: Row) -> None:
        if row["site"] == "v":
            row["flips_nearest"] = 0.01 + 0.005 * row["layer"]

    guidance = {"bits": 1, "layers": "all", "sites": ["fc1_in", "k"], "prompt_tokens": True}
    settings = config(run={"name": "v-unguided"}, guidance=guidance)
    return write_run(directory, settings=settings, change_step=change_step, change_site=change_site)


def with_stale_weights(directory: Path) -> Path:
    """The engine kept old weights: all values differ from the first site on, no rounding helps."""

    def change_step(record: Row) -> None:
        record["policy"]["dlogp_mean"] = 0.01 * record["step"]

    def change_site(row: Row) -> None:
        row |= {"noise": 0.12 + 0.02 * row["layer"], "gap_qat": 1.1, "gap_rtn_rollout_scale": 1.1, "gap_trace_full": 0.9}
        row |= {"gap_trace_compact": 1.0, "flips_nearest": 0.3, "flips_full": 0.25, "flips_compact": 0.28}
        row["adjacent_share"] = 0.8

    def change_summary(values: Row) -> None:
        for entry in values["evidence"]:
            for name in ("qat", "rtn_rollout_scale", "full", "trace_all", "trace_half", "trace"):
                entry["dlogp"][name]["mean"] = 0.08

    return write_run(
        directory,
        settings=config(run={"name": "stale"}),
        change_step=change_step,
        change_site=change_site,
        change_summary=change_summary,
    )
