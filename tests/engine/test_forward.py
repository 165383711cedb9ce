"""Tokens and log-probabilities against transformers and against the slow reference; the pieces of the arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import Reference
from tiny import engine_of, hf_model, plain_bundle, quantized_bundle, random_weights, request, tiny_config

from megatron_trace.rollout.embedded.experts import grouped_matmul, route
from megatron_trace.rollout.embedded.model import attend, head_norm, rotate
from megatron_trace.rollout.protocol import Trajectory

PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3), (33,), (27, 9, 50, 28, 8, 41, 9, 7)]


def reported_minus(trajectory: Trajectory, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Reported log-probabilities minus those of full-sequence ``logits`` [n, V], whose row i predicts token i + 1."""
    tokens = torch.from_numpy(trajectory.tokens)
    logp = torch.log_softmax(logits[:-1].double() / temperature, -1).gather(1, tokens[1:, None])[:, 0]
    return torch.from_numpy(trajectory.logprobs) - logp[trajectory.prompt_length - 1 :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 8, "num_experts_per_tok": 4, "num_attention_heads": 8, "num_key_value_heads": 1},
        {"tie_word_embeddings": True, "head_dim": 32, "rope_theta": 777.0, "rms_norm_eps": 1e-3},
    ],
    ids=["default", "top4-mqa", "tied-theta-eps"],
)
@torch.no_grad()
def test_greedy_tokens_and_logprobs_equal_transformers(changes: dict) -> None:
    model = tiny_config(**changes)
    weights = random_weights(model)
    hf = hf_model(model, weights)
    engine = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32, max_batch_size=3)
    requests = [request(i, p, temperature=0.0, max_new_tokens=12) for i, p in enumerate(PROMPTS)]
    for trajectory, prompt in zip(engine.generate(requests), PROMPTS, strict=True):
        expected = hf.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        assert trajectory.tokens.tolist() == expected.tolist()
        assert reported_minus(trajectory, hf(expected[None]).logits[0]).abs().max() < 1e-4


@torch.no_grad()
def test_sampled_logprobs_equal_transformers_at_temperature(model, weights) -> None:
    hf = hf_model(model, weights)
    engine = engine_of(model, plain_bundle(weights, dtype=torch.float32), dtype=torch.float32)
    for trajectory in engine.generate([request(i, p, temperature=0.7) for i, p in enumerate(PROMPTS)]):
        logits = hf(torch.from_numpy(trajectory.tokens)[None]).logits[0]
        assert reported_minus(trajectory, logits, temperature=0.7).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quantized", [True, False], ids=["nvfp4", "none"])
def test_logprobs_equal_the_reference_implementation(model, weights, dtype: torch.dtype, quantized: bool) -> None:
    bundle = quantized_bundle(weights, model, dtype=dtype) if quantized else plain_bundle(weights, dtype=dtype)
    engine = engine_of(model, bundle, dtype=dtype)
    trajectories = engine.generate([request(i, p) for i, p in enumerate(PROMPTS)])
    reference = Reference(model, bundle, dtype)
    gaps = torch.cat([reported_minus(t, reference.logits(t.tokens.tolist())).abs() for t in trajectories])
    # Summation order may differ in the last FP32 bit; where that turns a rounding, one sample moves and the median does not.
    assert gaps.median() < 2e-6
    assert gaps.mean() < 0.02


def test_quantisation_changes_the_model(model, weights) -> None:
    forced = tuple(range(10, 20))
    settings = {"forced": forced, "max_new_tokens": 10}
    plain = engine_of(model, plain_bundle(weights, dtype=torch.bfloat16)).generate([request(0, PROMPTS[0], **settings)])[0]
    packed = engine_of(model, quantized_bundle(weights, model)).generate([request(0, PROMPTS[0], **settings)])[0]
    assert abs(plain.logprobs - packed.logprobs).mean() > 0.05


def test_bf16_layers_are_not_quantised(model, weights) -> None:
    bundle = quantized_bundle(weights, model, bf16_layers=(0, 1, 2))
    assert not bundle.quantized and not bundle.kv_amax
    kept = engine_of(model, bundle, quantization="nvfp4", bf16_layers=(0, 1, 2))
    plain = engine_of(model, plain_bundle(weights, dtype=torch.bfloat16))
    requests = [request(i, p) for i, p in enumerate(PROMPTS)]
    for a, b in zip(kept.generate(requests), plain.generate(requests), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
    mixed = engine_of(model, quantized_bundle(weights, model, bf16_layers=(1,)), bf16_layers=(1,))
    assert mixed.kv_bytes_per_token == 2 * 36 + 2 * 32 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_head_norm_is_rms_norm_bit_for_bit(dtype: torch.dtype) -> None:
    x, w = (torch.randn(50, 3, 16) * 4).to(dtype), torch.randn(3, 16).to(dtype)
    expected = torch.stack([F.rms_norm(x[:, n], (16,), w[n], 1e-6) for n in range(3)], dim=1)
    assert torch.equal(head_norm(x, w.float(), eps=1e-6), expected)


def test_rotate_rounds_both_products_and_the_sum() -> None:
    x = torch.randn(7, 2, 16).bfloat16()
    angle = torch.rand(7, 1, 8) * 6
    cos, sin = (torch.cat((f(angle), f(angle)), -1).bfloat16() for f in (torch.cos, torch.sin))
    out = rotate(x, cos, sin)
    a, b = x[..., :8].float(), x[..., 8:].float()
    c, s = cos[..., :8].float(), sin[..., :8].float()
    first = ((a * c).bfloat16().float() - (b * s).bfloat16().float()).bfloat16()
    second = ((b * c).bfloat16().float() + (a * s).bfloat16().float()).bfloat16()
    assert torch.equal(out, torch.cat((first, second), -1))


def test_attend_equals_scaled_dot_product_attention_in_fp32() -> None:
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    future = torch.arange(9) > torch.tensor([[2, 3, 4], [6, 7, 8]])[..., None]
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=~future[:, None], enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attend(q, k, v, future), expected, rtol=1e-5, atol=1e-6)


def test_route_breaks_ties_by_lowest_expert_and_renormalises() -> None:
    router = torch.eye(4)
    experts, weights = route(torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0]]), router, top_k=2)
    assert experts.tolist() == [[1, 2], [0, 1], [0, 2]]
    full = torch.tensor([3.0, 1.0, 2.0, 0.0]).softmax(0)
    torch.testing.assert_close(weights[2], full[[0, 2]] / full[[0, 2]].sum())
    assert weights[:2].flatten().tolist() == [0.5] * 4


def test_grouped_matmul_with_empty_groups() -> None:
    x, w = torch.randn(6, 8), torch.randn(4, 5, 8)
    out = grouped_matmul(x, w, [2, 0, 4, 0])
    torch.testing.assert_close(out, torch.cat((x[:2] @ w[0].T, x[2:] @ w[2].T)))
