"""Checkpoints of a training run: weights, optimiser, random state and progress, one file per rank, complete or not there.

Written by our own code because Megatron-core's distributed optimiser does not reload its state without fused Adam (torch's
keeps a tensor-valued ``step``). A checkpoint is a directory renamed into place after every rank's file is on disk; it resumes
on the same number of ranks with the same expert-parallel size.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_trace.config import RunConfig
from megatron_trace.config.loading import leaves
from megatron_trace.trainer.megatron import MegatronTrainer

FORMAT = 3
FIXED = ("run.seed", "task.", "warmup.")
"""Settings (and sections) that say which problems and samples come next: a resumed run must have the saved ones."""
PLACE = ("run.name", "run.output_dir", "checkpoint.directory", "checkpoint.resume")
"""Settings that say where a run is, not what it computes; not saved."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed from here; the message names what differs."""


def save(directory: Path, trainer: MegatronTrainer, progress: dict[str, Any], *, keep_last: int) -> Path:
    """Write a checkpoint named after the steps done, warm-up included; keep only the newest ``keep_last``. Returns its path.

    Collective.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    final = directory / f"step_{progress['warmup_steps'] + progress['step']:06d}"
    partial = directory / f".{final.name}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    torch.save(_rank_state(trainer), partial / f"rank_{rank}.pt")
    dist.barrier()
    if rank == 0:
        manifest = _manifest(trainer.config, world_size=world) | {"progress": progress}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in checkpoints(directory)[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints below ``directory``, oldest first."""
    return sorted(p for p in directory.glob("step_*") if (p / "manifest.json").is_file())


def set_aside(directory: Path) -> Path | None:
    """Rename a checkpoint directory that an earlier run left, so that this run neither resumes from it nor deletes its own.

    Collective; returns the new path (``<directory>.1``, ``.2``, ...), or None where there was nothing.
    """
    found = bool(checkpoints(directory))
    dist.barrier()
    if not found:
        return None
    number = 1
    while (moved := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(directory, moved)
    dist.barrier()
    return moved


def find(directory: Path, config: RunConfig, *, world_size: int) -> Path:
    """The newest checkpoint below ``directory``, found to fit this run.

    Raises CheckpointError when there is none, or naming the first field of world size, parallel sizes, model, precision
    contract or ``FIXED`` settings that differs from this run's. Builds nothing.
    """
    found = checkpoints(directory)
    if not found:
        raise CheckpointError(f"checkpoint.resume=true: {directory} holds no complete checkpoint; use false to start anew")
    path = found[-1]
    manifest = json.loads((path / "manifest.json").read_text())
    saved, here = _identity(manifest), _identity(_manifest(config, world_size=world_size))
    for name in here | saved:
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"checkpoint.resume=true: {path} was saved with {name}={saved.get(name)!r}, this run has {here.get(name)!r}; "
                f"run as it was saved, or use false to start anew"
            )
    return path


def changed_settings(path: Path, config: RunConfig) -> list[str]:
    """Each setting of ``config`` that differs from the one saved in the checkpoint at ``path``: ``name=here (was saved)``."""
    saved, here = json.loads((path / "manifest.json").read_text())["config"], _settings(config)
    names = [name for name in here | saved if here.get(name) != saved.get(name)]
    return [f"{name}={here.get(name)!r} (was {saved.get(name)!r})" for name in names]


def load(path: Path, trainer: MegatronTrainer) -> dict[str, Any]:
    """Put the checkpoint at ``path`` (from ``find``) into ``trainer``; returns the progress saved with it."""
    _load_rank_state(trainer, torch.load(path / f"rank_{dist.get_rank()}.pt", weights_only=True))
    return dict(json.loads((path / "manifest.json").read_text())["progress"])


def _manifest(config: RunConfig, *, world_size: int) -> dict[str, Any]:
    """What a resumed run must have in common with the saved one."""
    return {
        "format": FORMAT,
        "world_size": world_size,
        "parallel": config.parallel.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json"),
        "contract": config.contract.to_dict(),
        "config": _settings(config),
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    """Every setting by dotted name, but those of ``PLACE``."""
    return {name: value for name, value in leaves(config.resolved()) if name not in PLACE}


def _identity(manifest: dict[str, Any]) -> dict[str, Any]:
    """What ``manifest`` says that may not differ, with dotted names for nested fields."""
    flat: dict[str, Any] = {}
    for name, value in manifest.items():
        if name == "progress":
            continue
        if name == "config":
            flat |= {setting: v for setting, v in value.items() if setting.startswith(FIXED)}
            continue
        flat |= {f"{name}.{k}": v for k, v in _identity(value).items()} if isinstance(value, dict) else {name: value}
    return flat


def _inner_optimizers(trainer: MegatronTrainer) -> list[torch.optim.Optimizer]:
    """The torch optimisers under Megatron's (one for dense, one for expert parameters), in a fixed order."""
    chained = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    return [o.optimizer for o in chained if o.optimizer is not None]


def _rank_state(trainer: MegatronTrainer) -> dict[str, Any]:
    optimizers = []
    for optimizer in _inner_optimizers(trainer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizers.append(
            {
                "master": [p.detach().clone() for p in parameters],
                "state": [{k: v for k, v in optimizer.state[p].items()} for p in parameters],
            }
        )
    return {
        "weights": {name: p.detach().clone() for name, p in trainer.gpt.named_parameters()},
        "optimizers": optimizers,
        "version": trainer.version,
        "kv_amax": [[layer, site, amax] for (layer, site), amax in trainer.kv_amax().items()],
        "rng": torch.get_rng_state(),
    }


def _load_rank_state(trainer: MegatronTrainer, saved: dict[str, Any]) -> None:
    with torch.no_grad():
        parameters = dict(trainer.gpt.named_parameters())
        if differing := parameters.keys() ^ saved["weights"].keys():
            raise CheckpointError(f"parameters differ from the checkpoint's: {', '.join(sorted(differing)[:4])}")
        for name, parameter in parameters.items():
            parameter.copy_(saved["weights"][name])
        for optimizer, state in zip(_inner_optimizers(trainer), saved["optimizers"], strict=True):
            masters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, master, moments in zip(masters, state["master"], state["state"], strict=True):
                parameter.copy_(master)
                optimizer.state[parameter] = dict(moments)
    torch.set_rng_state(saved["rng"])
    trainer.version = saved["version"]
    if saved["kv_amax"]:
        trainer.set_kv_amax({(layer, site): amax for layer, site, amax in saved["kv_amax"]})
    trainer.weights_changed()
