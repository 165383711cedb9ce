"""A refit is complete or refused, its bytes are kept and acknowledged, and it forgets every cached prefix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import engine_of, plain_bundle, quantized_bundle, random_weights, request, tiny_config

from megatron_trace.rollout.protocol import RefitBundle
from megatron_trace.rollout.refit_digest import digest_bundle

EXPERT = "model.layers.1.mlp.experts.2."


def without(mapping: dict, key) -> dict:
    return {k: v for k, v in mapping.items() if k != key}


def altered(bundle: RefitBundle, name: str, **changes) -> RefitBundle:
    return replace(bundle, quantized=bundle.quantized | {name: replace(bundle.quantized[name], **changes)})


def spoilt(b: RefitBundle) -> dict[str, tuple[RefitBundle, str]]:
    """Each kind of bad bundle with the words its refusal must hold."""
    gate, down, norm = f"{EXPERT}gate_proj.weight", f"{EXPERT}down_proj.weight", "model.norm.weight"
    packed = b.quantized[down]
    plain = {**b.plain}
    return {
        "fingerprint": (replace(b, contract_fingerprint="other"), "contract_fingerprint='other'"),
        "same version": (replace(b, version=1), "version=1: must be above the version being served, 1"),
        "older version": (replace(b, version=0), "version=0"),
        "negative version": (replace(b, version=-7), "version=-7"),
        "missing plain": (replace(b, plain=without(plain, norm)), f"missing parameter {norm}"),
        "missing expert": (replace(b, quantized=without(dict(b.quantized), down)), f"missing parameter {down}"),
        "unknown": (replace(b, plain=plain | {"model.layers.0.mlp.experts.gate_up_proj": plain[norm]}), "unknown parameter"),
        "no such expert": (
            replace(b, quantized=b.quantized | {"model.layers.1.mlp.experts.4.down_proj.weight": packed}),
            "unknown parameter model.layers.1.mlp.experts.4",
        ),
        "both ways": (replace(b, plain=plain | {down: torch.zeros(64, 64).bfloat16()}), "both plain and quantised"),
        "expert not quantised": (
            replace(b, plain=plain | {down: torch.zeros(64, 64).bfloat16()}, quantized=without(dict(b.quantized), down)),
            "must arrive as NVFP4",
        ),
        "norm quantised": (
            replace(b, plain=without(plain, norm), quantized=b.quantized | {norm: packed}),
            f"{norm} is quantised; it must arrive in torch.bfloat16",
        ),
        "plain shape": (replace(b, plain=plain | {norm: torch.ones(63).bfloat16()}), r"\[63\], must be torch.bfloat16\[64\]"),
        "plain dtype": (replace(b, plain=plain | {norm: torch.ones(64)}), r"torch.float32\[64\], must be torch.bfloat16"),
        "codes shape": (altered(b, gate, codes=packed.codes[:, :-1]), "gate_proj.weight codes is"),
        "codes dtype": (altered(b, gate, codes=packed.codes.view(torch.int8)), "codes is torch.int8"),
        "scale dtype": (altered(b, gate, block_scale=packed.block_scale.view(torch.uint8)), "block_scale is torch.uint8"),
        "amax shape": (altered(b, gate, global_amax=packed.global_amax.reshape(1)), "global_amax is"),
        "amax nan": (altered(b, down, global_amax=torch.tensor(float("nan"))), "global_amax=nan"),
        "gate and up differ": (altered(b, gate, global_amax=torch.tensor(99.0)), "one pair with one FP32 scale"),
        "kv amax missing": (replace(b, kv_amax=without(dict(b.kv_amax), (1, "v"))), r"missing \(layer, site\) \(1, 'v'\)"),
        "kv amax unknown": (replace(b, kv_amax=b.kv_amax | {(3, "k"): 1.0}), r"unknown \(layer, site\) \(3, 'k'\)"),
        "kv amax zero": (replace(b, kv_amax=b.kv_amax | {(1, "v"): 0.0}), "must be finite and positive"),
    }


CASES = list(spoilt(quantized_bundle(random_weights(tiny_config()), tiny_config(), version=2)))


@pytest.mark.parametrize("case", CASES)
def test_a_bad_bundle_is_refused_and_the_old_weights_keep_serving(model, weights, case: str) -> None:
    engine = engine_of(model, quantized_bundle(weights, model, version=1))
    before = engine.generate([request(0, (1, 2, 3))])[0]
    bundle, words = spoilt(quantized_bundle(random_weights(model, seed=1), model, version=2))[case]
    with pytest.raises(ValueError, match=words):
        engine.update_weights(bundle)
    assert engine.health().weight_version == 1
    after = engine.generate([request(0, (1, 2, 3))])[0]
    assert after.tokens.tolist() == before.tokens.tolist() and after.logprobs.tolist() == before.logprobs.tolist()


def test_a_tied_head_given_twice_is_refused() -> None:
    model = tiny_config(tie_word_embeddings=True)
    weights = random_weights(model)
    engine = engine_of(model, plain_bundle(weights, dtype=torch.bfloat16))
    twice = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    with pytest.raises(ValueError, match="alias of model.embed_tokens.weight"):
        engine.update_weights(plain_bundle(twice, dtype=torch.bfloat16, version=2))


def test_the_acknowledged_digest_is_that_of_the_bytes_sent(model, weights) -> None:
    bundle = quantized_bundle(weights, model)
    engine = engine_of(model)
    quantised = engine_of(model, quantization="nvfp4")
    ack = quantised.update_weights(bundle)
    assert ack.success and ack.version == 1 and ack.digest == digest_bundle(bundle)
    plain = plain_bundle(weights, dtype=torch.bfloat16)
    assert engine.update_weights(plain).digest == digest_bundle(plain) != ack.digest


def test_the_digest_sees_every_byte_name_and_amax(model, weights) -> None:
    bundle = quantized_bundle(weights, model)
    name = f"{EXPERT}up_proj.weight"
    codes = bundle.quantized[name].codes.clone()
    codes[3, 5] ^= 16
    moved = dict(bundle.plain)
    moved["a"] = moved.pop("model.norm.weight")
    others = [
        altered(bundle, name, codes=codes),
        replace(bundle, kv_amax=bundle.kv_amax | {(0, "k"): 8.000001}),
        replace(bundle, plain=moved),
        replace(bundle, plain=bundle.plain | {"model.norm.weight": bundle.plain["model.norm.weight"].neg()}),
    ]
    digests = {digest_bundle(b) for b in (bundle, *others)}
    assert len(digests) == 5
    reordered = replace(bundle, plain=dict(reversed(bundle.plain.items())))
    assert digest_bundle(reordered) == digest_bundle(bundle)


def test_the_engine_keeps_copies_of_its_own(model, weights) -> None:
    bundle = quantized_bundle(weights, model)
    engine = engine_of(model, bundle)
    before = engine.generate([request(0, (1, 2, 3))])[0]
    for tensor in bundle.plain.values():
        tensor.zero_()
    for weight in bundle.quantized.values():
        weight.codes.zero_()
    assert engine.generate([request(0, (1, 2, 3))])[0].logprobs.tolist() == before.logprobs.tolist()


@pytest.mark.parametrize("quantized", [True, False], ids=["nvfp4", "none"])
def test_after_a_refit_nothing_old_is_served(model, weights, quantized: bool) -> None:
    """The prompt's pages were cached under the old weights; the answer must be that of an engine that never saw them."""

    def bundle(seed: int, version: int, amax: float) -> RefitBundle:
        w = random_weights(model, seed=seed)
        if quantized:
            return quantized_bundle(w, model, version=version, kv_amax=amax)
        return plain_bundle(w, dtype=torch.bfloat16, version=version)

    prompt = tuple(range(1, 30))
    engine = engine_of(model, bundle(0, 1, 8.0))
    old = engine.generate([request(0, prompt)])[0]
    engine.update_weights(bundle(1, 2, 6.0))
    new = engine.generate([request(0, prompt)])[0]
    fresh = engine_of(model, bundle(1, 2, 6.0)).generate([request(0, prompt)])[0]
    assert new.tokens.tolist() == fresh.tokens.tolist() and new.logprobs.tolist() == fresh.logprobs.tolist()
    assert not np.array_equal(new.logprobs, old.logprobs) and new.token_versions.tolist() == [2] * 8


def test_kv_amax_takes_part_in_the_forward(model, weights) -> None:
    runs = [
        engine_of(model, quantized_bundle(weights, model, kv_amax=amax)).generate([request(0, (1, 2, 3), forced=(4, 5, 6))])[0]
        for amax in (8.0, 1.0)
    ]
    assert not np.array_equal(runs[0].logprobs, runs[1].logprobs)
