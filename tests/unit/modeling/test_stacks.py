"""Stacks that the configuration cannot describe, found by walking: dense layers, shared experts, MLA, linear attention, MTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tiny import tiny_config

from megatron_trace.guidance import frames
from megatron_trace.guidance.errors import LayerError
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.spec import GuidanceSpec, GuidedShape, RecordLayout
from megatron_trace.modeling import compat, parallel
from megatron_trace.modeling.build import (
    ModelOptions,
    attach_guidance,
    build_model,
    check_sites,
    core_attentions,
    local_layers,
    moe_layers,
    refresh_expert_weights,
    transformer_config,
)
from megatron_trace.modeling.core_attention import ExactCoreAttention
from megatron_trace.modeling.guided_moe import GuidedMoELayer, GuidedSequentialMLP
from megatron_trace.modeling.norms import SequenceParallelNorm
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import nvfp4
from megatron_trace.platform.device import megatron_context

MODEL = tiny_config()
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture(autouse=True)
def ready(lone_process: None) -> Iterator[None]:
    parallel.initialize(seed=0)
    probe.reset()
    yield
    frames.make_current(None)
    probe.reset()
    probe.keep_values = False


def built(changes: dict[str, Any] | None = None, **settings: Any) -> GPTModel:
    torch.manual_seed(0)
    with megatron_context():
        gpt = build_model(MODEL, dtype=torch.float32, changes=changes, **settings)
    return ready_to_round(gpt)


def ready_to_round(gpt: GPTModel) -> GPTModel:
    refresh_expert_weights(gpt)
    for attention in core_attentions(gpt):
        attention.static_amax = {"k": 4.0, "v": 4.0}
    return gpt


def run(gpt: GPTModel, rounding: Rounding = Rounding.NEAREST) -> torch.Tensor:
    n = TOKENS.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
    frames.make_current(GuidanceFrame(rounding, is_token=torch.ones(TOKENS.numel(), dtype=torch.bool)))
    with megatron_context():
        return gpt(TOKENS, torch.arange(n).expand_as(TOKENS), causal)


def rounded_sites(gpt: GPTModel) -> set[tuple[int, str]]:
    probe.keep_values = True
    run(gpt).sum().backward()
    return set(probe.kept)


def record_of(*layers: int, sites: tuple[str, ...] = ("fc1_in", "k", "v"), **shape: Any) -> RecordLayout:
    widths = GuidedShape(**{**vars(GuidedShape.of(MODEL)), **shape})
    return RecordLayout.build(GuidanceSpec(bits=1, layers=layers, sites=sites), widths)


@pytest.mark.parametrize("pattern", [[0, 1, 1], [1, 0, 1], [0, 0, 1]])
def test_dense_layers_have_k_and_v_and_global_numbers(pattern: list[int]) -> None:
    gpt = built({"moe_layer_freq": pattern})
    moe = {layer for layer, there in enumerate(pattern) if there}
    assert {m.layer_number - 1 for m in moe_layers(gpt)} == moe and local_layers(gpt) == (0, 1, 2)
    assert rounded_sites(gpt) == {(i, s) for i in range(3) for s in "kv"} | {(i, "fc1_in") for i in moe}
    check_sites(gpt, record_of(0, 1, 2, moe_layers=tuple(sorted(moe))))
    dense = pattern.index(0)
    with pytest.raises(LayerError, match=f"fc1_in in layer {dense}: that layer has no routed experts"):
        check_sites(gpt, record_of(dense))


def test_shared_experts_and_router_see_the_values_before_rounding() -> None:
    gpt = built({"moe_shared_expert_intermediate_size": 32})
    layer = next(moe_layers(gpt))
    seen: dict[str, torch.Tensor] = {}
    for name, module in (("shared", layer.shared_experts), ("router", layer.router), ("input", layer)):
        module.register_forward_pre_hook(lambda _m, args, name=name: seen.update({name: args[0].detach()}))
    original = layer.token_dispatcher.dispatch_preprocess
    layer.token_dispatcher.dispatch_preprocess = lambda h, *rest: (seen.update(routed=h.detach()), original(h, *rest))[1]
    run(gpt)
    assert torch.equal(seen["shared"], seen["input"]) and torch.equal(seen["router"], seen["input"])
    flat = seen["input"].reshape(-1, MODEL.hidden_size)
    expected = nvfp4.quantize(flat, scale_scope="row").dequantize(torch.float32)
    assert torch.equal(seen["routed"].reshape_as(flat), expected) and not torch.equal(expected, flat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0: dropped tokens make the loss depend"),
        ({"moe_token_dispatcher_type": "allgather"}, "moe_token_dispatcher_type='allgather'"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True"),
        ({"add_bias_linear": True}, "add_bias_linear=True"),
    ],
)
def test_settings_under_which_rows_and_tokens_part_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(changes)


def test_mla_is_guided_at_the_expert_input_only_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0.16 asks isinstance(..., TELinear) without Transformer Engine too, where that name is no type.
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            monkeypatch.setattr(multi_latent_attention, name, type(name, (), {}), raising=False)
    plain = vars(transformer_config(MODEL, dtype=torch.float32))
    fields = {n: plain[n] for n in MLATransformerConfig.__dataclass_fields__ if n in plain and plain[n] is not None}
    config = MLATransformerConfig(
        **fields
        | {
            "multi_latent_attention": True,
            "num_query_groups": MODEL.num_attention_heads,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 16,
            "v_head_dim": 16,
            "rope_type": "rope",
            "init_method": None,
            "output_layer_init_method": None,
        }
    )
    with megatron_context():
        # Megatron's own local core attention does not take MLA's head widths; this project's does.
        block = compat.decoder_block_spec(config, vp_stage=None, norm=SequenceParallelNorm, core_attention=ExactCoreAttention)
        gpt = GPTModel(
            config=config, transformer_layer_spec=block, vocab_size=61, max_sequence_length=64, position_embedding_type="rope"
        )
        attach_guidance(gpt)
    ready_to_round(gpt)
    assert isinstance(gpt.decoder.layers[0].self_attention, MLASelfAttention) and not list(core_attentions(gpt))
    check_sites(gpt, record_of(0, 1, 2, sites=("fc1_in",)))
    with pytest.raises(
        LayerError, match="k in layer 1: multi-latent attention caches a latent, not K and V; record fc1_in only"
    ):
        check_sites(gpt, record_of(1))
    assert rounded_sites(gpt) == {(i, "fc1_in") for i in range(3)}


class LinearAttention(MegatronModule):
    """Causal linear attention in torch: a running sum of k v^T, no KV cache."""

    def __init__(self, config: Any, submodules: Any = None, layer_number: int = 0, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.qkv = torch.nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q, k, v = self.qkv(hidden_states).chunk(3, dim=-1)
        state = (k.softmax(-1).unsqueeze(-1) * v.unsqueeze(-2)).cumsum(dim=0)
        return torch.einsum("sbh,sbhv->sbv", q.softmax(-1), state), None


def test_hybrid_stack_rounds_k_and_v_in_softmax_layers_only() -> None:
    config = transformer_config(MODEL, dtype=torch.float32)
    with megatron_context():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        linear = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm").layer_specs[0]
        linear.submodules.self_attention = ModuleSpec(module=LinearAttention)
        block.layer_specs = [linear, linear, block.layer_specs[2]]
        gpt = GPTModel(
            config=config, transformer_layer_spec=block, vocab_size=61, max_sequence_length=64, position_embedding_type="rope"
        )
        attach_guidance(gpt)
    ready_to_round(gpt)
    assert [a.layer for a in core_attentions(gpt)] == [2]
    check_sites(gpt, record_of(0, 1, 2, kv_layers=(2,)))
    with pytest.raises(LayerError, match="k in layer 0: that layer's LinearAttention is no softmax attention"):
        check_sites(gpt, record_of(0, 1, 2))
    assert rounded_sites(gpt) == {(i, "fc1_in") for i in range(3)} | {(2, "k"), (2, "v")}


def test_a_multi_token_prediction_head_stays_as_it_is() -> None:
    config = transformer_config(MODEL, dtype=torch.float32, changes={"mtp_num_layers": 1})
    with megatron_context():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block,
            mtp_block_spec=get_gpt_mtp_block_spec(config, block.layer_specs[-1], use_transformer_engine=False),
            vocab_size=61,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
        attach_guidance(gpt)
    head = list(gpt.mtp.modules())
    kinds = {kind: [type(m) for m in head if isinstance(m, kind)] for kind in (MoELayer, SequentialMLP, DotProductAttention)}
    assert all(found and set(found) == {kind} for kind, found in kinds.items()), kinds
    assert {type(m) for m in gpt.decoder.modules() if isinstance(m, MoELayer)} == {GuidedMoELayer}
    assert {type(m) for m in gpt.decoder.modules() if isinstance(m, SequentialMLP)} == {GuidedSequentialMLP}
    assert [a.layer for a in core_attentions(gpt)] == [0, 1, 2] and local_layers(gpt) == (0, 1, 2)


def test_both_weight_backwards_share_the_forward_and_the_weight_gradient() -> None:
    models = [built(options=ModelOptions(weight_backward=kind)) for kind in ("dequantized", "straight_through")]
    models[1].load_state_dict(models[0].state_dict())
    refresh_expert_weights(models[1])
    layers = [next(moe_layers(gpt)).experts for gpt in models]
    x, probs, counts = torch.randn(9, 64), torch.rand(9), torch.tensor([4, 0, 3, 2])
    frames.make_current(GuidanceFrame(Rounding.NEAREST))
    gradients, outputs = [], []
    for experts in layers:
        given = x.clone().requires_grad_()
        with megatron_context():
            out, _ = experts(given, counts, probs)
            outputs.append(out)
            gradients.append(torch.autograd.grad((out * x).sum(), [given, experts.local_experts[0].linear_fc2.weight]))
    assert torch.equal(*outputs)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(gradients[0][0], gradients[1][0], rtol=1e-3)
    # straight-through: fc2's input gradient is that of the master weight, here by hand for expert 3's two rows
    experts = layers[1]
    expert = experts.local_experts[3]
    rows = slice(7, 9)
    given = x[rows].clone().requires_grad_()
    q1, q2 = experts.quantized[3]
    gate, up = (given @ expert.linear_fc1.weight.T).chunk(2, dim=-1)
    used_gate, used_up = (x[rows] @ q1.dequantized.T).chunk(2, dim=-1)
    act = torch.nn.functional.silu(used_gate) * used_up
    d_act = (x[rows] * probs[rows, None]) @ expert.linear_fc2.weight
    sigmoid = torch.sigmoid(used_gate)
    d_gate = d_act * used_up * sigmoid * (1 + used_gate * (1 - sigmoid))
    d_up = d_act * torch.nn.functional.silu(used_gate)
    expected = torch.cat((d_gate, d_up), dim=-1) @ expert.linear_fc1.weight
    torch.testing.assert_close(gradients[1][0][rows], expected.detach(), rtol=1e-5, atol=1e-6)
    assert gate.shape == up.shape == act.shape
