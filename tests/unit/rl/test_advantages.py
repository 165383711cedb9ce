"""Group advantages against the statistics module; equality of rewards is exact; DAPO's selection and length shaping."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megatron_trace.rl.advantages import grpo_advantages, informative_groups, rloo_advantages
from megatron_trace.rl.dapo import dynamic_sampling, overlong_penalty
from megatron_trace.rl.losses import LossConfig, LossInputs, policy_loss

IDS = torch.tensor([9, -4, 9, 2, -4, 9, 2, -4, 7])
REWARDS = torch.tensor([1.0, 0.25, 0.0, 0.5, -2.0, 0.5, 3.0, math.nan, 4.0])
USABLE = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)


def by_group() -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(IDS.tolist()):
        if USABLE[index]:
            groups.setdefault(group, []).append(index)
    return groups


def test_grpo_against_the_statistics_module() -> None:
    expected = [0.0] * 9
    for members in by_group().values():
        rewards = [REWARDS[i].item() for i in members]
        if len(members) > 1:
            for i in members:
                expected[i] = (REWARDS[i].item() - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
    result = grpo_advantages(REWARDS, IDS, usable=USABLE)
    torch.testing.assert_close(result.advantages, torch.tensor(expected))
    assert result.zero_variance.tolist() == [False] * 8 + [True]


def test_dr_grpo_and_batch_scale() -> None:
    means = {group: statistics.mean(REWARDS[i].item() for i in members) for group, members in by_group().items()}
    spread = statistics.stdev(REWARDS[USABLE].tolist())
    live = [USABLE[i].item() and IDS[i].item() != 7 for i in range(9)]
    centred = [REWARDS[i].item() - means[IDS[i].item()] if live[i] else 0.0 for i in range(9)]
    torch.testing.assert_close(grpo_advantages(REWARDS, IDS, usable=USABLE, scale="none").advantages, torch.tensor(centred))
    scaled = torch.tensor(centred) / (spread + 1e-6)
    torch.testing.assert_close(grpo_advantages(REWARDS, IDS, usable=USABLE, scale="batch_std").advantages, scaled)


def test_rloo_leaves_one_out() -> None:
    expected = [0.0] * 9
    for members in by_group().values():
        for i in members:
            others = [REWARDS[j].item() for j in members if j != i]
            if others:
                expected[i] = REWARDS[i].item() - statistics.mean(others)
    torch.testing.assert_close(rloo_advantages(REWARDS, IDS, usable=USABLE).advantages, torch.tensor(expected))


@pytest.mark.parametrize("value", [0.1, 0.3, 1e-8, 1e6 + 0.1])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_rewards_give_exactly_zero(value: float, epsilon: float) -> None:
    """Eight float32 copies of 0.1 have a non-zero computed deviation; -0.0074 or -0.94 came out elsewhere (trl pull 7068)."""
    rewards = torch.full((8,), value)
    for scale in ("group_std", "batch_std", "none"):
        result = grpo_advantages(rewards, torch.zeros(8, dtype=torch.long), epsilon=epsilon, scale=scale)
        assert torch.equal(result.advantages, torch.zeros(8)) and result.zero_variance.all()
    assert torch.equal(rloo_advantages(rewards, torch.zeros(8, dtype=torch.long)).advantages, torch.zeros(8))


def test_nearly_equal_rewards_are_not_called_equal() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1 + 1e-8 * 2]).double()
    result = grpo_advantages(rewards, torch.zeros(4, dtype=torch.long), epsilon=0.0)
    assert not result.zero_variance.any()
    torch.testing.assert_close(result.advantages, torch.tensor([-0.5, -0.5, -0.5, 1.5]))


def test_one_usable_reward_and_none_give_zero() -> None:
    """std([1.]) is NaN; the advantage of a group with one valid sample is 0 (trl pull 5773)."""
    rewards = torch.tensor([1.0, math.nan, math.inf, math.nan])
    usable = torch.tensor([True, False, False, False])
    ids = torch.tensor([0, 0, 1, 1])
    for function in (grpo_advantages, rloo_advantages):
        assert torch.equal(function(rewards, ids, usable=usable).advantages, torch.zeros(4))


def test_order_of_samples_is_irrelevant() -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    shuffled = grpo_advantages(REWARDS[order], IDS[order], usable=USABLE[order]).advantages
    torch.testing.assert_close(shuffled, grpo_advantages(REWARDS, IDS, usable=USABLE).advantages[order], rtol=1e-7, atol=0)


def test_usable_nan_and_bad_shapes_raise() -> None:
    with pytest.raises(ValueError, match="rewards: NaN"):
        grpo_advantages(REWARDS, IDS)
    with pytest.raises(ValueError, match=r"group_ids \(3,\)"):
        grpo_advantages(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ValueError, match="scale='std'"):
        grpo_advantages(torch.zeros(4), torch.zeros(4), scale="std")


def test_zero_variance_group_trains_kl_when_kept_and_leaves_the_denominator_when_dropped() -> None:
    """The documented rule (trl pulls 7068, 6365): kept samples count and feel the KL, dropped ones do neither."""
    rewards = torch.tensor([1.0, 0.0, 0.1, 0.1])
    ids = torch.tensor([0, 0, 1, 1])
    current = torch.full((4, 2), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=current,
        proximal_logprobs=None,
        behavior_logprobs=current.detach(),
        advantages=grpo_advantages(rewards, ids).advantages.double().unsqueeze(1),
        mask=torch.ones(4, 2, dtype=torch.bool),
        reference_logprobs=current.detach() - 0.5,
    )
    config = LossConfig(kl_coef=0.1, kl_estimator="k1")
    kept = torch.autograd.grad(policy_loss(inputs, config).loss, current)[0]
    torch.testing.assert_close(kept[2:], torch.full((2, 2), 0.1 * 0.5 / 8, dtype=torch.float64))
    dropped_inputs = inputs.with_mask(inputs.mask & informative_groups(rewards, ids).unsqueeze(1))
    dropped = torch.autograd.grad(policy_loss(dropped_inputs, config).loss, current)[0]
    assert not dropped[2:].any()
    torch.testing.assert_close(dropped[:2], 2 * kept[:2])


def test_dynamic_sampling_keeps_whole_informative_groups() -> None:
    ids = torch.tensor([3, 1, 2, 3, 1, 2, 4, 4])
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])  # group 2 all right; 1, 3, 4 mixed
    result = dynamic_sampling(scores, ids, groups_wanted=2)
    assert result.keep.tolist() == [True, True, False, True, True, False, False, False]
    assert (result.groups_kept, result.groups_found, result.groups_missing) == (2, 3, 0)
    short = dynamic_sampling(scores, ids, groups_wanted=5)
    assert (short.groups_kept, short.groups_missing) == (3, 2)
    assert short.keep.tolist() == (ids != 2).tolist()


def test_overlong_penalty_is_the_papers_ramp() -> None:
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 30000])
    expected = torch.tensor([0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, max_length=20480, buffer=4096), expected)
    assert overlong_penalty(lengths, max_length=20480, buffer=4096, penalty=0.5)[-1].item() == -0.5
