"""One optimiser step of the same four-layer model on the same samples under every layout, and what it rounded to.

As a script under torchrun: ``layout_cases.py OUT`` writes ``OUT/<case>.pt`` (rank 0) for each case of that world size.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny_config
from trainers import batches_of, rollout, run_config, samples_of, step, store_of, trainer_of

from megatron_trace.config import RunConfig
from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame
from megatron_trace.guidance.spec import KV_SITES, GuidanceSpec
from megatron_trace.modeling import sites
from megatron_trace.modeling.build import ModelOptions
from megatron_trace.modeling.parallel import Layout
from megatron_trace.modeling.site_probe import SiteProbe
from megatron_trace.numerics import guided
from megatron_trace.rollout.refit_digest import digest_bundle
from megatron_trace.trainer import megatron
from megatron_trace.trainer.batch import MicroBatch
from megatron_trace.trainer.feed import Feed, feed_of
from megatron_trace.trainer.refit import build_bundle

MODEL = tiny_config(num_layers=4)
SPEC = GuidanceSpec(bits=4, layers=(1, 2, 3))
NOTHING = -99
"""Where a rank holds no code."""


@dataclass(frozen=True)
class Case:
    """``packed``: micro-batches without padding; ``model``: changes of the tiny model; ``size``: samples in a micro-batch."""

    world: int = 1
    layout: Layout = field(default_factory=Layout)
    options: ModelOptions = field(default_factory=ModelOptions)
    packed: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    size: int = 2


def _case(world: int, options: dict[str, Any] | None = None, **values: Any) -> Case:
    kept = {name: values.pop(name) for name in ("packed", "model", "size") if name in values}
    return Case(world=world, layout=Layout(**values), options=ModelOptions(**(options or {})), **kept)


FULL, CORE, MOE = ({"recompute": r} for r in ("full", "core_attn", "moe"))
UNROUNDED, NVFP4 = ({"dispatch": d} for d in ("unrounded", "nvfp4"))
PACKED = {"packed_sequences": True}
TIED = {"tie_word_embeddings": True}
CASES = {
    "pp2": _case(2, pipeline=2),
    "pp2 uneven": _case(2, pipeline=2, first_stage_layers=1, last_stage_layers=3),
    "pp2 single": _case(2, pipeline=2, size=1),
    "pp2 full": _case(2, FULL, pipeline=2),
    "pp2 core": _case(2, CORE, pipeline=2),
    "pp2 moe": _case(2, MOE, pipeline=2),
    "pp2 tied": _case(2, pipeline=2, model=TIED),
    "vpp2": _case(2, pipeline=2, virtual_pipeline=2),
    "vpp2 full": _case(2, FULL, pipeline=2, virtual_pipeline=2),
    "tp2": _case(2, tensor=2),
    "tp2 full": _case(2, FULL, tensor=2),
    "tp2 tied": _case(2, tensor=2, model=TIED),
    "tp2 ep2": _case(2, tensor=2, expert=2),
    "tp2 etp2": _case(2, tensor=2, expert_tensor=2),
    "etp2": _case(2, expert_tensor=2),
    "cp2": _case(2, context=2),
    "cp2 ep2": _case(2, context=2, expert=2),
    "cp2 full": _case(2, FULL, context=2),
    "ep2 unrounded": _case(2, UNROUNDED, expert=2),
    "ep2 nvfp4": _case(2, NVFP4, expert=2),
    "etp2 unrounded": _case(2, UNROUNDED, expert_tensor=2),
    "etp2 nvfp4": _case(2, NVFP4, expert_tensor=2),
    "tp2 packed": _case(2, PACKED, tensor=2, packed=True),
    "pp2 packed": _case(2, PACKED, pipeline=2, packed=True),
    "ep2 pp2": _case(4, pipeline=2, expert=2),
    "ep2 etp2": _case(4, expert=2, expert_tensor=2),
    "tp2 pp2": _case(4, tensor=2, pipeline=2),
    "tp2 pp2 ep2 full": _case(4, FULL, tensor=2, pipeline=2, expert=2),
    "tp2 ep2 dp2": _case(4, tensor=2, expert=2),
    "tp2 cp2": _case(4, tensor=2, context=2),
    "cp2 pp2": _case(4, context=2, pipeline=2),
    "ep4": _case(4, expert=4),
    "vpp2 tp2 full": _case(4, FULL, tensor=2, pipeline=2, virtual_pipeline=2),
    "pp4": _case(4, pipeline=4),
}


def config_of(case: Case) -> RunConfig:
    """A head that is the embedding gives logits so far apart that gradients are differences of equal numbers: temperature 8."""
    temperature = {"temperature": 8.0} if case.model == TIED else {}
    return run_config(MODEL.model_copy(update=case.model), precision={"compute_dtype": "float32"}, rollout=temperature)


class CodeProbe(SiteProbe):
    """Keeps the guided code of every value by (sample, layer, site), in the places of the whole micro-batch."""

    def __init__(self) -> None:
        super().__init__(counts_kv=sites.probe.counts_kv)
        self.codes: dict[tuple[int, int, str], torch.Tensor] = {}
        self.fed: dict[int, tuple[MicroBatch, Feed]] = {}

    def feed(self, batch: MicroBatch, layout: Layout, **settings: Any) -> Feed:
        fed = feed_of(batch, layout, **settings)
        self.fed[id(fed.frame)] = (batch, fed)
        return fed

    def values(self, frame: GuidanceFrame, layer: int, site: str, before: torch.Tensor) -> None:
        record = frame.record(layer, site)
        if record is None:
            return
        batch, fed = self.fed[id(frames.current())]
        places = fed.places
        if fed.frame.sequence_part is not None and site not in KV_SITES:
            places = places[slice(*fed.frame.sequence_part)]
        codes, size = guided.guided_codes(before.detach(), record), batch.tokens.shape[0]
        heads = fed.frame.heads if site in KV_SITES else None
        first = heads.first * heads.head_dim if heads else 0
        column = frame.layout.column(layer, site)
        whole = torch.zeros(batch.tokens.numel(), column.whole, dtype=torch.int8) + NOTHING
        kept = frame.is_token
        whole[places[kept], first : first + codes.shape[-1]] = codes[kept]
        for b, sample in enumerate(batch.sample_ids):
            mine = whole[b::size]
            known = self.codes.setdefault((sample, layer, site), mine)
            self.codes[sample, layer, site] = torch.maximum(known, mine)


def run(case: Case) -> dict[str, Any]:
    """Loss, gradients, weights, refit digest, codes and counts of one step. Collective; the same on every rank."""
    config = config_of(case)
    trajectories = rollout(config, tensor_parallel=2, spec=SPEC)
    trainer = trainer_of(config, layout=case.layout, options=case.options)
    bundle = build_bundle(trainer, quantized=True, contract_fingerprint=config.contract.fingerprint)
    rank, size = megatron.data_parallel()
    everyone = samples_of(trajectories)
    mine = everyone[rank::size]
    store = store_of(config, trajectories)
    batches = batches_of(config, mine, size=case.size, store=store, layers=trainer.local_layers, packed=case.packed)
    before = trainer.logprobs(batches)
    probe, sites.probe = sites.probe, CodeProbe()
    megatron.feed_of = sites.probe.feed
    try:
        tokens = float(sum(len(s.trajectory.logprobs) for s in everyone))
        done = step(trainer, batches, denominator=tokens)
        seen = sites.probe
    finally:
        sites.probe, megatron.feed_of = probe, feed_of
    parts: list[Any] = [None] * dist.get_world_size()
    logprobs = {s: lp[i][b.mask[i]] for b, lp in zip(batches, before, strict=True) for i, s in enumerate(b.sample_ids)}
    dist.all_gather_object(parts, (seen.codes, dict(seen.guided_tokens), dict(seen.fallback_tokens), logprobs))
    return {
        "loss": done.loss,
        "grad_norm": done.result.grad_norm,
        "gradients": done.gradients,
        "weights": done.weights,
        "digest": digest_bundle(bundle),
        "codes": merged([p[0] for p in parts]),
        "guided": {site: sum(p[1].get(site, 0) for p in parts) for site in ("k", "v", "fc1_in")},
        "fallback": {site: sum(p[2].get(site, 0) for p in parts) for site in ("k", "v", "fc1_in")},
        "logprobs": {name: value for p in parts for name, value in p[3].items()},
        "kv_amax": trainer.calibrate_kv(),
    }


def merged(parts: list[dict[Any, torch.Tensor]]) -> dict[Any, torch.Tensor]:
    out: dict[Any, torch.Tensor] = {}
    for part in parts:
        for key, codes in part.items():
            if key not in out:
                out[key] = codes
            else:  # padding of another micro-batch may differ in length
                n = min(len(codes), len(out[key]))
                out[key] = torch.maximum(out[key][:n], codes[:n])
    return out


def main() -> None:
    from megatron_trace.platform.device import init_process_group

    rank, world = init_process_group(timeout_s=60)
    torch.set_num_threads(1)
    wanted = sys.argv[2:] or [name for name, case in CASES.items() if case.world == world]
    for name in wanted:
        try:
            outcome = run(CASES[name])
        except Exception:
            outcome = {"error": traceback.format_exc()}
            print(name, rank, outcome["error"], file=sys.stderr, flush=True)
            if rank == 0:
                torch.save(outcome, Path(sys.argv[1]) / f"{name}.pt")
            raise
        if rank == 0:
            torch.save(outcome, Path(sys.argv[1]) / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()
