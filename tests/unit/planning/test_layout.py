"""Groups in the order of Megatron-core's own generator, layers of stages, and layouts that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.config import load
from megatron_trace.config.schema import RunConfig
from megatron_trace.planning import plan
from megatron_trace.planning.layout import AXES, Layout, resolve


def _layout(
    world: int,
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    virtual: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
) -> Layout:
    return Layout(
        world_size=world,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        expert=expert,
        expert_tensor=expert_tensor,
    )


LAYOUTS = [
    _layout(1),
    _layout(2, expert=2),
    _layout(8, tensor=2, pipeline=2, expert=2),
    _layout(16, tensor=2, context=2, pipeline=2, expert=4),
    _layout(24, tensor=4, pipeline=3, expert=2, expert_tensor=2),
    _layout(16, tensor=4, expert=8, expert_tensor=1),
]

PROGRAM = """
import json, sys
from megatron_trace.platform.device import prepare_megatron
prepare_megatron()
from megatron.core.parallel_state import RankGenerator
found = []
for world, tp, cp, dp, pp, etp, ep, edp in json.loads(sys.argv[1]):
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    found.append([dense.get_ranks(t) for t in ("tp", "cp", "dp", "pp")] + [expert.get_ranks(t) for t in ("tp", "ep", "dp")])
print(json.dumps(found))
"""


def test_groups_are_megatrons(repository: Path) -> None:
    sizes = [(w.world_size, w.tensor, w.context, w.data, w.pipeline, w.expert_tensor, w.expert, w.expert_data) for w in LAYOUTS]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(sizes)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    expected = json.loads(done.stdout.strip().splitlines()[-1])
    for where, groups in zip(LAYOUTS, expected, strict=True):
        assert [[list(group) for group in where.groups(axis)] for axis in AXES] == groups


@pytest.mark.parametrize("where", LAYOUTS)
def test_coordinates_are_the_places_in_the_groups(where: Layout) -> None:
    for rank in range(where.world_size):
        place = where.coordinates(rank)
        for axis in AXES:
            group = next(ranks for ranks in where.groups(axis) if rank in ranks)
            assert group[place[axis]] == rank


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(ValueError, match="axis 'experts': must be one of tensor, context, data"):
        LAYOUTS[0].groups("experts")


def test_interleaved_stages_take_turns() -> None:
    where = _layout(2, pipeline=2, virtual=2)
    assert where.stage_layers(0, 8) == (0, 1, 4, 5)
    assert where.stage_layers(1, 8) == (2, 3, 6, 7)
    assert _layout(4, pipeline=4).stage_layers(3, 8) == (6, 7)


def test_expert_tensor_is_never_derived_from_tensor(tiny_config_path: Path) -> None:
    """TP4 EP4 ETP1 needs 4 ranks, not 16."""
    config = load(tiny_config_path, ["parallel.tensor=4", "parallel.expert=4"], planned_only=True)
    assert (config.parallel.expert_tensor, resolve(config).world_size) == (1, 4)
    explicit = load(tiny_config_path, ["parallel.tensor=4", "parallel.expert=4", "parallel.expert_tensor=4"], planned_only=True)
    assert resolve(explicit).world_size == 16


def _tiny(path: Path, *overrides: str) -> RunConfig:
    return load(path, overrides, planned_only=True)


ILLEGAL = [
    (
        ["parallel.tensor=3"],
        3,
        "parallel.expert=2: must divide the world size 3; start a multiple of 2 processes or set "
        "parallel.expert to a divisor of 3",
    ),
    (["parallel.tensor=16"], 16, "parallel.tensor=16: must divide model.num_attention_heads=8; use a divisor of 8"),
    (
        ["parallel.tensor=4", "trainer.sequence_length=66"],
        4,
        "trainer.sequence_length=66: must be a multiple of parallel.tensor=4 (sequence parallelism, which MoE training needs "
        "beside tensor parallelism); use 68",
    ),
    (
        ["parallel.pipeline=3", "algorithm.prompts_per_step=24", "warmup.batch_size=66"],
        6,
        "parallel.pipeline=3: 3 chunks (pipeline 3 x virtual_pipeline 1) must divide model.num_layers=4; use a "
        "product among 1, 2, 4",
    ),
    (["parallel.virtual_pipeline=2"], 2, "parallel.virtual_pipeline=2: needs parallel.pipeline of 2 or more; use 1"),
    (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "trainer.micro_batch_size=32"],
        4,
        "parallel.virtual_pipeline=2: the interleaved schedule needs the 1 micro-batches of a step to be a multiple of "
        "parallel.pipeline=2; change trainer.micro_batch_size=32 or one of the parallel sizes",
    ),
    (
        ["parallel.context=2", "trainer.sequence_length=66"],
        2,
        "trainer.sequence_length=66: must be a multiple of 2 x parallel.context=2 (each rank holds two chunks); use 68",
    ),
    (
        ["parallel.expert_tensor=8"],
        16,
        "parallel.expert_tensor=8: model.moe_intermediate_size=64 must be a multiple of 8 x 16 for shards of whole NVFP4 "
        "blocks; use a smaller parallel.expert_tensor",
    ),
    (
        ["parallel.tensor=2", "parallel.pipeline=2"],
        6,
        "parallel.tensor=2: tensor 2 x pipeline 2 x context 1 = 4 must divide the world size 6; start a multiple of 4 "
        "processes",
    ),
    (
        ["parallel.expert_tensor=2", "parallel.pipeline=2"],
        4,
        "parallel.expert=2: expert 2 x expert_tensor 2 x pipeline 2 = 8 must divide the world size 4; start a "
        "multiple of 8 processes",
    ),
    (
        ["cluster.nodes=2", "cluster.devices_per_node=4"],
        4,
        "cluster.nodes=2: 2 nodes x cluster.devices_per_node 4 = 8 devices, but the world size is 4; make them equal",
    ),
    (
        ["cluster.base_port=60000", "cluster.devices_per_node=512", "algorithm.prompts_per_step=2048", "warmup.batch_size=512"],
        512,
        "cluster.base_port=60000: the run reserves ports up to 68464, above 65535; use at most 57071",
    ),
    (
        ["cluster.device_memory_gib=0.05"],
        2,
        "cluster.device_memory_gib=0.05: a rank of stage 0 needs 0.1 GiB, most of it activations (0.1 GiB); use more "
        "devices, other parallel sizes or trainer.recompute=full (--suggest searches)",
    ),
    (
        ["cluster.disk_gib=0.01"],
        2,
        "cluster.disk_gib=0.01: 3 checkpoints need 0 GiB; lower checkpoint.keep_last or give more disk",
    ),
]


@pytest.mark.parametrize(("overrides", "world", "message"), ILLEGAL)
def test_each_impossible_layout_has_its_line(tiny_config_path: Path, overrides: list[str], world: int, message: str) -> None:
    assert message in plan(_tiny(tiny_config_path, *overrides), world_size=world).errors


def test_context_parallelism_of_a_hybrid_stack_is_refused(repository: Path) -> None:
    config = load(repository / "configs/presets/qwen3_5_35b_a3b.yaml", ["parallel.context=2"], planned_only=True)
    assert any(line.startswith("parallel.context=2: linear-attention layers keep a state") for line in plan(config).errors)


def test_three_numbers_of_a_batch_that_does_not_divide(tiny_config_path: Path) -> None:
    overrides = ["algorithm.prompts_per_step=1", "algorithm.samples_per_prompt=8", "algorithm.updates_per_rollout=1"]
    config = _tiny(tiny_config_path, *overrides, "trainer.micro_batch_size=3", "warmup.steps=0")
    assert plan(config, world_size=8).errors == (
        "algorithm.prompts_per_step=1: 8 sequences (x samples_per_prompt 8) must be a multiple of 24 = world size 8 x "
        "trainer.micro_batch_size 3 x algorithm.updates_per_rollout 1; change one of them",
    )


def test_what_this_version_does_not_run_is_no_error(tiny_config_path: Path) -> None:
    found = plan(_tiny(tiny_config_path, "trainer.recompute=full"), world_size=2)
    assert found.errors == ()
    assert found.unsupported == ("trainer.recompute='full': not supported yet; use none",)
    assert "not run by this version: trainer.recompute='full': not supported yet; use none" in found.warnings
    assert plan(load(tiny_config_path)).unsupported == ()
