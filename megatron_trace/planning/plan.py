"""What a run needs before it starts, and whether it can (no torch): ``plan(config)``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_trace.config.schema import RunConfig
from megatron_trace.config.validation import unsupported
from megatron_trace.planning import guidance_traffic, layout, legality, memory, parameters, ports, precision_map, rates
from megatron_trace.planning.activations import Kernels
from megatron_trace.planning.layout import Layout
from megatron_trace.planning.memory import RankMemory
from megatron_trace.planning.ports import Ports
from megatron_trace.planning.rates import Rates

GIB = 2**30


@dataclass(frozen=True)
class StagePlan:
    """One rank of one pipeline stage; all ranks of a stage are alike."""

    stage: int
    layers: tuple[int, ...]
    parameters: int
    memory: RankMemory


@dataclass(frozen=True)
class Plan:
    """Figures of a run. ``errors`` rule it out; ``unsupported`` names what this version does not run although it is legal."""

    name: str
    layout: Layout
    kernels: Kernels
    parameters_total: int
    parameters_active: int
    stages: tuple[StagePlan, ...]
    """Empty when the layout itself is impossible."""
    guidance_bytes_per_token: int
    guidance_bytes_per_token_full: int
    guidance_row_scale_bytes_per_token: int
    rates: Rates
    engines: int
    engine_bytes_per_rank: int
    """Packed weights and KV pool of one engine rank, wherever it lives."""
    ports: Ports
    checkpoint_bytes: int
    """One checkpoint: working weights and optimiser states of the whole model."""
    disk_bytes: int
    """``checkpoint.keep_last`` checkpoints and the one being written."""
    precision: tuple[precision_map.TensorGroup, ...]
    """What is quantised, on both sides."""
    unsupported: tuple[str, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fullest(self) -> StagePlan | None:
        """The stage whose ranks need the most device memory."""
        return max(self.stages, key=lambda stage: stage.memory.device, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; sizes in bytes, except where the key says GiB."""
        fullest = self.fullest
        return {
            "name": self.name,
            "world_size": self.layout.world_size,
            "layout": self.layout.to_dict(),
            "kernels": self.kernels,
            "parameters_total": self.parameters_total,
            "parameters_active": self.parameters_active,
            "parameters_per_rank": fullest.parameters if fullest else None,
            "memory_gib_per_rank": round(fullest.memory.device / GIB, 4) if fullest else None,
            "memory_bytes_per_rank": asdict(fullest.memory) if fullest else None,
            "stages": [
                {
                    "stage": stage.stage,
                    "layers": list(stage.layers),
                    "parameters": stage.parameters,
                    "memory_gib": round(stage.memory.device / GIB, 4),
                }
                for stage in self.stages
            ],
            "guidance_bytes_per_token": self.guidance_bytes_per_token,
            "guidance_bytes_per_token_full": self.guidance_bytes_per_token_full,
            "guidance_row_scale_bytes_per_token": self.guidance_row_scale_bytes_per_token,
            **asdict(self.rates),
            "engines": self.engines,
            "engine_bytes_per_rank": self.engine_bytes_per_rank,
            "ports": {**asdict(self.ports), "end": self.ports.end},
            "checkpoint_bytes": self.checkpoint_bytes,
            "disk_bytes": self.disk_bytes,
            "precision": [asdict(group) for group in self.precision],
            "supported_by_trainer": not self.unsupported,
            "unsupported": list(self.unsupported),
            "errors": list(self.errors),
            "warnings": list(self.warnings),
        }


def plan(config: RunConfig, *, world_size: int | None = None) -> Plan:
    """Judge ``config`` on ``world_size`` ranks (default: those of its cluster section). Never raises for a bad layout.

    Memory is judged with the kernels this version runs where it can run the configuration, and else with fused ones.
    """
    where = layout.resolve(config, world_size=world_size)
    missing = unsupported(config)
    kernels: Kernels = "fused" if missing else "reference"
    errors = legality.errors(config, where)
    stages = () if errors else _stages(config, where, kernels)
    total = parameters.total(config.model).total
    engines = rates.engines(config, where)
    reserved = ports.reserve(config.cluster.base_port, engines_per_node=-(-engines // _engine_nodes(config)))
    checkpoint = total * (memory.value_bytes(config) + 12)
    warnings = [] if errors else legality.warnings(config, where)
    result = Plan(
        name=config.run.name,
        layout=where,
        kernels=kernels,
        parameters_total=total,
        parameters_active=parameters.active_per_token(config.model),
        stages=stages,
        guidance_bytes_per_token=guidance_traffic.bytes_per_token(config),
        guidance_bytes_per_token_full=guidance_traffic.bytes_per_token_full(config),
        guidance_row_scale_bytes_per_token=guidance_traffic.row_scale_bytes_per_token(config),
        rates=rates.rates(config, where),
        engines=engines,
        engine_bytes_per_rank=sum(memory.engine_memory(config)),
        ports=reserved,
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * (config.checkpoint.keep_last + 1),
        precision=precision_map.tensor_groups(config),
        unsupported=missing,
        errors=(),
        warnings=(),
    )
    errors += _capacity_errors(config, result)
    if config.model.other_parameters:
        warnings.append(
            f"model.other_parameters={config.model.other_parameters}: counted on the first stage as one number; their shapes, "
            f"activations and sharding are not judged"
        )
    warnings += [f"not run by this version: {line}" for line in missing]
    return Plan(**{**vars(result), "errors": tuple(errors), "warnings": tuple(warnings)})


def _engine_nodes(config: RunConfig) -> int:
    return config.cluster.rollout_nodes or config.cluster.nodes


def _stages(config: RunConfig, where: Layout, kernels: Kernels) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            stage=index,
            layers=where.stage_layers(index, config.model.num_layers),
            parameters=parameters.stage(config.model, where, index).total,
            memory=memory.rank_memory(config, where, index, kernels=kernels),
        )
        for index in range(where.pipeline)
    )


def _capacity_errors(config: RunConfig, found: Plan) -> list[str]:
    cluster, problems = config.cluster, []
    limit = cluster.device_memory_gib
    if limit is not None and found.fullest is not None and found.fullest.memory.device > limit * GIB:
        fullest = found.fullest.memory
        largest = max((part for part in fullest.parts() if part[0] != "guidance_host"), key=lambda part: part[1])
        problems.append(
            f"cluster.device_memory_gib={limit:g}: a rank of stage {found.fullest.stage} needs {fullest.device / GIB:.1f} GiB, "
            f"most of it {largest[0].replace('_', ' ')} ({largest[1] / GIB:.1f} GiB); use more devices, other parallel sizes "
            f"or trainer.recompute=full (--suggest searches)"
        )
    if limit is not None and cluster.rollout_nodes and found.engine_bytes_per_rank > limit * GIB:
        problems.append(
            f"rollout.num_pages={config.rollout.num_pages}: an engine rank needs {found.engine_bytes_per_rank / GIB:.1f} GiB "
            f"for weights and KV pages, above cluster.device_memory_gib={limit:g}; use fewer pages or a larger "
            f"rollout.tensor_parallel"
        )
    if cluster.disk_gib is not None and found.disk_bytes > cluster.disk_gib * GIB:
        problems.append(
            f"cluster.disk_gib={cluster.disk_gib:g}: {config.checkpoint.keep_last + 1} checkpoints need "
            f"{found.disk_bytes / GIB:.0f} GiB; lower checkpoint.keep_last or give more disk"
        )
    if found.ports.end - 1 > ports.LAST_PORT:
        problems.append(
            f"cluster.base_port={cluster.base_port}: the run reserves ports up to {found.ports.end - 1}, above "
            f"{ports.LAST_PORT}; use at most {cluster.base_port - (found.ports.end - 1 - ports.LAST_PORT)}"
        )
    return problems
