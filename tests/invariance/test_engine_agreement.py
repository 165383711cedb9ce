"""Trainer and engine on the same tokens with the same weights: log-probabilities agree, guided codes are the engine's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import engine_of, plain_bundle, random_weights, request
from trainers import (
    FULL,
    PROMPTS,
    batches_of,
    dtype_of,
    guided_site_codes,
    one_batch,
    recorded_codes,
    rollout,
    run_config,
    samples_of,
    store_of,
    trainer_of,
)

from megatron_trace.config import RunConfig
from megatron_trace.guidance.frames import Rounding
from megatron_trace.guidance.segments import GuidanceError, narrowed
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.modeling.site_probe import probe
from megatron_trace.rollout.protocol import Trajectory
from megatron_trace.trainer.batch import MicroBatch
from megatron_trace.trainer.megatron import MegatronTrainer
from megatron_trace.trainer.refit import RefitError, build_bundle, refit

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module", params=DTYPES)
def config(request: pytest.FixtureRequest) -> RunConfig:
    return run_config(precision={"compute_dtype": request.param})


@pytest.fixture(scope="module")
def trainer(config: RunConfig, lone_process: None) -> MegatronTrainer:
    return trainer_of(config)


@pytest.fixture(scope="module")
def trajectories(config: RunConfig) -> list[Trajectory]:
    return rollout(config)


def gaps(trainer: MegatronTrainer, batch: MicroBatch) -> torch.Tensor:
    """|log p trainer - log p engine| of the response tokens."""
    return (trainer.logprobs([batch])[0] - batch.behavior_logprobs).abs()[batch.mask]


def test_logprobs_of_a_guided_forward_are_the_engine_s(config, trainer, trajectories) -> None:
    gap = gaps(trainer, one_batch(config, trajectories))
    assert gap.numel() == sum(len(t.logprobs) for t in trajectories)
    # the rest is the order of FP32 sums, which now and then turns a BF16 rounding
    assert gap.median() < 2e-6
    assert gap.max() < (1e-5 if config.precision.compute_dtype == "float32" else 0.1)


def test_without_guidance_nearest_on_equal_arithmetic_agrees_too_and_bf16_does_not(config, trainer, trajectories) -> None:
    assert gaps(trainer, one_batch(config, trajectories, Rounding.NEAREST)).median() < 2e-6
    assert gaps(trainer, one_batch(config, trajectories, Rounding.BF16)).mean() > 0.02


def test_unquantised_engine_and_bf16_trainer_agree(config, trainer) -> None:
    weights = random_weights(config.model)
    bundle = plain_bundle(weights, dtype=dtype_of(config), fingerprint=config.contract.fingerprint)
    engine = engine_of(config.model, bundle, dtype=dtype_of(config), contract_fingerprint=config.contract.fingerprint)
    found = engine.generate([request(i, p) for i, p in enumerate(PROMPTS)], capture_routes=True)
    gap = gaps(trainer, one_batch(config, found, Rounding.BF16))
    assert gap.median() < 2e-6 and gap.max() < (1e-5 if config.precision.compute_dtype == "float32" else 0.1)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_full_record_reproduces_the_engine_s_codes(config, trainer, tensor_parallel: int) -> None:
    """Every code at TP=1; at TP=2 inputs differ, and codes with them where the recorded one is no neighbour."""
    same = total = 0
    for t in rollout(config, tensor_parallel=tensor_parallel):
        codes = guided_site_codes(trainer, config, t)
        assert codes.keys() == {(layer, site) for layer in FULL.layers for site in FULL.sites}
        for (layer, site), found in codes.items():
            recorded = recorded_codes(t, layer, site)
            assert recorded.shape == found.shape == (len(t.tokens) - 1, {"fc1_in": 64, "k": 32, "v": 32}[site])
            same, total = same + int((recorded == found).sum()), total + found.numel()
    assert same == total if tensor_parallel == 1 else same / total > 0.99


def test_every_token_was_guided_and_none_fell_back(config, trainer, trajectories) -> None:
    probe.reset()
    batch = one_batch(config, trajectories)
    trainer.logprobs([batch])
    tokens = sum(len(t.tokens) - 1 for t in trajectories)
    assert dict(probe.guided_tokens) == dict.fromkeys(("k", "v", "fc1_in"), 3 * tokens)
    assert not any(probe.fallback_tokens.values())
    probe.reset()


def test_a_latter_half_compact_record_guides_those_layers_only(config, trainer, trajectories) -> None:
    layout = RecordLayout.build(GuidanceSpec(bits=1, layers=(2,), sites=("v",)), config.model)
    narrow = [replace(t, guidance=narrowed(t.guidance, layout)) for t in trajectories]
    probe.reset()
    trainer.logprobs([one_batch(config, narrow)])
    assert dict(probe.guided_tokens) == {"k": 0, "v": sum(len(t.tokens) - 1 for t in narrow), "fc1_in": 0}
    probe.reset()


# ---- records that must not be used -------------------------------------------------------------------------------------


def test_rows_of_another_weight_version_are_not_used_but_counted(config, trainer, trajectories) -> None:
    """The token after position p was sampled by version 0; a row recorded by version 5 is of another forward."""
    t = trajectories[2]
    versions = t.guidance.versions.copy()
    late = np.arange(len(versions)) >= t.prompt_length + 2
    versions[late] = 5
    other = replace(t.guidance, versions=versions, static_amax=t.guidance.static_amax | {5: t.guidance.static_amax[0]})
    probe.reset()
    batch = one_batch(config, [replace(t, guidance=other)])
    assert batch.frame.valid.tolist() == (~late).tolist()
    trainer.logprobs([batch])
    assert probe.fallback_tokens == dict.fromkeys(("k", "v", "fc1_in"), 3 * int(late.sum())) and late.sum() > 0
    probe.reset()


def test_routes_of_another_weight_version_are_not_replayed(config, trajectories) -> None:
    t = trajectories[2]
    versions = t.routes.versions.copy()
    versions[-1] = 5
    batch = one_batch(config, [replace(t, routes=replace(t.routes, versions=versions))])
    assert batch.frame.routes_valid.tolist() == [True] * (len(versions) - 1) + [False]


def test_token_versions_decide_which_rows_are_of_the_sampling_forward(config, trajectories) -> None:
    t = trajectories[0]
    token_versions = t.token_versions.copy()
    token_versions[3:] = 1
    frame = one_batch(config, [replace(t, token_versions=token_versions)]).frame
    first_wrong = t.prompt_length - 1 + 3
    assert frame.valid.tolist() == frame.routes_valid.tolist() == [i < first_wrong for i in range(len(t.tokens) - 1)]


def test_a_record_of_another_sample_is_refused(config, trajectories) -> None:
    store = store_of(config, trajectories[:2])
    with pytest.raises(GuidanceError, match="no guidance for sample 4; 2 other samples are held"):
        batches_of(config, samples_of([trajectories[4]]), store=store)


def test_a_record_of_another_contract_is_refused(config, trajectories) -> None:
    other = run_config(rollout={"temperature": 0.7})
    with pytest.raises(GuidanceError, match=f"under contract {config.contract.fingerprint[:12]}, this trainer runs"):
        store_of(other, trajectories)


def test_two_layouts_in_one_micro_batch_are_refused(config, trajectories) -> None:
    layout = RecordLayout.build(GuidanceSpec(bits=1, layers=FULL.layers), config.model)
    mixed = [trajectories[0], replace(trajectories[1], guidance=narrowed(trajectories[1].guidance, layout))]
    with pytest.raises(GuidanceError, match="more than one record layout"):
        one_batch(config, mixed)


def test_a_second_record_of_one_sample_is_refused(config, trajectories) -> None:
    with pytest.raises(GuidanceError, match="guidance of sample 3 was stored twice"):
        store_of(config, [trajectories[3], trajectories[3]])
    with pytest.raises(GuidanceError, match="routes of sample 3 were stored twice"):
        store_of(config, [replace(trajectories[3], guidance=None)] * 2)


def test_a_short_record_is_refused(config, trajectories) -> None:
    t = trajectories[0]
    g, n = t.guidance, len(t.tokens) - 2
    short = replace(g, rows=g.rows[:n], valid=g.valid[:n], versions=g.versions[:n])
    with pytest.raises(GuidanceError, match=f"guidance of sample 0 covers {n} positions, the trainer needs {n + 1}"):
        one_batch(config, [replace(t, guidance=short)])


def test_a_route_that_names_an_expert_twice_is_refused(config, trajectories) -> None:
    t = trajectories[0]
    experts = t.routes.experts.copy()
    experts[1, 2] = 3
    with pytest.raises(GuidanceError, match="names the same expert twice"):
        one_batch(config, [replace(t, routes=replace(t.routes, experts=experts))])


# ---- refit ---------------------------------------------------------------------------------------------------------------


def test_refit_gives_the_engine_the_trainer_s_bytes(config, trainer) -> None:
    fingerprint = config.contract.fingerprint
    engine = engine_of(config.model, dtype=dtype_of(config), quantization="nvfp4", contract_fingerprint=fingerprint)
    ack = refit(engine, build_bundle(trainer, quantized=True, contract_fingerprint=fingerprint))
    assert ack.success and ack.version == trainer.version == engine.health().weight_version


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"success": False, "message": "disk full"}, "refit to version 0 was refused: disk full"),
        ({"version": 7}, "engine serves version 7 after a refit to version 0"),
        ({"digest": "f" * 40}, "engine stores bytes with digest ffffffffffffffff, the trainer sent"),
    ],
)
def test_a_refit_that_went_wrong_ends_the_run(config, trainer, change: dict, message: str) -> None:
    fingerprint = config.contract.fingerprint
    engine = engine_of(config.model, dtype=dtype_of(config), quantization="nvfp4", contract_fingerprint=fingerprint)
    update = engine.update_weights
    engine.update_weights = lambda bundle: replace(update(bundle), **change)
    with pytest.raises(RefitError, match=message):
        refit(engine, build_bundle(trainer, quantized=True, contract_fingerprint=fingerprint))
