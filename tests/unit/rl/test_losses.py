"""Policy losses against worked numbers of the paper's equations and against the brute-force oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_trace.rl.losses import AGGREGATIONS, OBJECTIVES, LossConfig, LossInputs, loss_denominator, policy_loss
from tests.unit.rl.reference import Token, reference_loss

VARIANTS: dict[str, dict] = {
    "plain": {},
    "dapo_clip": {"clip_low": 0.2, "clip_high": 0.28, "truncation": 5.0},
    "dual_clip": {"dual_clip": 3.0},
    "two_sided": {"two_sided": True},
    "gspo": {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "sequence_weight": {"weight_level": "sequence"},
}


def config_for(objective: str, aggregation: str, **more) -> LossConfig:
    length = 16.0 if aggregation == "constant" else None
    return LossConfig(objective=objective, aggregation=aggregation, constant_length=length, **more)


def random_inputs(
    seed: int, *, batch: int = 5, time: int = 9, extreme: bool = True, advantage_per_token: bool = True
) -> LossInputs:
    """float64 tokens with mismatch and staleness; some kept log-ratios of +-1000, garbage wherever the mask is off."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(batch, time, generator=generator, dtype=torch.float64)

    behavior = -normal(1.0).abs() - 0.1
    proximal = behavior + normal(0.8)
    current = proximal + normal(0.3)
    mask = torch.rand(batch, time, generator=generator) < 0.7
    mask[-1] = False
    mask[0, 0] = mask[1, 1] = mask[2, 2] = True
    if extreme:
        current[0, 0] += 1000.0
        current[1, 1] -= 1000.0
        proximal[2, 2] += 1000.0
        current[2, 2] = proximal[2, 2] + 0.4
    advantages = normal(1.0) if advantage_per_token else normal(1.0)[:, :1]
    if advantage_per_token:
        advantages[0, 0], advantages[1, 1] = 1.3, -0.7
    garbage = torch.tensor([math.inf, -math.inf, math.nan, 1000.0, -1000.0], dtype=torch.float64)
    filler = garbage[torch.randint(5, (batch, time), generator=generator)]
    off = ~mask
    current, proximal, behavior = (torch.where(off, filler.roll(i, 1), t) for i, t in enumerate((current, proximal, behavior)))
    if advantage_per_token:
        advantages = torch.where(off, filler, advantages)
    return LossInputs(
        logprobs=current.requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=advantages,
        mask=mask,
    )


def loss_and_gradient(inputs: LossInputs, config: LossConfig, denominator=None) -> tuple[float, torch.Tensor]:
    loss = policy_loss(inputs, config, denominator=denominator).loss
    return loss.item(), torch.autograd.grad(loss, inputs.logprobs)[0]


def kept_tokens(inputs: LossInputs) -> tuple[list[Token], torch.Tensor]:
    advantages = inputs.advantages.expand_as(inputs.logprobs)
    where = inputs.mask.nonzero()
    tokens = [
        Token(
            sequence=int(i),
            current=inputs.logprobs[i, t].item(),
            proximal=inputs.proximal_logprobs[i, t].item(),
            behavior=inputs.behavior_logprobs[i, t].item(),
            advantage=advantages[i, t].item(),
        )
        for i, t in where
    ]
    return tokens, where


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_equal_the_oracle(objective: str, aggregation: str, variant: str) -> None:
    config = config_for(objective, aggregation, **VARIANTS[variant])
    for seed in range(3):
        inputs = random_inputs(seed, extreme=True)
        tokens, where = kept_tokens(inputs)
        expected_loss, expected_gradient = reference_loss(
            tokens,
            objective=objective,
            aggregation=aggregation,
            sequences=inputs.mask.shape[0],
            constant_length=config.constant_length,
            truncation=config.truncation,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            two_sided=config.two_sided,
            ratio_level=config.ratio_level,
            weight_level=config.weight_level,
        )
        loss, gradient = loss_and_gradient(inputs, config)
        assert math.isfinite(loss) and torch.isfinite(gradient).all()
        assert loss == pytest.approx(expected_loss, rel=1e-11, abs=1e-12)
        torch.testing.assert_close(
            gradient[where[:, 0], where[:, 1]], torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-11, atol=1e-12
        )
        assert not gradient[~inputs.mask].any()


def test_float32_stays_close_to_the_oracle() -> None:
    inputs = random_inputs(7, extreme=False)
    tokens, where = kept_tokens(inputs)
    single = LossInputs(
        logprobs=inputs.logprobs.detach().float().requires_grad_(),
        proximal_logprobs=inputs.proximal_logprobs.float(),
        behavior_logprobs=inputs.behavior_logprobs.float(),
        advantages=inputs.advantages.float(),
        mask=inputs.mask,
    )
    expected_loss, expected_gradient = reference_loss(tokens, objective="acr", aggregation="token_mean", sequences=5)
    loss, gradient = loss_and_gradient(single, LossConfig(objective="acr"))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(
        gradient[where[:, 0], where[:, 1]].double(), torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize(
    ("objective", "advantage", "ratio", "expected"),
    [
        ("tis", 1.0, 1.5, 2.4),
        ("acr", 1.0, 1.5, 3.0),
        ("decoupled", 1.0, 1.5, 4.8),
        ("tis", -1.0, 1.5, -3.0),
        ("acr", -1.0, 1.5, -3.0),
        ("tis", -1.0, 0.5, -1.6),
        ("acr", -1.0, 0.5, -1.6),
        ("naive_proximal", 1.0, 1.5, 1.2),
        ("naive_behavior", 1.0, 1.5, 1.2),
        ("naive_behavior", -1.0, 1.5, -6.0),
    ],
)
def test_worked_numbers(objective: str, advantage: float, ratio: float, expected: float) -> None:
    """rho = 4, C = 2, e = 0.2: r = 0.5, w = 2, upper bound 2.4."""
    value, _ = one_token(objective=objective, rho=4.0, ratio=ratio, advantage=advantage)
    assert value == pytest.approx(expected, abs=1e-12)


def one_token(*, objective: str, rho: float, ratio: float, advantage: float, truncation: float = 2.0) -> tuple[float, float]:
    """Objective (not loss) of a single token and its derivative by log pi_theta."""
    behavior = torch.tensor([[-3.0]], dtype=torch.float64)
    proximal = behavior + math.log(rho)
    current = (proximal + math.log(ratio)).requires_grad_()
    inputs = LossInputs(current, proximal, behavior, torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool))
    loss = policy_loss(inputs, LossConfig(objective=objective, truncation=truncation)).loss
    return -loss.item(), -torch.autograd.grad(loss, current)[0].item()


def test_acr_differs_from_tis_exactly_where_the_paper_says() -> None:
    for rho in (0.5, 1.0, 1.9, 2.1, 4.0, 100.0):
        for ratio in (0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9, 2.39, 2.41, 30.0, 80.0):
            for advantage in (1.0, -1.0):
                tis, tis_slope = one_token(objective="tis", rho=rho, ratio=ratio, advantage=advantage)
                acr, acr_slope = one_token(objective="acr", rho=rho, ratio=ratio, advantage=advantage)
                upper = 1.2 * max(1.0, rho / 2.0)
                assert acr >= tis - 1e-12
                assert (abs(acr_slope - tis_slope) > 1e-9) == (advantage > 0 and rho > 2.0 and 1.2 < ratio < upper)
                if rho <= 2.0:
                    assert acr == pytest.approx(tis, abs=1e-12)
                if advantage > 0:
                    assert acr == pytest.approx(min(rho, 2.0) * min(ratio, upper), rel=1e-12)


def test_gradient_is_whole_with_no_room_to_clip() -> None:
    """R exactly on the bound (first step, clip_high = 0): the gradient is A, not a share of it."""
    current = torch.full((1, 1), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(current, current.detach(), current.detach(), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    for config in (LossConfig(clip_high=0.0), LossConfig(objective="acr", clip_high=0.0, clip_low=0.0)):
        assert torch.autograd.grad(policy_loss(inputs, config).loss, current)[0].item() == -1.0


def test_missing_proximal_means_current_detached() -> None:
    inputs = random_inputs(3, extreme=False)
    explicit = replace(inputs, proximal_logprobs=inputs.logprobs.detach())
    absent = replace(inputs, proximal_logprobs=None)
    for objective in OBJECTIVES:
        a, b = (loss_and_gradient(i, LossConfig(objective=objective)) for i in (explicit, absent))
        assert a[0] == b[0] and torch.equal(a[1], b[1])


def test_proximal_behavior_and_advantages_get_no_gradient() -> None:
    inputs = random_inputs(4)
    others = [t.clone().requires_grad_() for t in (inputs.proximal_logprobs, inputs.behavior_logprobs, inputs.advantages)]
    loss = policy_loss(LossInputs(inputs.logprobs, *others, inputs.mask), LossConfig(objective="acr")).loss
    assert torch.autograd.grad(loss, others, allow_unused=True) == (None, None, None)


def test_entropy_bonus_and_auxiliary_loss_add_with_their_gradient() -> None:
    inputs = random_inputs(5)
    base, _ = loss_and_gradient(inputs, LossConfig())
    extra = torch.where(inputs.mask, torch.rand(inputs.mask.shape, dtype=torch.float64), math.nan).requires_grad_()
    share = inputs.mask.double() / inputs.mask.sum()
    expected = (torch.nan_to_num(extra.detach()) * share).sum().item()
    for name, coefficient, sign in (("entropy", 0.5, -0.5), ("auxiliary_loss", 0.0, 1.0)):
        loss = policy_loss(replace(inputs, **{name: extra}), LossConfig(entropy_coef=coefficient)).loss
        assert loss.item() == pytest.approx(base + sign * expected, rel=1e-12)
        torch.testing.assert_close(torch.autograd.grad(loss, extra)[0], sign * share)


def test_sequence_ratio_is_bounded_and_its_gradient_finite() -> None:
    """A mean log-ratio of +-10000 (OpenRLHF pull 1293: the clamp was computed and never read)."""
    for shift, expected in ((1e4, math.exp(20.0)), (-1e4, 0.8)):
        current = torch.full((2, 4), -1.0, requires_grad=True)
        with torch.no_grad():
            current += shift
        old = torch.full((2, 4), -1.0)
        inputs = LossInputs(current, old, old, torch.full((2, 1), -1.0), torch.ones(2, 4, dtype=torch.bool))
        loss, gradient = loss_and_gradient(inputs, LossConfig(objective="naive_proximal", ratio_level="sequence"))
        assert loss == pytest.approx(expected, rel=1e-5)
        assert torch.isfinite(gradient).all()


def test_gspo_equals_the_sequence_level_definition() -> None:
    """One advantage per sequence: mean over sequences of min(s A, clip(s) A), s the geometric mean, differentiated directly."""
    inputs = random_inputs(6, extreme=False, advantage_per_token=False)
    config = LossConfig(
        objective="naive_proximal", ratio_level="sequence", aggregation="sequence_mean", clip_low=0.1, clip_high=0.1
    )
    loss, gradient = loss_and_gradient(inputs, config)
    current = inputs.logprobs.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    rows = [i for i in range(5) if inputs.mask[i].any()]
    for i in rows:
        kept = inputs.mask[i]
        s = (current[i][kept] - inputs.proximal_logprobs[i][kept]).mean().exp()
        advantage = inputs.advantages[i, 0]
        total = total - torch.minimum(s * advantage, s.clamp(0.9, 1.1) * advantage)
    expected = torch.autograd.grad(total / len(rows), current)[0]
    assert loss == pytest.approx((total / len(rows)).item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.nan_to_num(expected), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_empty_step_is_zero_and_says_so(objective: str, aggregation: str) -> None:
    """Every completion masked: zero loss and gradient, and a count of 0 for the caller to skip on (trl pull 3248)."""
    inputs = random_inputs(8)
    inputs = inputs.with_mask(torch.zeros_like(inputs.mask))
    config = config_for(objective, aggregation)
    output = policy_loss(inputs, config, denominator=loss_denominator(inputs, config))
    assert output.loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(output.loss, inputs.logprobs)[0], torch.zeros(5, 9, dtype=torch.float64))
    assert output.metrics.finalize() == {"tokens": 0.0, "nonfinite_tokens": 0.0}


def test_constant_normaliser_does_not_follow_the_mask() -> None:
    """Dr.GRPO (verl issue 3741): halving the kept tokens halves the sum and leaves the divisor alone."""
    old = torch.zeros(4, 8, dtype=torch.float64)
    whole = LossInputs(old.clone().requires_grad_(), old, old, torch.ones(4, 1), torch.ones(4, 8, dtype=torch.bool))
    half = whole.with_mask(torch.arange(8).expand(4, 8) < 4)
    config = LossConfig(aggregation="constant", constant_length=10.0)
    assert policy_loss(whole, config).loss.item() == pytest.approx(-4 * 8 / (10 * 4))
    assert policy_loss(half, config).loss.item() == pytest.approx(-4 * 4 / (10 * 4))
    assert loss_denominator(half, config).item() == loss_denominator(whole, config).item() == 40.0


def test_nonfinite_kept_tokens_are_counted_not_hidden() -> None:
    inputs = random_inputs(9, extreme=False)
    current = inputs.logprobs.detach().clone()
    current[0, 0] = math.nan
    output = policy_loss(replace(inputs, logprobs=current.requires_grad_()), LossConfig())
    assert math.isnan(output.loss.item())
    assert output.metrics.total("nonfinite") == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("objective", "ppo"),
        ("aggregation", "mean"),
        ("clip_low", 1.5),
        ("clip_high", -0.1),
        ("truncation", 0.0),
        ("dual_clip", 1.0),
        ("constant_length", 5.0),
        ("max_log_ratio", 100.0),
        ("kl_estimator", "k4"),
    ],
)
def test_bad_config_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}=.*{value}"):
        LossConfig(**{field: value})


def test_bad_inputs_name_the_tensor() -> None:
    good = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"behavior_logprobs of shape \(2, 4\)"):
        LossInputs(good, good, torch.zeros(2, 4), good, good)
    with pytest.raises(ValueError, match=r"advantages of shape \(2,\)"):
        LossInputs(good, good, good, torch.zeros(2), good)
    inputs = LossInputs(good, good, good, good, torch.ones(2, 3))
    with pytest.raises(ValueError, match="reference_logprobs=None"):
        policy_loss(inputs, LossConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match="entropy=None"):
        policy_loss(inputs, LossConfig(entropy_coef=0.1))
    flat = torch.zeros(6)
    with pytest.raises(ValueError, match="sequence_ids=None"):
        policy_loss(LossInputs(flat, flat, flat, flat, torch.ones(6)), LossConfig(aggregation="sequence_mean"))
