"""Continuous batching: results do not depend on it, pages come back, requests end as they should, bad ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import engine_of, plain_bundle, quantized_bundle, request

from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.rollout.embedded import EmbeddedEngine
from megatron_trace.rollout.protocol import GenerationRequest, Trajectory

PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (3, 1, 4, 1, 5), (5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8), (33,), (5, 3, 5, 8, 9, 7, 9, 3, 2)]


@pytest.fixture
def fp32(model, weights) -> EmbeddedEngine:
    return engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32)


def assert_same(a: Trajectory, b: Trajectory, atol: float = 1e-5) -> None:
    assert a.sample_id == b.sample_id and a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)


def requests() -> list[GenerationRequest]:
    return [request(10 + i, p, max_new_tokens=4 + 3 * i, seed=5, top_p=0.9) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "settings",
    [{"max_batch_size": 1}, {"max_batch_size": 2}, {"num_pages": 8}, {"max_prefill_tokens": 6}, {"page_size": 16}],
    ids=str,
)
def test_sampled_tokens_do_not_depend_on_batching(model, weights, fp32, settings: dict) -> None:
    expected = fp32.generate(requests())
    other = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32, **settings)
    for a, b in zip(other.generate(requests()), expected, strict=True):
        assert_same(a, b)
    alone = [other.generate([r])[0] for r in reversed(requests())]
    for a, b in zip(reversed(alone), expected, strict=True):
        assert_same(a, b)


def test_trajectories_come_in_request_order_with_their_shapes(fp32) -> None:
    for i, t in enumerate(fp32.generate(requests())):
        n = len(PROMPTS[i]) + 4 + 3 * i
        assert t.sample_id == 10 + i and t.prompt_length == len(PROMPTS[i])
        assert t.tokens.shape == (n,) and t.tokens.dtype == np.int64
        assert tuple(t.tokens[: t.prompt_length].tolist()) == PROMPTS[i]
        assert t.logprobs.shape == (4 + 3 * i,) and t.logprobs.dtype == np.float32
        assert t.token_versions.tolist() == [1] * (4 + 3 * i) and t.token_versions.dtype == np.int32
        assert t.guidance is None and t.routes is None


def test_pages_and_counters_return_to_rest(fp32) -> None:
    trajectories = fp32.generate(requests())
    health = fp32.health()
    assert health.ok and health.pages_in_use == 0 and health.pages_total == 64 and health.weight_version == 1
    assert health.generated_tokens == sum(len(t.logprobs) for t in trajectories)


def test_seeds_and_samples_have_streams_of_their_own(fp32) -> None:
    def tokens(sample_id: int, seed: int) -> list[int]:
        return fp32.generate([request(sample_id, (1, 2), seed=seed, max_new_tokens=20)])[0].tokens.tolist()

    assert tokens(1, 1) == tokens(1, 1)
    assert len({tuple(tokens(s, seed)) for s, seed in ((1, 1), (2, 1), (1, 2))}) == 3


def test_stop_ends_at_any_of_the_stop_tokens_and_keeps_it(fp32) -> None:
    free = fp32.generate([request(0, (3, 1, 4), max_new_tokens=20)])[0]
    response = free.tokens[3:].tolist()
    stops = (response[9], response[5], 60)
    first = min(response.index(s) for s in stops if s in response)
    stopped = fp32.generate([request(0, (3, 1, 4), max_new_tokens=20, stop_token_ids=stops)])[0]
    assert free.finish_reason == "length" and stopped.finish_reason == "stop"
    assert stopped.tokens[3:].tolist() == response[: first + 1]
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[: first + 1], atol=1e-5)


def test_stop_in_the_last_place_is_a_stop(fp32) -> None:
    token = int(fp32.generate([request(0, (3, 1, 4), max_new_tokens=1)])[0].tokens[-1])
    ended = fp32.generate([request(0, (3, 1, 4), max_new_tokens=1, stop_token_ids=(token,))])[0]
    assert ended.finish_reason == "stop" and len(ended.logprobs) == 1


@pytest.mark.parametrize("temperature,top_p", [(1.0, 1.0), (0.6, 1.0), (1.3, 0.8)])
def test_forced_tokens_reproduce_sampled_logprobs(model, weights, temperature: float, top_p: float) -> None:
    engine = engine_of(model, quantized_bundle(weights, model))
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": 12}
    free = engine.generate([request(i, p, **sampling) for i, p in enumerate(PROMPTS)])
    again = [request(i, p, forced=tuple(free[i].tokens[len(p) :].tolist()), **sampling) for i, p in enumerate(PROMPTS)]
    for a, b in zip(engine.generate(again), free, strict=True):
        assert_same(a, b, atol=1e-6)


def test_forced_tokens_run_past_stop_tokens(fp32) -> None:
    run = fp32.generate([request(0, (1,), forced=(4, 5, 6), max_new_tokens=9, stop_token_ids=(5,))])[0]
    assert run.tokens.tolist() == [1, 4, 5, 6] and run.finish_reason == "length"
    run = fp32.generate([request(0, (1,), forced=(4, 5), max_new_tokens=9, stop_token_ids=(5,))])[0]
    assert run.tokens.tolist() == [1, 4, 5] and run.finish_reason == "stop"


def test_a_full_engine_queues_and_identical_prompts_share_pages(model, weights) -> None:
    engine = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32, num_pages=9)
    # 9 prompt tokens are 2 full pages and a part; 4 samples need 2 + 4 * 1 pages, unshared they would need 12.
    seen = []
    forward = engine._forward.forward

    def spy(batch, *args):
        seen.append((len(batch.tokens_T), len(batch.last_B), engine.health().pages_in_use))
        return forward(batch, *args)

    engine._forward.forward = spy
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    out = engine.generate([request(i, prompt, max_new_tokens=4) for i in range(4)])
    assert seen[0] == (9, 1, 6), "one sample is computed, the others copy"
    assert seen[1][:2] == (4, 4)
    assert len({tuple(t.tokens.tolist()) for t in out}) > 1
    assert engine.health().pages_in_use == 0


@pytest.mark.parametrize("quantized", [True, False], ids=["nvfp4", "none"])
def test_a_prefix_hit_computes_only_the_rest_and_gives_identical_tokens(model, weights, quantized: bool) -> None:
    bundle = quantized_bundle(weights, model) if quantized else plain_bundle(weights, dtype=torch.bfloat16)
    prompt = tuple(range(1, 19))
    engine, cold = engine_of(model, bundle), engine_of(model, bundle)
    engine.generate([request(0, prompt[:14])])
    computed = []
    forward = engine._forward.forward

    def spy(batch, *args):
        computed.append(len(batch.tokens_T))
        return forward(batch, *args)

    engine._forward.forward = spy
    warm = engine.generate([request(1, prompt)])[0]
    assert computed[0] == 18 - 12
    assert_same(warm, cold.generate([request(1, prompt)])[0], atol=1e-6)


def test_a_second_turn_continues_from_the_first(fp32, model, weights) -> None:
    first = fp32.generate([request(0, (1, 2, 3), max_new_tokens=10)])[0]
    prompt = (*first.tokens.tolist(), 7, 8)
    warm = fp32.generate([request(1, prompt)])[0]
    cold = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32).generate([request(1, prompt)])[0]
    assert_same(warm, cold)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(4, ()), "sample 4: prompt is empty"),
        (request(4, (1, 61)), "prompt holds token 61"),
        (request(4, (1,), forced=(-2,)), "forced_tokens holds token -2"),
        (request(4, (1,), forced=()), "0 forced_tokens"),
        (request(4, (1,), forced=(1, 2, 3), max_new_tokens=2), "3 forced_tokens"),
        (request(4, (1,), max_new_tokens=0), "max_new_tokens=0"),
        (request(4, (1,), temperature=-0.5), "temperature=-0.5"),
        (request(4, (1,), temperature=float("nan")), "temperature=nan"),
        (request(4, (1,), top_p=0.0), "top_p=0.0"),
        (request(4, (1,), top_p=1.5), "top_p=1.5"),
        (request(4, (1,), seed=-1), "seed=-1"),
        (request(4, (1,) * 250, max_new_tokens=7), "max_position_embeddings=256"),
        (request(4, (1,) * 200, max_new_tokens=6), "needs 205 KV slots, the engine has 204; raise num_pages"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_anything_runs(model, weights, bad, words: str) -> None:
    engine = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32, num_pages=51)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        engine.generate([request(0, (1, 2)), bad])
    assert engine.health().generated_tokens == 0 and engine.health().pages_in_use == 0


def test_a_request_that_just_fits_is_served(model, weights) -> None:
    engine = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32, num_pages=51)
    assert len(engine.generate([request(0, (1,) * 200, max_new_tokens=5)])[0].tokens) == 205


def test_sample_ids_must_be_unique(fp32) -> None:
    with pytest.raises(ValueError, match="sample_id=3 occurs twice"):
        fp32.generate([request(3, (1,)), request(4, (1,)), request(3, (2,))])


def test_an_error_midway_gives_back_pages_and_cached_halves(fp32, monkeypatch) -> None:
    forward = fp32._forward.forward
    calls = []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    fp32._forward.forward = failing
    with pytest.raises(KeyboardInterrupt):
        fp32.generate(requests())
    assert fp32.health().pages_in_use == 0
    fp32._forward.forward = forward
    assert len(fp32.generate(requests())) == len(PROMPTS)


def test_pause_resume_shutdown(model, weights) -> None:
    engine = engine_of(model)
    assert not engine.health().ok and engine.health().weight_version == -1
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.generate([request(0, (1,))])
    engine.update_weights(plain_bundle(weights, dtype=torch.bfloat16))
    engine.pause()
    assert engine.health().detail == "paused"
    with pytest.raises(RuntimeError, match="paused"):
        engine.generate([request(0, (1,))])
    engine.resume()
    assert len(engine.generate([request(0, (1,))])) == 1 and engine.generate([]) == []
    engine.shutdown()
    engine.shutdown()
    assert not engine.health().ok and engine.health().detail == "shut down"
    for call in (lambda: engine.generate([]), lambda: engine.update_weights(plain_bundle(weights, dtype=torch.bfloat16))):
        with pytest.raises(RuntimeError, match="shut down"):
            call()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"page_size": -1}, "page_size=-1"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"bf16_layers": (3,)}, "layer 3 is outside 0..2"),
    ],
)
def test_settings_that_cannot_work_are_refused(model, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_of(model, **settings)


def test_capture_of_an_unquantised_layer_is_refused(fp32) -> None:
    with pytest.raises(ValueError, match="layer 2 is not quantised"):
        fp32.generate([request(0, (1,))], capture=GuidanceSpec(bits=1, layers=(2,)))
