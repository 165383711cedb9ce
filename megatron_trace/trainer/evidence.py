"""What each method would have made of the same trajectories: |dlogp| per rounding method, and the local gap at every site.

``collect`` samples held-out trajectories with everything recorded (whole codes, all layers, the BF16 values before rounding)
and scores the same tokens with an unquantised engine. ``measure`` compares them with the trainer as it is then, so the trainer
may be some updates newer than the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_trace.config import RunConfig
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.segments import narrowed
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout, latter_half
from megatron_trace.guidance.store import GuidanceStore
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import guided
from megatron_trace.numerics.guided import GuidanceRecord
from megatron_trace.numerics.nvfp4 import NVFP4Tensor
from megatron_trace.rollout.build import build_engine
from megatron_trace.rollout.protocol import GenerationRequest, SamplingParams, Trajectory
from megatron_trace.tasks.base import Task
from megatron_trace.trainer.batch import MicroBatch, Sample, micro_batches
from megatron_trace.trainer.collectives import gathered, global_max, global_sum
from megatron_trace.trainer.megatron import MegatronTrainer, data_parallel
from megatron_trace.trainer.refit import build_bundle, refit

NOISE_LIMIT = 0.01
"""Relative input noise below which a site counts as quiet: compact guidance is then expected close to full."""


@dataclass(frozen=True)
class EvidenceCase:
    """This rank's trajectories of one weight version, by the NVFP4 engine and by the unquantised engine on the same tokens."""

    version: int
    nvfp4: list[Trajectory]
    bf16: list[Trajectory]


@dataclass(frozen=True)
class Method:
    """One row of the table: how the trainer rounds, which record it is given (None: none), and whether of prompt tokens too."""

    name: str
    rounding: Rounding
    record: RecordLayout | None = None
    prompt_tokens: bool = True


def collect(trainer: MegatronTrainer, task: Task) -> EvidenceCase:
    """Sample and score the evidence trajectories with the trainer's current weights. Collective."""
    config = trainer.config
    fingerprint = config.contract.fingerprint
    rank, size = data_parallel()
    problems = task.heldout_problems(config.evidence.prompts)[rank::size]
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        seed=config.run.seed + 1,
        stop_token_ids=(task.tokenizer.eos_id,),
    )
    group = config.evidence.samples_per_prompt
    requests = [
        GenerationRequest(sample_id=(rank + i * size) * group + g, prompt=p.prompt_ids, sampling=sampling)
        for i, p in enumerate(problems)
        for g in range(group)
    ]
    engine = build_engine(config, quantized=True)
    refit(engine, build_bundle(trainer, quantized=True, contract_fingerprint=fingerprint))
    nvfp4 = engine.generate(requests, capture=_everything(config), capture_routes=True)
    engine.shutdown()
    floor = build_engine(config, quantized=False)
    refit(floor, build_bundle(trainer, quantized=False, contract_fingerprint=fingerprint))
    forced = [
        replace(r, forced_tokens=tuple(t.tokens[t.prompt_length :].tolist())) for r, t in zip(requests, nvfp4, strict=True)
    ]
    bf16 = floor.generate(forced, capture_routes=True)
    floor.shutdown()
    return EvidenceCase(version=trainer.version, nvfp4=nvfp4, bf16=bf16)


def measure(trainer: MegatronTrainer, case: EvidenceCase, *, pad_id: int) -> dict[str, object]:
    """All methods on ``case`` with the trainer's current weights. Collective; the same result on every rank.

    Local gaps are left out (no sites) under ``precision.compute_dtype`` float32, whose values a record keeps rounded to BF16.
    """
    methods = _methods(trainer.config)
    floor = _mismatch(trainer, case.bf16, Method("bf16", Rounding.BF16), pad_id=pad_id)
    table = {m.name: _mismatch(trainer, case.nvfp4, m, pad_id=pad_id) for m in methods}
    sites = {f.value: local_gaps(trainer, case, forward=f, pad_id=pad_id) for f in (Rounding.GUIDED, Rounding.NEAREST)}
    return {
        "updates_newer": trainer.version - case.version,
        "tokens": floor["tokens"],
        "dlogp": {"bf16": floor, **table},
        "ratio_to_bf16": {name: _ratio(row["mean"], floor["mean"]) for name, row in table.items()},
        "sites": sites[Rounding.GUIDED.value],
        "sites_qat_forward": sites[Rounding.NEAREST.value],
    }


def _everything(config: RunConfig) -> GuidanceSpec:
    layers = tuple(n for n in range(config.model.num_layers) if n not in config.precision.bf16_layers)
    return GuidanceSpec(bits=4, layers=layers, raw_values=True)


def _methods(config: RunConfig) -> list[Method]:
    """The rows of the table, without those whose record would be empty; ``trace`` is the run's own, where that is guided."""
    model, everything = config.model, _everything(config).layers
    half = tuple(n for n in latter_half(model.num_layers) if n in everything)
    section = config.guidance

    def layout(bits: int, layers: tuple[int, ...], sites: tuple[str, ...] = ("fc1_in", "k", "v")) -> RecordLayout:
        return RecordLayout.build(GuidanceSpec(bits=bits, layers=layers, sites=sites), model)  # type: ignore[arg-type]

    methods = [
        Method("bf16_trainer", Rounding.BF16),
        Method("w4a16", Rounding.WEIGHTS_ONLY),
        Method("qat", Rounding.NEAREST),
        Method("rtn_rollout_scale", Rounding.NEAREST_ON_ROLLOUT_SCALE, layout(4, everything)),
        Method("full", Rounding.GUIDED, layout(4, everything)),
        Method("trace_all", Rounding.GUIDED, layout(1, everything)),
        Method("trace_half", Rounding.GUIDED, layout(1, half)),
        Method("trace", Rounding.GUIDED, layout(section.bits, config.guided_layers, section.sites), section.prompt_tokens),
    ]
    return [m for m in methods if m.record is None or m.record.columns]


def _batches(trainer: MegatronTrainer, trajectories: Sequence[Trajectory], method: Method, *, pad_id: int) -> list[MicroBatch]:
    store = GuidanceStore(contract_fingerprint=trainer.config.contract.fingerprint)
    for t in trajectories:
        record = None if method.record is None or t.guidance is None else narrowed(t.guidance, method.record)
        if record is not None and not method.prompt_tokens:
            record = replace(record, valid=record.valid & (np.arange(len(record)) >= t.prompt_length))
        store.put(record, t.routes)
    samples = [Sample(t) for t in trajectories]
    return micro_batches(
        samples, size=trainer.config.trainer.micro_batch_size, store=store, rounding=method.rounding, pad_id=pad_id
    )


def _mismatch(trainer: MegatronTrainer, trajectories: Sequence[Trajectory], method: Method, *, pad_id: int) -> dict[str, float]:
    """|log p_trainer - log p_engine| over response tokens of all ranks: mean, max, token count."""
    batches = _batches(trainer, trajectories, method, pad_id=pad_id)
    total, tokens, largest = 0.0, 0, 0.0
    for batch, logprobs in zip(batches, trainer.logprobs(batches), strict=True):
        gap = (logprobs - batch.behavior_logprobs).abs()[batch.mask].double()
        total, tokens, largest = total + float(gap.sum()), tokens + gap.numel(), max(largest, float(gap.max()))
    count = global_sum(tokens)
    return {"mean": global_sum(total) / count, "max": global_max(largest), "tokens": count}


# ---- local gaps ----------------------------------------------------------------------------------------------------

GAP_METHODS: dict[str, Callable[[torch.Tensor, GuidanceRecord, torch.Tensor | None], torch.Tensor]] = {
    "qat": lambda x, r, amax: guided.fake_quantize(x, scale_scope="row" if amax is None else "static", global_amax=amax),
    "rtn_rollout_scale": lambda x, r, amax: guided.nearest_on_record_scale(x, r),
    "trace_full": lambda x, r, amax: guided.fake_quantize(x, record=r),
    "trace_compact": lambda x, r, amax: guided.fake_quantize(x, record=_compact(r)),
}


def local_gaps(trainer: MegatronTrainer, case: EvidenceCase, *, forward: Rounding, pad_id: int) -> list[dict[str, object]]:
    """D = ||Q_train - Q_rollout|| / ||X_train - X_rollout|| per layer and site for each rounding rule, on one set of X_train.

    X_train are the values that a trainer forward rounding by ``forward`` (fully guided, or plain QAT, whose values lie farther
    from the rollout's) has at the site; every rule is applied to those same values. Also counts values
    that full guidance leaves farther from the rollout's codeword than nearest on the same scale does: by construction none.
    Empty where nothing is rounded, and under float32, whose recorded values are kept as BF16.
    """
    if trainer.config.precision.compute_dtype == "float32" or not _everything(trainer.config).layers:
        return []
    layout = case.nvfp4[0].guidance.layout  # type: ignore[union-attr]
    probe.reset()
    guided_layout = RecordLayout.build(replace(_everything(trainer.config), raw_values=False), trainer.config.model)
    method = Method(forward.value, forward, guided_layout if forward.uses_record else None)
    batches = _batches(trainer, case.nvfp4, method, pad_id=pad_id)
    probe.keep_values = True
    try:
        trainer.logprobs(batches)
    finally:
        probe.keep_values = False
    raw_frames = [b.frame for b in _raw_batches(trainer, case, pad_id)]
    amax = trainer.kv_amax()
    sums: dict[tuple[int, str], dict[str, float]] = {}
    for column in layout:
        key = (column.layer, column.site)
        sums[key] = _site_sums(raw_frames, probe.kept[key], key, amax.get(key))
    probe.reset()
    return [_site_row(key, _summed([part[key] for part in gathered(sums)])) for key in sums]


def _raw_batches(trainer: MegatronTrainer, case: EvidenceCase, pad_id: int) -> list[MicroBatch]:
    """The same micro-batches with the whole record, raw values included."""
    store = GuidanceStore(contract_fingerprint=trainer.config.contract.fingerprint)
    for t in case.nvfp4:
        store.put(t.guidance, t.routes)
    samples = [Sample(t) for t in case.nvfp4]
    size = trainer.config.trainer.micro_batch_size
    return micro_batches(samples, size=size, store=store, rounding=Rounding.GUIDED, pad_id=pad_id)


def _site_sums(
    raw_frames: Sequence[GuidanceFrame], kept: Sequence[torch.Tensor], key: tuple[int, str], amax: float | None
) -> dict[str, float]:
    """Squared norms and counts of one site over this rank's micro-batches."""
    out: dict[str, float] = defaultdict(float)
    own_amax = None if amax is None else torch.tensor(amax)
    for frame, x_train in zip(raw_frames, kept, strict=True):
        record = frame.record(*key)
        assert record is not None and frame.is_token is not None and record.valid is not None
        record = _rows(record, frame.is_token)
        usable = record.valid
        assert usable is not None
        x_roll = frame.raw_values(*key)[frame.is_token]
        q_roll = _dequantized(record, x_train.dtype)
        out["noise"] += _square(x_train - x_roll, usable)
        out["signal"] += _square(x_roll, usable)
        for name, rule in GAP_METHODS.items():
            out[name] += _square(rule(x_train, record, own_amax) - q_roll, usable)
        nearest, full = guided.nearest_codes(x_train, record), guided.guided_codes(x_train, record)
        compact, rollout = guided.guided_codes(x_train, _compact(record)), guided.record_codes(record)
        counts = {
            "nearest": guided.count_codes(rollout, nearest, mask=usable),
            "full": guided.count_codes(rollout, full, nearest=nearest, mask=usable),
            "compact": guided.count_codes(rollout, compact, nearest=nearest, mask=usable),
        }
        out["values"] += counts["full"].values
        for name, count in counts.items():
            out[f"flips_{name}"] += count.flips
        out["adjacent_nearest"] += counts["nearest"].adjacent
        out["full_worse_than_rtn"] += counts["full"].worse_than_nearest
        out["compact_worse_than_rtn"] += counts["compact"].worse_than_nearest
    return dict(out)


def _site_row(key: tuple[int, str], s: dict[str, float]) -> dict[str, object]:
    row: dict[str, object] = {"layer": key[0], "site": key[1], "values": int(s["values"])}
    row["noise"] = _ratio(s["noise"] ** 0.5, s["signal"] ** 0.5)
    for name in GAP_METHODS:
        row[f"gap_{name}"] = _ratio(s[name] ** 0.5, s["noise"] ** 0.5)
    for name in ("flips_nearest", "flips_full", "flips_compact"):
        row[name] = s[name] / s["values"]
    row["adjacent_share"] = _ratio(s["adjacent_nearest"], s["flips_nearest"])
    for name in ("full_worse_than_rtn", "compact_worse_than_rtn"):
        row[name] = int(s[name])
    return row


def summarize_gaps(sites: Sequence[dict[str, object]]) -> dict[str, float | int | None]:
    """Mean gap over sites that differ at all, violations, and the largest excess of compact over full at low-noise sites."""
    out: dict[str, float | int | None] = {}
    for name in GAP_METHODS:
        values = [float(s[f"gap_{name}"]) for s in sites if s[f"gap_{name}"] is not None]  # type: ignore[arg-type]
        out[f"gap_{name}"] = float(np.mean(values)) if values else None
    worse = [int(s["full_worse_than_rtn"]) for s in sites]  # type: ignore[call-overload]
    out["full_worse_than_rtn"] = sum(worse) if worse else None
    quiet = [s for s in sites if s["noise"] is not None and float(s["noise"]) < NOISE_LIMIT]  # type: ignore[arg-type]
    excess = [
        float(s["gap_trace_compact"]) - float(s["gap_trace_full"])  # type: ignore[arg-type]
        for s in quiet
        if s["gap_trace_full"] is not None
    ]
    out["gap_compact_minus_full_max"] = max(excess) if excess else None
    out["low_noise_sites"] = len(quiet)
    return out


def _rows(record: GuidanceRecord, rows: torch.Tensor) -> GuidanceRecord:
    return replace(
        record,
        payload=record.payload[rows],
        block_scale=record.block_scale.view(torch.uint8)[rows].view(torch.float8_e4m3fn),
        global_amax=record.global_amax[rows],
        valid=None if record.valid is None else record.valid[rows],
    )


def _compact(record: GuidanceRecord) -> GuidanceRecord:
    return replace(record, bits=1, payload=guided.pack_bits(record.payload))


def _dequantized(record: GuidanceRecord, dtype: torch.dtype) -> torch.Tensor:
    return NVFP4Tensor(codes=record.payload, block_scale=record.block_scale, global_amax=record.global_amax).dequantize(dtype)


def _square(x: torch.Tensor, rows: torch.Tensor) -> float:
    return float(x[rows].double().square().sum())


def _summed(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
