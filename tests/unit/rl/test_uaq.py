"""UAQ on real transformers models: function kept, INT8 codes kept, the update's gain measured; Eq. 13 and 14 by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_trace.rl.uaq import (
    NormalizedChange,
    apply_uaq,
    effective_update_gain,
    normalized_weight_quant_error,
    normalized_weight_update,
    uaq_plan,
)

TOKENS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Gains away from their initial value, weights large enough for routing to matter, small enough not to amplify rounding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.3 if "norm" in name else 0.1) * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def qwen3_moe() -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return randomise(Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, norm_topk_prob=True, **SMALL, **MOE)))


@pytest.fixture(scope="module")
def qwen3_next() -> torch.nn.Module:
    """Zero-centred norms, shared expert with its gate, output gate in q_proj, linear attention in three of four layers."""
    from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        num_hidden_layers=4,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        **SMALL,
        **MOE,
    )
    return randomise(Qwen3NextForCausalLM(config))


@pytest.fixture(scope="module")
def qwen2() -> torch.nn.Module:
    """Dense, with biases on q, k, v and a tied head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    small = {key: value for key, value in SMALL.items() if key != "head_dim"}
    return randomise(Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **small)))


def scaled_copy(model: torch.nn.Module, scale: float, zero_centered: bool) -> torch.nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(apply_uaq(model.state_dict(), scale=scale, zero_centered_norms=zero_centered))
    return other


@pytest.mark.parametrize("scale", [1.5, 2.0])
@pytest.mark.parametrize(("name", "zero_centered"), [("qwen3_moe", False), ("qwen3_next", True), ("qwen2", False)])
def test_logits_are_preserved(name: str, zero_centered: bool, scale: float, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    with torch.no_grad():
        before = model(TOKENS).logits
        after = scaled_copy(model, scale, zero_centered)(TOKENS).logits
    assert before.abs().max() > 0.5
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    if scale == 2.0 and not zero_centered:
        assert torch.equal(after, before)


def test_wrong_norm_convention_would_show(qwen3_next: torch.nn.Module) -> None:
    with torch.no_grad():
        difference = scaled_copy(qwen3_next, 1.5, False)(TOKENS).logits - qwen3_next(TOKENS).logits
    assert difference.abs().max() > 0.1


def test_leaving_out_the_router_would_show(qwen3_moe: torch.nn.Module) -> None:
    state = apply_uaq(qwen3_moe.state_dict(), scale=1.5)
    for name in state:
        if name.endswith("mlp.gate.weight"):
            state[name] = qwen3_moe.state_dict()[name]
    other = copy.deepcopy(qwen3_moe)
    other.load_state_dict(state)
    with torch.no_grad():
        assert (other(TOKENS).logits - qwen3_moe(TOKENS).logits).abs().max() > 1e-3


def int8_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric absmax codes per output channel, and the dequantised weight."""
    step = weight.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(weight / step)
    return codes, codes * step


def test_int8_codes_survive_the_scaling(qwen3_moe: torch.nn.Module) -> None:
    state = qwen3_moe.state_dict()
    divided = uaq_plan(state).divided
    assert len(divided) == 2 * 5
    for scale, allowed in ((2.0, 0.0), (0.25, 0.0), (1.5, 1e-3)):
        scaled = apply_uaq(state, scale=scale)
        for name in divided:
            changed = int8_per_channel(scaled[name])[0] != int8_per_channel(state[name])[0]
            assert changed.double().mean() <= allowed, (name, scale)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_update_gain_and_the_papers_ratio(qwen3_moe: torch.nn.Module, optimizer: str) -> None:
    """One step from equal functions: the function's weights move s times as far under Adam, s^2 under SGD."""
    scale = 1.5
    divided = sorted(uaq_plan(qwen3_moe.state_dict()).divided)
    updates, before = [], []
    for model in (copy.deepcopy(qwen3_moe), scaled_copy(qwen3_moe, scale, False)):
        parameters = dict(model.named_parameters())
        start = {name: parameters[name].detach().double().clone() for name in divided}
        step = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-30) if optimizer == "adam" else None
        step = step or torch.optim.SGD(model.parameters(), lr=0.05)
        model(TOKENS, labels=TOKENS).loss.backward()
        step.step()
        updates.append({name: parameters[name].detach().double() - start[name] for name in divided})
        before.append(start)
    gain = effective_update_gain(plain_update=updates[0], scaled_update=updates[1], scale=scale)
    assert gain == pytest.approx(scale if optimizer == "adam" else scale**2, rel=0.01)
    eq13 = [
        normalized_weight_update(start, {n: start[n] + change[n] for n in divided}).value
        for start, change in zip(before, updates, strict=True)
    ]
    eq14 = [normalized_weight_quant_error(start, {n: int8_per_channel(start[n])[1] for n in divided}).value for start in before]
    assert eq13[1] / eq13[0] == pytest.approx(gain**2, rel=0.01)
    assert eq14[1] / eq14[0] == pytest.approx(1.0, rel=1e-3)


def test_normalized_figures_by_hand_and_merged() -> None:
    before = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]])}
    after = {"a": torch.tensor([3.0, 5.0]), "b": torch.tensor([[0.0]])}
    whole = normalized_weight_update(before, after)
    assert whole.value == pytest.approx(2 / 26)
    parts = [normalized_weight_update({n: before[n]}, {n: after[n]}) for n in before]
    assert parts[0].merge(parts[1]) == whole
    with pytest.raises(ValueError, match="b: present in only one"):
        normalized_weight_update(before, {"a": after["a"]})
    with pytest.raises(ValueError, match="reference=0"):
        _ = NormalizedChange(change=0.0, reference=0.0).value


def layer(prefix: str, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = {
        "input_layernorm.weight": torch.ones(4),
        "post_attention_layernorm.weight": torch.ones(4),
        **{f"self_attn.{n}_proj.weight": torch.ones(4, 4) for n in "qkvo"},
        "mlp.gate.weight": torch.ones(2, 4),
        **{f"mlp.experts.{e}.{n}_proj.weight": torch.ones(4, 4) for e in (0, 1) for n in ("gate", "up", "down")},
        **{f"mlp.shared_expert.{n}_proj.weight": torch.ones(4, 4) for n in ("gate", "up", "down")},
        "mlp.shared_expert_gate.weight": torch.ones(1, 4),
    }
    return {f"{prefix}.{name}": tensor for name, tensor in {**weights, **extra}.items()}


def test_unfused_names_mtp_and_static_scales() -> None:
    tensors = {
        "model.embed_tokens.weight": torch.ones(3, 4),
        "model.norm.weight": torch.ones(4),
        "lm_head.weight": torch.ones(3, 4),
        **layer("model.layers.0", **{"mlp.experts.1.up_proj.input_scale": torch.tensor(2.0)}),
        **layer("mtp.layers.0"),
    }
    result = apply_uaq(tensors, scale=1.5)
    multiplied = {name for name, tensor in result.items() if torch.equal(tensor, tensors[name] * 1.5)}
    divided = {name for name, tensor in result.items() if torch.equal(tensor, tensors[name] / 1.5)}
    untouched = {name for name, tensor in result.items() if tensor is tensors[name]}
    assert len(multiplied) + len(divided) + len(untouched) == len(tensors)
    assert multiplied == {
        *(f"{p}.{n}_layernorm.weight" for p in ("model.layers.0", "mtp.layers.0") for n in ("input", "post_attention")),
        "model.layers.0.mlp.experts.1.up_proj.input_scale",
    }
    kinds = {name.split("layers.0.")[-1] for name in untouched}
    assert kinds == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "self_attn.o_proj.weight",
        "mlp.experts.0.down_proj.weight",
        "mlp.experts.1.down_proj.weight",
        "mlp.shared_expert.down_proj.weight",
    }
    assert result["mtp.layers.0.mlp.gate.weight"].dtype == torch.float32


def test_bfloat16_stays_bfloat16() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in layer("model.layers.3").items()}
    assert {tensor.dtype for tensor in apply_uaq(tensors, scale=1.5).values()} == {torch.bfloat16}


def test_doubtful_checkpoints_are_refused() -> None:
    good = layer("model.layers.0")
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"self_attn\.mystery_proj\.weight: not known to UAQ"):
        uaq_plan({**good, "model.layers.0.self_attn.mystery_proj.weight": one})
    with pytest.raises(ValueError, match="quantised already"):
        uaq_plan({**good, "model.layers.0.self_attn.q_proj.weight_scale": one})
    with pytest.raises(ValueError, match=r"dtype torch\.uint8"):
        apply_uaq({**good, "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4, dtype=torch.uint8)})
    without_norm = {name: tensor for name, tensor in good.items() if "input_layernorm" not in name}
    with pytest.raises(ValueError, match=r"input_layernorm\.weight: missing"):
        uaq_plan(without_norm)
    without_readers = {name: tensor for name, tensor in good.items() if "mlp" not in name}
    with pytest.raises(ValueError, match=r"post_attention_layernorm\.weight: no weight that reads it"):
        uaq_plan(without_readers)
    with pytest.raises(ValueError, match=r"scale=0\.0"):
        apply_uaq(good, scale=0.0)
