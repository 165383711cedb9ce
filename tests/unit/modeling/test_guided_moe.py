"""The guided MoE layer against its written-out reference: values, order of operations, gradients, replayed routes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import random_weights, tiny_config
from trainers import run_config, trainer_of

from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.modeling.build import moe_layers
from megatron_trace.modeling.guided_moe import GuidedMoELayer
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import guided, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord
from megatron_trace.platform.device import megatron_context

sys.path.insert(0, str(Path(__file__).parent))
from moe_reference import MoeReference  # noqa: E402

S, B, LAYER = 5, 2, 1
CLOSE = {"rtol": 2e-5, "atol": 1e-5}  # values are of the order of 1
MODEL = tiny_config()
WEIGHTS = random_weights(MODEL)


@pytest.fixture(scope="module")
def layer(lone_process: None) -> GuidedMoELayer:
    """Layer ``LAYER`` of a FP32 trainer."""
    trainer = trainer_of(run_config(precision={"compute_dtype": "float32"}), WEIGHTS)
    return list(moe_layers(trainer.gpt))[LAYER]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No test leaves a frame or counts behind."""
    probe.reset()
    yield
    frames.make_current(None)
    probe.reset()


def reference(**settings: bool) -> MoeReference:
    stem = f"model.layers.{LAYER}.mlp."
    experts = [
        [WEIGHTS[f"{stem}experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(MODEL.num_experts)
    ]
    return MoeReference(
        router=WEIGHTS[f"{stem}gate.weight"].clone().requires_grad_(),
        fc1=torch.stack([torch.cat((gate, up)) for gate, up, _ in experts]).requires_grad_(),
        fc2=torch.stack([down for _, _, down in experts]).requires_grad_(),
        top_k=MODEL.num_experts_per_tok,
        **settings,
    )


def hidden() -> torch.Tensor:
    """[S, B, H] with rows of different size, and what a rollout that saw slightly other values recorded for it."""
    return torch.randn(S, B, MODEL.hidden_size) * torch.linspace(0.5, 3, S * B).view(S, B, 1)


def frame_with_record(
    x_SBH: torch.Tensor,
    *,
    bits: int = 4,
    valid: torch.Tensor | None = None,
    rounding: Rounding = Rounding.GUIDED,
    noise: float = 0.05,
) -> tuple[GuidanceFrame, GuidanceRecord]:
    """A frame that holds what a rollout with other summation (here: relative ``noise``) recorded, and that record by itself."""
    x_TH = x_SBH.detach().reshape(S * B, -1)
    record = guided.make_record(nvfp4.quantize(x_TH * (1 + noise * torch.randn_like(x_TH)), scale_scope="row"), bits=bits)
    layout = RecordLayout.build(GuidanceSpec(bits=bits, layers=(LAYER,), sites=("fc1_in",)), MODEL)
    amax = record.global_amax.reshape(-1, 1).contiguous().view(torch.uint8)
    valid = torch.ones(S * B, dtype=torch.bool) if valid is None else valid
    rows = torch.cat((record.payload, record.block_scale.view(torch.uint8), amax), dim=1)
    frame = GuidanceFrame(
        rounding=rounding, layout=layout, rows=rows, valid=valid, is_token=torch.ones(S * B, dtype=torch.bool)
    )
    return frame, record


def run(layer: GuidedMoELayer, x_SBH: torch.Tensor, frame: GuidanceFrame | None) -> torch.Tensor:
    frames.make_current(frame)
    with megatron_context():
        out, bias = layer(x_SBH)
    assert bias is None
    return out.reshape(S * B, -1)


@pytest.mark.parametrize("bits", [1, 4])
def test_guided_forward_equals_the_reference(layer: GuidedMoELayer, bits: int) -> None:
    x = hidden()
    frame, record = frame_with_record(x, bits=bits)
    expected = reference().forward(x.reshape(S * B, -1), record)
    torch.testing.assert_close(run(layer, x, frame), expected, **CLOSE)
    nearest = reference().forward(x.reshape(S * B, -1))
    assert (nearest - expected).abs().max() > 1e-2, "the record must change something, or this test shows nothing"


def test_rounding_to_nearest_and_no_rounding(layer: GuidedMoELayer) -> None:
    x = hidden()
    x_TH = x.reshape(S * B, -1)
    torch.testing.assert_close(run(layer, x, GuidanceFrame(Rounding.NEAREST)), reference().forward(x_TH), **CLOSE)
    plain = reference(quantized=False).forward(x_TH)
    torch.testing.assert_close(run(layer, x, GuidanceFrame(Rounding.BF16)), plain, **CLOSE)
    torch.testing.assert_close(run(layer, x, None), plain, **CLOSE)


def test_weights_only_leaves_activations_alone(layer: GuidedMoELayer) -> None:
    x = hidden()
    rounded = reference()
    with torch.no_grad():
        rounded.fc1, rounded.fc2 = (torch.stack([rounded._weight(w) for w in ws]) for ws in (rounded.fc1, rounded.fc2))
    rounded.quantized = False
    expected = rounded.forward(x.reshape(S * B, -1))
    torch.testing.assert_close(run(layer, x, GuidanceFrame(Rounding.WEIGHTS_ONLY)), expected, **CLOSE)


def test_fc2_input_is_rounded_before_the_probability_is_applied(lone_process: None) -> None:
    """In BF16, where the order shows: with a row scale, rounding commutes with a factor but for the rounding of the product."""
    layer = list(moe_layers(trainer_of(run_config(), WEIGHTS).gpt))[LAYER]
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    expert = layer.experts.local_experts[2]
    gate_up, fc2_in, fc2_out = [], [], []
    expert.linear_fc1.register_forward_hook(lambda _m, _i, out: gate_up.append(out[0]))
    expert.linear_fc2.register_forward_hook(lambda _m, args, out: (fc2_in.append(args[0]), fc2_out.append(out[0]))[0])
    layer.experts.register_forward_hook(lambda _m, args, out: seen.append((*args, out[0])))
    run(layer, hidden().bfloat16(), GuidanceFrame(Rounding.NEAREST))

    _, tokens_per_expert, probs_R, out_RH = seen[0]
    rows = slice(int(tokens_per_expert[:2].sum()), int(tokens_per_expert[:3].sum()))
    gate, up = gate_up[0].chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) * up
    prob = probs_R[rows].unsqueeze(-1)
    assert rows.stop - rows.start > 1 and fc2_in[0].dtype is torch.bfloat16
    assert torch.equal(fc2_in[0], nvfp4.quantize(act, scale_scope="row").dequantize(torch.bfloat16))
    assert torch.equal(out_RH[rows], (fc2_out[0].float() * prob).bfloat16())
    codes, scaled_first = (nvfp4.quantize(a, scale_scope="row").codes for a in (act, (act * prob).bfloat16()))
    assert (codes != scaled_first).any(), "the other order must give other codes, or this test shows nothing"


def test_gradients_are_straight_through_and_reach_input_router_and_masters(layer: GuidedMoELayer) -> None:
    x = hidden().requires_grad_()
    frame, record = frame_with_record(x)
    oracle = reference()
    weight = torch.randn(S * B, MODEL.hidden_size)
    expected_x = x.detach().clone().requires_grad_()
    (oracle.forward(expected_x.reshape(S * B, -1), record) * weight).sum().backward()

    parameters = {name: p for name, p in layer.named_parameters()}
    with megatron_context():
        out = run(layer, x, frame)
        grads = torch.autograd.grad((out * weight).sum(), [x, *parameters.values()])
    found = dict(zip(parameters, grads[1:], strict=True))
    torch.testing.assert_close(grads[0], expected_x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["router.weight"], oracle.router.grad, rtol=1e-4, atol=1e-5)
    for e in range(MODEL.num_experts):
        for number in ("1", "2"):
            expected = getattr(oracle, f"fc{number}").grad[e]
            torch.testing.assert_close(
                found[f"experts.local_experts.{e}.linear_fc{number}.weight"], expected, rtol=1e-4, atol=1e-5
            )
            assert expected.abs().sum() > 0


def with_routes(frame: GuidanceFrame, routes: list[list[int]], valid: list[bool]) -> GuidanceFrame:
    """``routes`` for every layer; the frame's layers are looked up by number, so the others get routes that would be wrong."""
    routes_TLk = torch.full((S * B, MODEL.num_layers, MODEL.num_experts_per_tok), -1)
    routes_TLk[:, LAYER] = torch.tensor(routes)
    return GuidanceFrame(**{**vars(frame), "routes": routes_TLk, "routes_valid": torch.tensor(valid)})


def live_routes(x_SBH: torch.Tensor) -> list[list[int]]:
    logits = x_SBH.detach().reshape(S * B, -1) @ WEIGHTS[f"model.layers.{LAYER}.mlp.gate.weight"].T
    return torch.topk(logits, MODEL.num_experts_per_tok, dim=-1).indices.tolist()


def test_replayed_routes_override_live_ones_and_router_keeps_its_gradient(layer: GuidedMoELayer) -> None:
    x = hidden()
    others = [sorted(set(range(MODEL.num_experts)) - set(chosen)) for chosen in live_routes(x)]
    oracle = reference()
    weight = torch.randn(S * B, MODEL.hidden_size)
    expected = oracle.forward(x.reshape(S * B, -1), routes=others)
    (expected * weight).sum().backward()
    with megatron_context():
        out = run(layer, x, with_routes(GuidanceFrame(Rounding.NEAREST), others, [True] * (S * B)))
        (gradient,) = torch.autograd.grad((out * weight).sum(), [layer.router.weight])
    torch.testing.assert_close(out, expected, **CLOSE)
    assert oracle.router.grad.abs().sum() > 0
    torch.testing.assert_close(gradient, oracle.router.grad, rtol=1e-4, atol=1e-5)


def test_rows_without_a_valid_route_route_live(layer: GuidedMoELayer) -> None:
    x = hidden()
    live = live_routes(x)
    others = [sorted(set(range(MODEL.num_experts)) - set(chosen)) for chosen in live]
    valid = [t % 3 != 0 for t in range(S * B)]
    mixed = [o if v else chosen for o, v, chosen in zip(others, valid, live, strict=True)]
    out = run(layer, x, with_routes(GuidanceFrame(Rounding.NEAREST), others, valid))
    torch.testing.assert_close(out, reference().forward(x.reshape(S * B, -1), routes=mixed), **CLOSE)


def test_rows_without_a_valid_record_round_to_nearest_and_are_counted(layer: GuidedMoELayer) -> None:
    x = hidden()
    valid = torch.tensor([t % 4 != 1 for t in range(S * B)])
    frame, record = frame_with_record(x, valid=valid)
    out = run(layer, x, frame)
    x_TH = x.reshape(S * B, -1)
    guided_rows, nearest_rows = reference().forward(x_TH, record), reference().forward(x_TH)
    torch.testing.assert_close(out, torch.where(valid[:, None], guided_rows, nearest_rows), **CLOSE)
    assert (guided_rows - nearest_rows)[~valid].abs().max() > 1e-3
    assert dict(probe.guided_tokens) == {"fc1_in": int(valid.sum())} and dict(probe.fallback_tokens) == {
        "fc1_in": int((~valid).sum())
    }


def test_padding_is_not_counted(layer: GuidedMoELayer) -> None:
    x = hidden()
    frame, _ = frame_with_record(x, valid=torch.tensor([t < 7 for t in range(S * B)]))
    is_token = torch.tensor([t < 9 for t in range(S * B)])
    run(layer, x, GuidanceFrame(**{**vars(frame), "is_token": is_token}))
    assert (probe.guided_tokens["fc1_in"], probe.fallback_tokens["fc1_in"]) == (7, 2)


def test_middle_control_rounds_to_nearest_on_the_recorded_scale(layer: GuidedMoELayer) -> None:
    x = hidden()
    valid = torch.tensor([t != 3 for t in range(S * B)])
    frame, record = frame_with_record(x, valid=valid, rounding=Rounding.NEAREST_ON_ROLLOUT_SCALE, noise=0.3)
    x_TH = x.reshape(S * B, -1)
    on_scale = guided.nearest_on_record_scale(x_TH, record)
    own = nvfp4.quantize(x_TH, scale_scope="row").dequantize(torch.float32)
    assert (on_scale != own).any()
    seen = []
    original = layer.token_dispatcher.dispatch_preprocess
    layer.token_dispatcher.dispatch_preprocess = lambda h, *rest: (seen.append(h.reshape(S * B, -1)), original(h, *rest))[1]
    try:
        run(layer, x, frame)
    finally:
        del layer.token_dispatcher.dispatch_preprocess
    assert torch.equal(seen[0], torch.where(valid[:, None], on_scale, own))


def test_flips_are_counted_where_the_record_differs(layer: GuidedMoELayer) -> None:
    x = hidden()
    valid = torch.tensor([t != 0 for t in range(S * B)])
    frame, record = frame_with_record(x, valid=valid)
    run(layer, x, GuidanceFrame(**{**vars(frame), "measure_flips": True}))
    x_TH = x.reshape(S * B, -1)
    rollout, nearest = guided.record_codes(record)[valid], guided.nearest_codes(x_TH, record)[valid]
    count = probe.flip_counts["fc1_in"]
    assert count.values == rollout.numel()
    assert count.without_guidance == int((nearest != rollout).sum()) > 0
    assert count.with_guidance == int((guided.guided_codes(x_TH, record)[valid] != rollout).sum()) < count.without_guidance


def test_an_expert_without_tokens_has_zero_gradients_not_none(layer: GuidedMoELayer) -> None:
    x = hidden()
    frame = with_routes(GuidanceFrame(Rounding.NEAREST), [[0, 1]] * (S * B), [True] * (S * B))
    idle = [p for e in (2, 3) for p in layer.experts.local_experts[e].parameters()]
    with megatron_context():
        grads = torch.autograd.grad(run(layer, x, frame).sum(), idle)
    assert len(grads) == 4 and all(not g.any() for g in grads)


def test_quantised_forward_before_the_first_refresh_raises(layer: GuidedMoELayer) -> None:
    kept, layer.experts.quantized = layer.experts.quantized, []
    try:
        with pytest.raises(RuntimeError, match="never quantised"):
            run(layer, hidden(), GuidanceFrame(Rounding.NEAREST))
    finally:
        layer.experts.quantized = kept
