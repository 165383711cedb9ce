"""Partial sums of tensor parallelism: exact in FP32, a BF16 all-reduce's difference in BF16."""

from __future__ import annotations

import pytest
import torch
from tiny import engine_of, plain_bundle, quantized_bundle, random_weights, request, tiny_config

from megatron_trace.numerics import nvfp4
from megatron_trace.rollout.embedded.experts import moe
from megatron_trace.rollout.embedded.model import row_parallel
from megatron_trace.rollout.embedded.recorder import Recorder

FORCED = tuple(range(5, 25))


def forced_logprobs(engine) -> torch.Tensor:
    prompts = [(1, 2, 3), (7, 8, 9, 10, 11), (20,)]
    requests = [request(i, p, forced=FORCED, max_new_tokens=20) for i, p in enumerate(prompts)]
    return torch.stack([torch.from_numpy(t.logprobs) for t in engine.generate(requests)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_fp32_partial_sums_change_nothing(model, weights, ranks: int) -> None:
    bundle = plain_bundle(weights, dtype=torch.float32)
    one, many = (forced_logprobs(engine_of(model, bundle, dtype=torch.float32, tensor_parallel=n)) for n in (1, ranks))
    torch.testing.assert_close(many, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantized", [True, False], ids=["nvfp4", "none"])
def test_bf16_partial_sums_are_close_but_not_equal(model, weights, quantized: bool) -> None:
    bundle = quantized_bundle(weights, model) if quantized else plain_bundle(weights, dtype=torch.bfloat16)
    one, two = (forced_logprobs(engine_of(model, bundle, tensor_parallel=n)) for n in (1, 2))
    gap = (one - two).abs()
    assert (gap > 0).float().mean() > 0.5
    assert gap.median() < 0.3


def test_row_parallel_is_a_bf16_all_reduce_in_rank_order() -> None:
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(7, 64).bfloat16()
    parts = [(x[:, i : i + 16].float() @ w[:, i : i + 16].float().T).bfloat16() for i in range(0, 64, 16)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(row_parallel(x, tuple(w.float().chunk(4, dim=-1))), expected)


def test_experts_share_one_row_scale_over_shards_and_combine_per_rank(model, weights) -> None:
    x = torch.randn(9, model.hidden_size).bfloat16()
    engine = engine_of(model, quantized_bundle(weights, model), tensor_parallel=2)
    layer = engine._weights.layers[1]
    idle = Recorder(model=model, num_slots=1, device=torch.device("cpu"))
    idle.begin(torch.zeros(len(x), dtype=torch.int64), 0)
    out = moe(x, layer, layer=1, top_k=2, recorder=idle)

    rounded = nvfp4.quantize(x, scale_scope="row").dequantize().float()
    probs, experts = (x.float() @ layer.router.T).topk(2)
    probs = probs.softmax(-1)
    ranks = torch.zeros(2, *x.shape)
    for t in range(len(x)):
        for e, p in sorted(zip(experts[t].tolist(), probs[t], strict=True), key=lambda pair: pair[0]):
            gate, up = (rounded[t] @ layer.fc1[e].T).bfloat16().chunk(2)
            act = nvfp4.quantize(torch.nn.functional.silu(gate) * up, scale_scope="row").dequantize().float()  # the whole row
            for rank, part in enumerate(act.chunk(2)):
                ranks[rank, t] += ((part @ layer.fc2[rank][e].T).bfloat16() * p.float()).bfloat16().float()
    expected = ranks[0].bfloat16() + ranks[1].bfloat16()
    assert (out == expected).float().mean() > 0.99
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("experts_per_token", [2, 4, 8])
def test_combination_equals_megatron_unpermute(experts_per_token: int) -> None:
    """Megatron-core adds with scatter_add_ in expert order; a CPU then sums a token's experts in FP32 and rounds once."""
    model = tiny_config(num_experts=8, num_experts_per_tok=experts_per_token)
    layer = engine_of(model, plain_bundle(random_weights(model), dtype=torch.bfloat16))._weights.layers[0]
    idle = Recorder(model=model, num_slots=1, device=torch.device("cpu"))
    idle.begin(torch.zeros(6, dtype=torch.int64), 0)
    x = torch.randn(6, model.hidden_size).bfloat16()
    out = moe(x, layer, layer=0, top_k=experts_per_token, recorder=idle)
    logits, experts = (x.float() @ layer.router.T).topk(experts_per_token)
    for t in range(6):
        total = torch.zeros(model.hidden_size)
        for e, p in sorted(zip(experts[t].tolist(), logits[t].softmax(-1), strict=True), key=lambda pair: pair[0]):
            gate, up = (x[t].float() @ layer.fc1[e].T).bfloat16().chunk(2)
            y = ((torch.nn.functional.silu(gate) * up).float() @ layer.fc2[0][e].T).bfloat16()
            total += (y * p.float().expand_as(y)).bfloat16().float()
        assert (out[t] == total.bfloat16()).float().mean() > 0.98


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 3, "tensor_parallel=3: must divide num_attention_heads=4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads=3"),
        ({"moe_intermediate_size": 48}, 2, "moe_intermediate_size=48 must be a multiple of 32"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(changes: dict, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_of(tiny_config(**changes), tensor_parallel=ranks)
