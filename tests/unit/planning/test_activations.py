"""Activation memory: the closed form against what autograd really keeps in a tiny run; the schedule against its definition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.config import load
from megatron_trace.planning import activations, plan
from megatron_trace.planning.layout import Layout

PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
from megatron_trace.config import load
from megatron_trace.platform.device import init_process_group, megatron_context, prepare_megatron
prepare_megatron(); init_process_group()
from megatron_trace.guidance import frames
from megatron_trace.modeling.build import core_attentions
from megatron_trace.trainer.megatron import MegatronTrainer, next_token_logprobs

def measure(path, overrides):
    config = load(path, overrides)
    batch, length = config.trainer.micro_batch_size, config.trainer.sequence_length
    model = MegatronTrainer(config).gpt
    for attention in core_attentions(model):
        attention.static_amax = {"k": 8.0, "v": 8.0}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for layer in model.decoder.layers:
        for pair in layer.mlp.experts.quantized:
            own |= {weight.dequantized.untyped_storage().data_ptr() for weight in pair}
    kept = {}
    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # holding it keeps the address from being used again
        return tensor
    tokens = torch.randint(0, config.model.vocab_size, (batch, length))
    class Batch: pass
    Batch.tokens = Batch.next_tokens = tokens
    frames.make_current(frames.GuidanceFrame(
        rounding=frames.Rounding.NEAREST, is_token=torch.ones(batch * length, dtype=torch.bool)))
    with megatron_context(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = next_token_logprobs(model, Batch, temperature=1.0)
    total = sum(storage.nbytes() for storage in kept.values())
    del out
    return total

print(json.dumps([measure(sys.argv[1], overrides) for overrides in json.loads(sys.argv[2])]))
"""
ONE_RANK = ["parallel.expert=1", "trainer.micro_batch_size=4"]
RUNS = [
    ONE_RANK,
    [*ONE_RANK, "precision.compute_dtype=float32"],
    [*ONE_RANK, "model.head_dim=32", "model.num_experts=4", "model.vocab_size=512", "trainer.sequence_length=96"],
    ["parallel.expert=1", "trainer.micro_batch_size=8", "model.num_experts_per_tok=4", "model.moe_intermediate_size=128"],
]


@pytest.mark.slow
def test_a_tiny_run_keeps_what_the_closed_form_says(repository: Path, tiny_config_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny_config_path), json.dumps(RUNS)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    for overrides, kept in zip(RUNS, measured, strict=True):
        found = plan(load(tiny_config_path, overrides), world_size=1)
        assert found.kernels == "reference"
        assert found.stages[0].memory.activations == pytest.approx(kept, rel=0.02), overrides


def _pipeline(stages: int, virtual: int) -> Layout:
    return Layout(world_size=stages, tensor=1, context=1, pipeline=stages, virtual_pipeline=virtual, expert=1, expert_tensor=1)


def test_chunks_in_flight() -> None:
    """1F1B: a stage holds one micro-batch for each stage from it on; interleaved: its warm-up forwards and one more."""
    assert [activations.in_flight(_pipeline(4, 1), stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [activations.in_flight(_pipeline(4, 1), stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert [activations.in_flight(_pipeline(4, 2), stage, 16) for stage in range(4)] == [11, 9, 7, 5]


def test_full_recompute_keeps_less(repository: Path) -> None:
    path = repository / "configs/presets/qwen3_30b_a3b.yaml"
    kept = [
        plan(load(path, [f"trainer.recompute={choice}", "cluster.device_memory_gib=10000"], planned_only=True))
        for choice in ("none", "full")
    ]
    none, full = (found.stages[0].memory.activations for found in kept)
    assert full * 4 < none
