"""Loss and gradient do not depend on micro-batches, packing, or how sequences are split over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_trace.rl.losses import AGGREGATIONS, OBJECTIVES, LossConfig, LossInputs, loss_denominator, policy_loss
from megatron_trace.rl.metrics import PolicyMetrics
from megatron_trace.rl.rejection import RejectionConfig, rejection_mask
from tests.unit.rl.test_losses import VARIANTS, config_for, random_inputs

PER_TOKEN = ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "mask", "reference_logprobs", "sequence_ids")


def with_reference(inputs: LossInputs) -> LossInputs:
    return replace(inputs, reference_logprobs=inputs.behavior_logprobs + 0.1)


def take(inputs: LossInputs, index) -> LossInputs:
    changes = {name: getattr(inputs, name)[index] for name in PER_TOKEN if getattr(inputs, name) is not None}
    return replace(inputs, **changes)


def total_of_parts(
    parts: list[LossInputs], config: LossConfig, leaf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, PolicyMetrics]:
    denominator = sum(loss_denominator(part, config) for part in parts)
    outputs = [policy_loss(part, config, denominator=denominator) for part in parts]
    loss = sum(output.loss for output in outputs)
    metrics = PolicyMetrics.empty()
    for output in outputs:
        metrics = metrics.merge(output.metrics)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


def assert_same(a, b) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(a[1], b[1], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(a[2].sums, b[2].sums, rtol=1e-9, atol=1e-9)
    assert torch.equal(a[2].maxima, b[2].maxima)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_split_and_packing(objective: str, aggregation: str, variant: str) -> None:
    config = config_for(objective, aggregation, kl_coef=0.05, **VARIANTS[variant])
    inputs = with_reference(random_inputs(11, batch=6))
    leaf = inputs.logprobs
    whole = total_of_parts([inputs], config, leaf)
    for cuts in ([2, 4], [3, 1, 2], [1] * 6):
        assert_same(total_of_parts([take(inputs, rows) for rows in torch.arange(6).split(cuts)], config, leaf), whole)
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([70, 3, 12, 5, 900, 4]).repeat_interleave(leaf.shape[1])
    flat = {name: getattr(inputs, name).reshape(-1)[order] for name in PER_TOKEN if name != "sequence_ids"}
    assert_same(total_of_parts([LossInputs(**flat, sequence_ids=ids[order])], config, leaf), whole)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_sequences_split_over_context_ranks(objective: str, aggregation: str, variant: str) -> None:
    config = config_for(objective, aggregation, **VARIANTS[variant])
    inputs = random_inputs(12)
    leaf, mask = inputs.logprobs, inputs.mask
    whole = total_of_parts([inputs], config, leaf)

    def clean(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x, 0.0)

    anchor = inputs.behavior_logprobs if objective == "naive_behavior" else inputs.proximal_logprobs
    count = mask.double().sum(1, keepdim=True).expand_as(leaf)
    per_sequence = {
        "sequence_token_count": count,
        "sequence_log_ratio": clean(leaf.detach() - anchor).sum(1, keepdim=True).expand_as(leaf) / count.clamp_min(1),
        "sequence_log_weight": clean(inputs.proximal_logprobs - inputs.behavior_logprobs).sum(1, keepdim=True).expand_as(leaf),
    }
    parts = []
    for columns in (slice(0, 4), slice(4, 9)):
        share = take(inputs, (slice(None), columns))
        parts.append(replace(share, **{name: tensor[:, columns] for name, tensor in per_sequence.items()}))
    assert_same(total_of_parts(parts, config, leaf), whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_garbage_under_the_mask_equals_dropping_the_tokens(aggregation: str) -> None:
    config = config_for("acr", aggregation)
    inputs = random_inputs(13)
    kept = inputs.mask.nonzero(as_tuple=True)
    dropped = LossInputs(
        logprobs=inputs.logprobs[kept],
        proximal_logprobs=inputs.proximal_logprobs[kept],
        behavior_logprobs=inputs.behavior_logprobs[kept],
        advantages=inputs.advantages[kept],
        mask=torch.ones(len(kept[0]), dtype=torch.bool),
        sequence_ids=kept[0],
    )
    # the wholly masked last row still counts as a sequence of the constant aggregation
    denominator = loss_denominator(inputs, config)
    a, b = (policy_loss(i, config, denominator=denominator).loss for i in (inputs, dropped))
    assert torch.isfinite(a)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(x, inputs.logprobs)[0] for x in (a, b)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "config",
    [
        RejectionConfig(level="token", high=2.0),
        RejectionConfig(level="sequence", high=3.0, low=0.2, veto=0.1),
        RejectionConfig(level="geometric", high=1.3),
        RejectionConfig(level="binary_kl", threshold=0.02),
        RejectionConfig(level="none", veto=0.3),
    ],
)
def test_rejection_does_not_depend_on_the_split(config: RejectionConfig) -> None:
    """A selection rule computed per micro-batch selects differently when the split changes (AReaL pull 1546)."""
    inputs = random_inputs(14, batch=6, extreme=False)

    def mask_of(part: LossInputs) -> torch.Tensor:
        result = rejection_mask(
            proximal_logprobs=part.proximal_logprobs,
            behavior_logprobs=part.behavior_logprobs,
            mask=part.mask,
            config=config,
            sequence_ids=part.sequence_ids,
        )
        assert result.mask.sum() + result.rejected_tokens == part.mask.sum()
        return result.mask

    whole = mask_of(inputs)
    assert 0 < whole.sum() < inputs.mask.sum()
    assert torch.equal(torch.cat([mask_of(take(inputs, rows)) for rows in torch.arange(6).split([1, 3, 2])]), whole)
    order = torch.randperm(54, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(6).repeat_interleave(9)
    packed = {name: getattr(inputs, name).reshape(-1)[order] for name in PER_TOKEN[:5]}
    assert torch.equal(mask_of(LossInputs(**packed, sequence_ids=ids[order])), whole.reshape(-1)[order])
    loss_config = LossConfig(aggregation="sequence_mean")
    smaller = inputs.with_mask(whole)
    alone = total_of_parts([smaller], loss_config, inputs.logprobs)
    assert_same(total_of_parts([take(smaller, [0, 1]), take(smaller, [2, 3, 4, 5])], loss_config, inputs.logprobs), alone)
