"""The figures a run ends with, by fixed names."""

from __future__ import annotations

import platform as host
from collections.abc import Sequence
from typing import Any

import torch

from megatron_trace.config import RunConfig
from megatron_trace.numerics import dispatch
from megatron_trace.trainer.evidence import summarize_gaps
from megatron_trace.trainer.progress import Progress

DLOGP_KEYS = {
    "dlogp_mean_bf16": "bf16",
    "dlogp_mean_bf16_trainer": "bf16_trainer",
    "dlogp_mean_w4a16": "w4a16",
    "dlogp_mean_qat": "qat",
    "dlogp_mean_rtn_rollout_scale": "rtn_rollout_scale",
    "dlogp_mean_full": "full",
    "dlogp_mean_trace": "trace",
    "dlogp_mean_trace_all": "trace_all",
    "dlogp_mean_trace_half": "trace_half",
}
"""Summary key -> method of the evidence table (null without such a row). ``bf16`` is the floor: neither side quantised."""


def summarize(
    config: RunConfig,
    state: Progress,
    *,
    updates: int,
    accuracy_final: float,
    evidence: Sequence[dict[str, Any]],
    guidance_bytes_per_token: int,
    seconds: float,
    peak_rss_gib: float,
) -> dict[str, Any]:
    """All summary values; those of the evidence are null when it was switched off."""
    fresh = next((e for e in evidence if e["updates_newer"] == 0), None)
    guided = state.guided_tokens + state.fallback_tokens
    values: dict[str, Any] = {
        "name": config.run.name,
        "seed": config.run.seed,
        "rollout": config.precision.rollout,
        "trainer_forward": config.trainer_forward,
        "steps": state.step,
        "updates": updates,
        "heldout_problems": config.task.heldout_problems,
        "accuracy_warmup": state.accuracy_warmup,
        "accuracy_final": accuracy_final,
        "reward_first": state.rewards[0] if state.rewards else None,
        "reward_last": state.rewards[-1] if state.rewards else None,
        "guidance_bytes_per_token": guidance_bytes_per_token,
        "guided_fraction": state.guided_tokens / guided if guided else 0.0,
        "fallback_site_tokens": state.fallback_tokens,
        "seconds": seconds,
        "peak_rss_gib": peak_rss_gib,
        "contract_fingerprint": config.contract.fingerprint,
        "compute": _compute(),
        "numerics": dispatch.report(),
        "host": {"machine": host.machine(), "python": host.python_version(), "torch": torch.__version__},
    }
    for key, method in DLOGP_KEYS.items():
        values[key] = None if fresh is None or method not in fresh["dlogp"] else fresh["dlogp"][method]["mean"]
    values |= (
        dict.fromkeys(("gap_qat", "gap_rtn_rollout_scale", "gap_trace_full", "gap_trace_compact", "full_worse_than_rtn"))
        if fresh is None
        else summarize_gaps(fresh["sites"])
    )
    values["gaps_qat_forward"] = None if fresh is None else summarize_gaps(fresh["sites_qat_forward"])
    values["evidence"] = list(evidence)
    return values


def summary_table(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What the console shows of ``values``."""
    rows = [
        ("held-out accuracy, warm-up -> final", f"{_figure(values['accuracy_warmup'])} -> {_figure(values['accuracy_final'])}"),
        ("reward, first -> last step", f"{_figure(values['reward_first'])} -> {_figure(values['reward_last'])}"),
    ]
    for entry in values["evidence"]:
        floor = entry["dlogp"]["bf16"]["mean"]
        rows.append((f"mean |dlogp|, policy {entry['updates_newer']} updates newer", f"{entry['tokens']:.0f} tokens"))
        rows += [
            (f"    {name}", f"{row['mean']:.5f}  {_ratio(row['mean'], floor)} x BF16") for name, row in entry["dlogp"].items()
        ]
    for key in ("gap_qat", "gap_rtn_rollout_scale", "gap_trace_full", "gap_trace_compact", "full_worse_than_rtn"):
        rows.append((key, _figure(values[key])))
    rows += [
        ("guidance bytes per token", str(values["guidance_bytes_per_token"])),
        ("guided share of guided-site tokens", _figure(values["guided_fraction"])),
        ("compute", values["compute"]),
        ("seconds", f"{values['seconds']:.0f}"),
        ("peak memory, all ranks", f"{values['peak_rss_gib']:.2f} GiB"),
    ]
    return rows


def _compute() -> str:
    if torch.cuda.is_available():
        return "CUDA"
    compiler = dispatch.unavailable("compiled") or "a C++ compiler is there but not needed"
    return f"CPU, eager, matrix products in FP32 rounded to BF16 ({compiler})"


def _ratio(value: float, floor: float) -> str:
    return f"{value / floor:6.2f}" if floor else "     -"


def _figure(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"
