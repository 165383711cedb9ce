"""Traps for anything that goes by order: modules or batches in another order, records under another name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainers import batches_of, one_batch, rollout, run_config, samples_of, trainer_of

from megatron_trace.guidance.errors import GuidanceError, LayerError
from megatron_trace.guidance.segments import tokens_digest
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.modeling.build import core_attentions, moe_layers
from megatron_trace.modeling.guided_attention import GuidedCoreAttention
from megatron_trace.modeling.route_replay import KeyedRouteReplay
from megatron_trace.rollout.protocol import Trajectory


@pytest.fixture(scope="module")
def config(lone_process):
    return run_config(precision={"compute_dtype": "float32"})


@pytest.fixture(scope="module")
def trajectories(config) -> list[Trajectory]:
    return rollout(config, tensor_parallel=2)


def test_guided_parts_made_in_reverse_order_give_the_same_bits(config, trajectories) -> None:
    trainer = trainer_of(config)
    batches = batches_of(config, samples_of(trajectories))
    before = trainer.logprobs(batches)
    for layer in reversed(list(moe_layers(trainer.gpt))):
        layer.router.router_replay = KeyedRouteReplay(layer.layer_number - 1)
    for block in reversed(list(trainer.gpt.decoder.layers)):
        old = block.self_attention.core_attention
        block.self_attention.core_attention = GuidedCoreAttention(old.inner, layer=old.layer)
    trainer.set_kv_amax(trainer.kv_amax())
    assert [a.layer for a in core_attentions(trainer.gpt)] == [0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(trainer.logprobs(batches), before, strict=True))


def test_micro_batches_in_reverse_order_give_the_same_bits(config, trajectories) -> None:
    trainer = trainer_of(config)
    batches = batches_of(config, samples_of(trajectories), size=2)
    forwards = trainer.logprobs(batches)
    backwards = trainer.logprobs(batches[::-1])[::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))


def test_layers_under_each_other_s_numbers_would_show(config, trajectories) -> None:
    """The test above can fail: records of two layers exchanged change the log-probabilities."""
    trainer = trainer_of(config)
    batches = batches_of(config, samples_of(trajectories))
    before = trainer.logprobs(batches)
    first, _, last = moe_layers(trainer.gpt)
    first.layer_number, last.layer_number = last.layer_number, first.layer_number
    assert not all(torch.equal(a, b) for a, b in zip(trainer.logprobs(batches), before, strict=True))


def test_a_record_of_other_tokens_under_this_sample_s_name_is_refused(config, trajectories) -> None:
    """Of equal length, so that only the engine's digest of the tokens it recorded can tell."""
    mine = trajectories[5]
    theirs = replace(mine.guidance, tokens_digest=tokens_digest(mine.tokens[:-1][::-1]))
    one_batch(config, [mine])
    with pytest.raises(GuidanceError, match=f"guidance of sample {mine.sample_id} was recorded for other token ids"):
        one_batch(config, [replace(mine, guidance=theirs)])


def test_the_record_of_another_model_s_layers_is_refused(config, trajectories) -> None:
    """A model whose middle layer has no experts; the record has an expert input for it."""
    trainer = trainer_of_dense_middle(config)
    with pytest.raises(LayerError, match="fc1_in in layer 1: that layer has no routed experts"):
        trainer.logprobs([one_batch(config, trajectories[:2])])
    spec = GuidanceSpec(bits=4, layers=(0, 2))
    trainer.logprobs([one_batch(config, rollout(config, spec=spec)[:2])])


def trainer_of_dense_middle(config):
    trainer = trainer_of(config)
    layer = trainer.gpt.decoder.layers[1]
    layer.mlp.__class__ = layer.mlp.__class__.__mro__[1]  # Megatron's own MoE layer: nothing guided
    return trainer
