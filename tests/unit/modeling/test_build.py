"""The built model against transformers and against an untouched Megatron model; BF16 layers; initial weights; routing ties."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from tiny import hf_model, random_weights, tiny_config
from trainers import PROMPTS, one_batch, relative_error, rollout, run_config, trainer_of

from megatron_trace.checkpoint import qwen3_moe
from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.modeling import parallel
from megatron_trace.modeling.build import (
    Fp32OutputLayer,
    attach_guidance,
    build_model,
    core_attentions,
    moe_layers,
    refresh_expert_weights,
    transformer_config,
)
from megatron_trace.modeling.init import load_hf, randomize
from megatron_trace.modeling.route_replay import KeyedRouteReplay, stable_topk
from megatron_trace.modeling.site_probe import probe
from megatron_trace.platform.device import megatron_context
from megatron_trace.trainer.refit import build_bundle

MODEL = tiny_config()
TOKENS = torch.tensor([p[:2] + (5, 17, 40, 2, 2, 9) for p in PROMPTS[:4]])


def logits(gpt: torch.nn.Module, tokens: torch.Tensor = TOKENS, frame: GuidanceFrame | None = None) -> torch.Tensor:
    """FP32 or BF16 [B, S, V]."""
    n = tokens.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
    frames.make_current(frame)
    try:
        with megatron_context(), torch.no_grad():
            return gpt(tokens, torch.arange(n).expand_as(tokens), causal)
    finally:
        frames.make_current(None)


def guided_gpt(model: ModelConfig, dtype: torch.dtype, weights: dict[str, torch.Tensor], **settings: object) -> GPTModel:
    parallel.initialize(seed=0)
    with megatron_context():
        gpt = build_model(model, dtype=dtype, **settings)
        load_hf(gpt, model, weights)
    gpt = gpt.to(dtype)
    refresh_expert_weights(gpt)
    return gpt


def untouched_gpt(model: ModelConfig, dtype: torch.dtype, weights: dict[str, torch.Tensor]) -> GPTModel:
    """Megatron's own model of the same configuration, without any of this project's classes."""
    parallel.initialize(seed=0)
    with megatron_context():
        gpt = GPTModel(
            config=transformer_config(model, dtype=dtype),
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=model.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
            ),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=int(model.rope_theta),
            share_embeddings_and_output_weights=model.tie_word_embeddings,
        )
        load_hf(gpt, model, weights)
    return gpt.to(dtype)


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
def test_unrounded_fp32_model_equals_transformers(changes: dict) -> None:
    model = tiny_config(**changes)
    weights = random_weights(model)
    ours = logits(guided_gpt(model, torch.float32, weights))
    theirs = hf_model(model, weights)(TOKENS).logits
    assert relative_error(ours, theirs) <= 1e-5
    assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() <= 1e-5 * theirs.abs().max()


def probability_after_fc2(self: SequentialMLP, x_RH: torch.Tensor, tokens: torch.Tensor, probs_R: torch.Tensor) -> tuple:
    """Stock experts, one documented change: the router probability multiplies the output of fc2."""
    outputs = []
    for expert, x, p in zip(self.local_experts, x_RH.split(tokens.tolist()), probs_R.split(tokens.tolist()), strict=True):
        gate, up = expert.linear_fc1(x)[0].chunk(2, dim=-1)
        outputs.append((expert.linear_fc2(F.silu(gate) * up)[0] * p.unsqueeze(-1)).to(x.dtype))
    return torch.cat(outputs), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_frame_is_megatron_bit_for_bit_but_for_the_two_documented_places(dtype: torch.dtype) -> None:
    weights = random_weights(MODEL)
    ours = logits(guided_gpt(MODEL, dtype, weights))
    stock = untouched_gpt(MODEL, dtype, weights)
    before = logits(stock)
    for module in stock.modules():
        if isinstance(module, SequentialMLP):
            module.forward = MethodType(probability_after_fc2, module)
    stock.output_layer.__class__ = Fp32OutputLayer
    assert ours.dtype is torch.float32 and torch.equal(ours, logits(stock))
    # and the two places only move a rounding
    assert before.dtype is dtype
    assert relative_error(ours, before.float()) < (1e-5 if dtype is torch.float32 else 0.05)


def test_guidance_adds_no_parameter_and_renames_none() -> None:
    weights = random_weights(MODEL)
    names = [n for n, _ in untouched_gpt(MODEL, torch.float32, weights).named_parameters()]
    assert [n for n, _ in guided_gpt(MODEL, torch.float32, weights).named_parameters()] == names


def test_experts_of_another_kind_are_refused() -> None:
    class OtherExperts(SequentialMLP):
        pass

    stock = untouched_gpt(MODEL, torch.float32, random_weights(MODEL))
    stock.decoder.layers[1].mlp.experts.__class__ = OtherExperts
    with pytest.raises(TypeError, match="experts of layer 2 are OtherExperts"):
        attach_guidance(stock)


def test_every_guided_part_knows_its_global_layer() -> None:
    gpt = guided_gpt(MODEL, torch.float32, random_weights(MODEL), bf16_layers=(1,))
    assert [(a.layer, a.quantizes) for a in core_attentions(gpt)] == [(0, True), (1, False), (2, True)]
    layers = list(moe_layers(gpt))
    assert [(m.layer_number - 1, m.quantizes, m.experts.quantizes) for m in layers] == [
        (0, True, True),
        (1, False, False),
        (2, True, True),
    ]
    assert [m.router.router_replay.layer for m in layers] == [0, 1, 2]


@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.WEIGHTS_ONLY])
def test_with_all_layers_in_bf16_a_quantised_frame_changes_nothing(rounding: Rounding) -> None:
    weights = random_weights(MODEL)
    kept = guided_gpt(MODEL, torch.bfloat16, weights, bf16_layers=(0, 1, 2))
    assert torch.equal(logits(kept, frame=GuidanceFrame(rounding)), logits(kept))
    quantized = guided_gpt(MODEL, torch.bfloat16, weights)
    for attention in core_attentions(quantized):
        attention.static_amax = {"k": 8.0, "v": 8.0}
    assert not torch.equal(logits(quantized, frame=GuidanceFrame(rounding)), logits(kept))


def test_a_bf16_layer_stays_out_of_bundle_record_and_counts() -> None:
    config = run_config(precision={"bf16_layers": [1]}, guidance={"layers": [0, 2]})
    trainer = trainer_of(config)
    bundle = build_bundle(trainer, quantized=True, contract_fingerprint=config.contract.fingerprint)
    in_layer_1 = [n for n in bundle.quantized if n.startswith("model.layers.1.")]
    plain = [n for n in bundle.plain if ".mlp.experts." in n]
    assert not in_layer_1 and len(plain) == 3 * MODEL.num_experts and {n.split(".")[2] for n in plain} == {"1"}
    assert {layer for layer, _ in bundle.kv_amax} == {0, 2}
    spec = GuidanceSpec(bits=4, layers=(0, 2))
    batch = one_batch(config, rollout(config, spec=spec, prompts=PROMPTS[:3]))
    probe.reset()
    probe.keep_values = True
    try:
        gap = (trainer.logprobs([batch])[0] - batch.behavior_logprobs).abs()[batch.mask]
    finally:
        probe.keep_values = False
    assert {layer for layer, _ in probe.kept} == {0, 2}
    assert set(probe.fallback_tokens.values()) == {0} and probe.guided_tokens["k"] == 2 * int(batch.frame.is_token.sum())
    assert gap.median() < 2e-6, "the engine left the same layer in BF16"
    probe.reset()


def test_initial_weights_depend_on_name_and_seed_only() -> None:
    def state(seed: int, model: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
        gpt = guided_gpt(model, torch.float32, random_weights(model))
        randomize(gpt, model, seed=seed)
        named = dict(gpt.named_parameters())
        return qwen3_moe.dense_to_hf(named, model) | qwen3_moe.experts_to_hf(named, model, range(model.num_experts))

    first, again, other = state(0), state(0), state(1)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert all(torch.equal(first[n], again[n]) for n in first) and not torch.equal(first[name], other[name])
    wider = state(0, tiny_config(num_experts=8))
    assert torch.equal(wider[name], first[name]), "an expert's weights do not depend on how many others there are"
    assert abs(float(first[name].std()) - 0.02) < 2e-3
    down = first["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert abs(float(down.std()) - 0.02 / (2 * MODEL.num_layers) ** 0.5) < 2e-3
    assert torch.equal(first["model.norm.weight"], torch.ones(MODEL.hidden_size))


def test_loading_names_what_has_no_counterpart() -> None:
    gpt = guided_gpt(MODEL, torch.float32, random_weights(MODEL))
    weights = random_weights(MODEL)
    del weights["model.layers.2.mlp.gate.weight"]
    with pytest.raises(KeyError, match="model.layers.2.mlp.gate.weight"):
        load_hf(gpt, MODEL, weights)
    with pytest.raises(ValueError, match="parameters without a counterpart: .*lm_head|output_layer"):
        load_hf(gpt, tiny_config(tie_word_embeddings=True), random_weights(MODEL))


def test_conversion_to_hugging_face_and_back_is_the_identity() -> None:
    model = tiny_config(num_attention_heads=8, num_key_value_heads=2)
    weights = random_weights(model)
    named = dict(guided_gpt(model, torch.float32, weights).named_parameters())
    back = qwen3_moe.dense_to_hf(named, model) | qwen3_moe.experts_to_hf(named, model, range(model.num_experts))
    assert back.keys() == weights.keys() == qwen3_moe.hf_shapes(model, range(model.num_experts)).keys()
    for name, tensor in weights.items():
        assert torch.equal(back[name], tensor), name
        assert qwen3_moe.hf_shapes(model, range(model.num_experts))[name] == tuple(tensor.shape)


def test_ties_go_to_the_lowest_expert() -> None:
    scores, ids = stable_topk(torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2)
    assert ids.tolist() == [[1, 2], [0, 1]] and scores.tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_group_limited_routing_is_left_to_megatron() -> None:
    frames.make_current(None)
    asked = []

    def default(scores: torch.Tensor, k: int, groups: int, group_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((k, groups, group_topk))
        return scores[:, :k], torch.arange(k).expand(len(scores), k)

    replay = KeyedRouteReplay(0)
    assert replay.get_replay_topk(torch.rand(3, 8), 2, 4, 1, default)[1].tolist() == [[0, 1]] * 3
    assert asked == [(2, 4, 1)]
