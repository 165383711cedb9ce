"""The evidence table against oracles written here: what each method may depend on, and the local gaps value by value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainers import KV_AMAX, PAD, rollout, run_config, trainer_of

from megatron_trace.config import RunConfig
from megatron_trace.guidance.frames import Rounding
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.modeling.site_probe import probe
from megatron_trace.rollout.protocol import Trajectory
from megatron_trace.trainer import evidence
from megatron_trace.trainer.evidence import EvidenceCase
from megatron_trace.trainer.megatron import MegatronTrainer
from megatron_trace.trainer.progress import Progress
from megatron_trace.trainer.summary import DLOGP_KEYS, summarize, summary_table

GRID = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
MAGNITUDE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RAW = GuidanceSpec(bits=4, layers=(0, 1, 2), raw_values=True)
PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (27, 9, 50, 28, 8)]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return run_config(rollout={"tensor_parallel": 2})


@pytest.fixture(scope="module")
def trainer(config: RunConfig, lone_process: None) -> MegatronTrainer:
    return trainer_of(config)


@pytest.fixture(scope="module")
def trajectories(config: RunConfig, lone_process: None) -> list[Trajectory]:
    """Recorded by an engine whose partial sums are rounded, so that the trainer's values differ from the engine's."""
    return rollout(config, spec=RAW, tensor_parallel=2, prompts=PROMPTS)


def table(trainer: MegatronTrainer, trajectories: list[Trajectory]) -> dict[str, float]:
    methods = evidence._methods(trainer.config)
    return {m.name: evidence._mismatch(trainer, trajectories, m, pad_id=PAD)["mean"] for m in methods}


def changed(trajectories: list[Trajectory], part: str) -> list[Trajectory]:
    """The same trajectories with every code flipped, or every block scale one E4M3 step lower, in all columns."""
    out = []
    for t in trajectories:
        assert t.guidance is not None
        rows = t.guidance.rows.copy()
        for column in t.guidance.layout:
            start, stop = next((a, b) for name, a, b in column.parts if name == part)
            block = rows[:, start:stop]
            rows[:, start:stop] = block ^ 0x11 if part == "codes" else np.maximum(block, 1) - 1
        out.append(replace(t, guidance=replace(t.guidance, rows=rows)))
    return out


def test_each_method_reads_of_the_record_what_its_name_says(trainer, trajectories) -> None:
    plain, codes, scales = (table(trainer, t) for t in (trajectories, *(changed(trajectories, p) for p in ("codes", "scale"))))
    same_codes = {name for name in plain if plain[name] == codes[name]}
    same_scales = {name for name in plain if plain[name] == scales[name]}
    assert same_scales == {"bf16_trainer", "w4a16", "qat"}
    assert same_codes == {"bf16_trainer", "w4a16", "qat", "rtn_rollout_scale"}
    assert plain["trace"] == plain["full"], "the run guides all layers at 4 bits"
    assert 0 < plain["full"] < plain["qat"] < plain["bf16_trainer"]


def by_hand(x: np.ndarray, codes: np.ndarray, scale: np.ndarray, amax: np.ndarray) -> dict[str, np.ndarray]:
    """Rounded values float64 [n, K] of each rule by search; ``codes`` 0..15, ``scale`` per value, ``amax`` [n, 1]."""
    step = scale * amax / 2688
    z = np.clip(x / step, -6, 6)
    low = np.searchsorted(GRID, z, side="right") - 1
    on_grid = GRID[low] == z
    high = np.where(on_grid, low, np.minimum(low + 1, 14))
    rolled = np.where(codes >= 8, -MAGNITUDE[codes & 7], MAGNITUDE[codes & 7])
    distance = [np.abs(GRID[i] - rolled) for i in (low, high)]
    parity = (low + 1) % 2  # -6 has mantissa bit 1, and bits alternate
    full = np.where(distance[0] <= distance[1], low, high)
    compact = np.where(parity == (codes & 1), low, high)
    nearest = np.where(np.abs(GRID[low] - z) <= np.abs(GRID[high] - z), low, high)
    rules = {"rtn_rollout_scale": nearest, "trace_full": full, "trace_compact": compact}
    return {name: GRID[i] * step for name, i in rules.items()} | {"rollout": rolled * step}


@pytest.mark.parametrize(("layer", "site"), [(1, "fc1_in"), (2, "k"), (2, "v")])
def test_local_gaps_equal_a_search_by_hand(trainer, trajectories, monkeypatch, layer: int, site: str) -> None:
    seen: list[torch.Tensor] = []
    values = type(probe).values

    def spy(self, frame, at, name, before) -> None:
        values(self, frame, at, name, before)
        if (at, name) == (layer, site):
            count = int(frame.is_token.sum())
            assert count == len(self.kept[at, name][-1])
            seen.append(self.kept[at, name][-1])

    monkeypatch.setattr(type(probe), "values", spy)
    case = EvidenceCase(version=0, nvfp4=trajectories[:1], bf16=[])
    (row,) = [
        r
        for r in evidence.local_gaps(trainer, case, forward=Rounding.GUIDED, pad_id=PAD)
        if (r["layer"], r["site"]) == (layer, site)
    ]
    record = trajectories[0].guidance
    at = {name: record.rows[:, a:b] for name, a, b in record.layout.column(layer, site).parts}
    codes = np.stack((at["codes"] & 15, at["codes"] >> 4), axis=-1).reshape(len(record), -1).astype(int)
    scale = torch.from_numpy(at["scale"].copy()).view(torch.float8_e4m3fn).double().numpy().repeat(16, axis=-1)
    amax = at["amax"].copy().view(np.float32).astype(float) if site == "fc1_in" else np.full((len(record), 1), KV_AMAX)
    x_train = seen[0].double().numpy()
    x_roll = torch.from_numpy(at["raw"].copy()).view(torch.bfloat16).double().numpy()
    found = by_hand(x_train, codes, scale, amax)
    noise = np.linalg.norm(x_train - x_roll)
    assert noise > 0
    assert row["noise"] == pytest.approx(noise / np.linalg.norm(x_roll), rel=0.01)
    for name in ("rtn_rollout_scale", "trace_full", "trace_compact"):
        expected = np.linalg.norm(found[name] - found["rollout"]) / noise
        assert row[f"gap_{name}"] == pytest.approx(expected, rel=0.02, abs=1e-9)
    assert row["flips_nearest"] == pytest.approx(np.mean(found["rtn_rollout_scale"] != found["rollout"]), abs=2 / codes.size)


def test_gaps_of_a_float32_run_are_not_measured(lone_process: None) -> None:
    """A record keeps values as BF16: what would be measured is their rounding, about 0.0017, not the run's noise."""
    config = run_config(precision={"compute_dtype": "float32"})
    trajectories = rollout(config, spec=RAW, prompts=PROMPTS[:1])
    case = EvidenceCase(version=0, nvfp4=trajectories, bf16=[])
    rows = evidence.local_gaps(trainer_of(config), case, forward=Rounding.GUIDED, pad_id=PAD)
    assert rows == [] and set(evidence.summarize_gaps(rows).values()) == {None, 0}
    assert evidence.summarize_gaps(rows)["full_worse_than_rtn"] is None


@pytest.mark.parametrize("forward", ["qat", "w4a16", "bf16"])
def test_a_run_that_is_not_guided_has_no_row_of_its_own(forward: str) -> None:
    config = run_config(precision={"trainer_forward": forward})
    names = [m.name for m in evidence._methods(config)]
    assert names == ["bf16_trainer", "w4a16", "qat", "rtn_rollout_scale", "full", "trace_all", "trace_half"]


def test_the_run_s_own_row_leaves_out_what_the_run_leaves_out(trainer, trajectories) -> None:
    config = run_config(rollout={"tensor_parallel": 2}, guidance={"layers": "all", "bits": 4, "prompt_tokens": False})
    without = [replace(t, guidance=replace(t.guidance, valid=t.guidance.valid.copy())) for t in trajectories]
    for t in without:
        t.guidance.valid[: t.prompt_length] = False
    own = next(m for m in evidence._methods(config) if m.name == "trace")
    expected = evidence._mismatch(trainer, without, own, pad_id=PAD)["mean"]
    assert evidence._mismatch(trainer, trajectories, own, pad_id=PAD)["mean"] == expected


@pytest.mark.parametrize(
    ("bf16_layers", "forward", "missing"),
    [
        ((2,), "guided", {"trace_half"}),
        ((0, 1, 2), "qat", {"trace", "trace_half", "trace_all", "full", "rtn_rollout_scale"}),
    ],
)
def test_rows_without_a_record_are_left_out(bf16_layers, forward, missing, lone_process: None) -> None:
    """With the latter half, or all layers, in BF16 the summary says null there and the run ends as others do."""
    layers = tuple(n for n in range(3) if n not in bf16_layers)
    config = run_config(precision={"bf16_layers": bf16_layers, "trainer_forward": forward}, guidance={"layers": "all"})
    spec = GuidanceSpec(bits=4, layers=layers, raw_values=True)
    trajectories, trainer = rollout(config, spec=spec, prompts=PROMPTS[:1]), trainer_of(config)
    measured = evidence.measure(trainer, EvidenceCase(version=0, nvfp4=trajectories, bf16=trajectories), pad_id=PAD)
    every = {"bf16", "bf16_trainer", "w4a16", "qat", "rtn_rollout_scale", "full", "trace_all", "trace_half", "trace"}
    assert set(measured["dlogp"]) == every - missing
    assert {row["layer"] for row in measured["sites"]} == set(layers)
    values = summarize(
        config,
        Progress(),
        updates=0,
        accuracy_final=0.0,
        evidence=[measured],
        guidance_bytes_per_token=0,
        seconds=0.0,
        peak_rss_gib=0.0,
    )
    assert {key for key, name in DLOGP_KEYS.items() if values[key] is None} == {f"dlogp_mean_{name}" for name in missing}
    assert summary_table(values)
