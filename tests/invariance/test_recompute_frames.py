"""A recomputation rounds by the frame of its own micro-batch although others were begun since (1F1B, in one process)."""

from __future__ import annotations

import pytest
import torch
from trainers import batches_of, rollout, run_config, samples_of, tis_loss, trainer_of

from megatron_trace.guidance import frames
from megatron_trace.modeling import sites
from megatron_trace.modeling.build import ModelOptions
from megatron_trace.platform.device import megatron_context
from megatron_trace.trainer.megatron import MegatronTrainer

ORDERS = {"one by one": "fbfbfbfb", "two in flight": "ffbfbfbb", "all in flight": "ffffbbbb"}
"""f: forward of the next micro-batch; b: backward of the oldest one that waits."""


def gradients(trainer: MegatronTrainer, order: str) -> dict[str, torch.Tensor]:
    config = trainer.config
    batches = iter(batches_of(config, samples_of(rollout(config, tensor_parallel=2)), size=2))
    waiting: list[torch.Tensor] = []
    with megatron_context():
        trainer.model.zero_grad_buffer()
        for what in order:
            if what == "f":
                output, loss = trainer._forward_step(next(batches), trainer.model, tis_loss)
                waiting.append(loss(output)[0])
            else:
                waiting.pop(0).backward()
    frames.make_current(None)
    return {name: p.main_grad.clone() for name, p in trainer.gpt.named_parameters()}


def trainer(recompute: str) -> MegatronTrainer:
    config = run_config(precision={"compute_dtype": "float32"})
    made = trainer_of(config, options=ModelOptions(recompute=recompute))
    made.gpt.train()
    return made


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("recompute", ["full", "core_attn", "moe"])
def test_gradients_are_bit_for_bit_those_without_recomputation(lone_process, recompute: str, order: str) -> None:
    expected = gradients(trainer("none"), ORDERS["one by one"])
    found = gradients(trainer(recompute), order)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("recompute", ["full", "core_attn", "moe"])
def test_without_the_node_that_keeps_it_the_frame_would_be_another_one(lone_process, monkeypatch, recompute: str) -> None:
    """What the tests above would show if nothing made a frame current again."""
    expected = gradients(trainer("none"), ORDERS["one by one"])
    monkeypatch.setattr(frames, "kept_for_backward", lambda x: x)
    try:
        found = gradients(trainer(recompute), ORDERS["all in flight"])
    except (RuntimeError, ValueError, IndexError):
        return  # rows of another micro-batch's shape
    assert any(not torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_tensors_that_were_moved_away_are_not_rounded_again(lone_process, monkeypatch) -> None:
    """Activation offload, as torch does it: saved tensors leave and come back; no site rounds in backward."""
    made = trainer("none")
    calls: list[bool] = []
    original = sites.guided.fake_quantize
    monkeypatch.setattr(
        sites.guided, "fake_quantize", lambda *a, **k: (calls.append(frames.in_backward()), original(*a, **k))[1]
    )
    plain = gradients(made, ORDERS["one by one"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        offloaded = gradients(made, ORDERS["all in flight"])
    assert len(calls) > 0 and not any(calls)
    assert all(torch.equal(offloaded[name], gradient) for name, gradient in plain.items())


def test_a_recomputation_counts_nothing_twice(lone_process) -> None:
    counts = []
    for recompute in ("none", "full"):
        sites.probe.reset()
        gradients(trainer(recompute), ORDERS["two in flight"])
        counts.append((dict(sites.probe.guided_tokens), dict(sites.probe.fallback_tokens)))
    sites.probe.reset()
    assert counts[0] == counts[1] and min(counts[0][0].values()) > 0
