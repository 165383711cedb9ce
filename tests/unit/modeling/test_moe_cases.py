"""Public failures of MoE trainers (cases/moe.md); those that need several processes are in tests/dist."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny import random_weights, tiny_config
from trainers import run_config, trainer_of

from megatron_trace.guidance import frames
from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.guidance.frames import GuidanceFrame, HeadShare, Rounding
from megatron_trace.guidance.segments import RouteSegment
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.guidance.store import GuidanceStore, RowRequest
from megatron_trace.modeling.build import build_model, moe_layers
from megatron_trace.modeling.route_replay import KeyedRouteReplay, spread_routes
from megatron_trace.numerics import guided, nvfp4
from megatron_trace.platform.device import megatron_context

MODEL = tiny_config()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    frames.make_current(None)


def test_b05_b12_padding_is_spread_over_distinct_experts_and_leaves_real_rows_alone() -> None:
    scores = torch.tensor([[9.0, 8.0, 0.0, 0.0]]).expand(10, 4)
    is_token = torch.tensor([True] * 3 + [False] * 7)
    routes = torch.tensor([[2, 3]]).expand(10, 2).unsqueeze(1)
    frames.make_current(GuidanceFrame(Rounding.GUIDED, is_token=is_token, routes=routes, routes_valid=is_token))
    _, ids = KeyedRouteReplay(0).get_replay_topk(scores, 2, None, None, None)
    assert ids[:3].tolist() == [[2, 3]] * 3
    counts = torch.bincount(ids[3:].flatten(), minlength=4)
    assert int(counts.max() - counts.min()) <= 1 and all(a != b for a, b in ids[3:].tolist())


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 4), (7, 5, 3), (100, 512, 10)])
def test_b12_spread_routes_are_distinct_and_even(tokens: int, experts: int, k: int) -> None:
    ids = spread_routes(tokens, experts, k)
    assert all(len(set(row)) == k for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert int(counts.max() - counts.min()) <= 1


def test_b06_no_row_is_added_for_unaligned_counts(lone_process: None) -> None:
    layer = next(moe_layers(trainer_of(run_config(precision={"compute_dtype": "float32"})).gpt)).experts
    seen = []
    for expert in layer.local_experts:
        expert.linear_fc2.register_forward_pre_hook(lambda _m, args: seen.append(len(args[0])))
    frames.make_current(GuidanceFrame(Rounding.NEAREST))
    with megatron_context():
        out, _ = layer(torch.randn(21, 64), torch.tensor([1, 0, 17, 3]), torch.rand(21))
    assert seen == [1, 0, 17, 3] and out.shape == (21, 64)


def test_b07_a_route_with_a_repeated_expert_is_refused() -> None:
    experts = np.array([[[0, 1]], [[3, 3]]], dtype=np.uint8)
    store = GuidanceStore(contract_fingerprint="")
    versions = np.zeros(2, dtype=np.int32)
    store.put(None, RouteSegment(sample_id=4, experts=experts, valid=np.ones(2, dtype=bool), versions=versions))
    with pytest.raises(GuidanceError, match="the same expert twice"):
        store.frame([RowRequest(4, 2, np.full(2, -1))], seq_len=2, rounding=Rounding.NEAREST)


def test_b09_the_router_chooses_in_fp32_in_a_bf16_model(lone_process: None) -> None:
    trainer = trainer_of(run_config(), random_weights(MODEL))
    router = next(moe_layers(trainer.gpt)).router
    seen = []
    original = router.router_replay.get_replay_topk
    router.router_replay.get_replay_topk = lambda scores, *rest: (seen.append(scores), original(scores, *rest))[1]
    x = torch.randn(4, 2, 64).bfloat16()
    with megatron_context(), torch.no_grad():
        router(x)
    assert seen[0].dtype is torch.float32
    expected = x.reshape(8, 64).float() @ router.weight.float().T
    torch.testing.assert_close(seen[0], expected, rtol=1e-5, atol=1e-5)


def test_b11_a_balancing_bias_is_refused(lone_process: None) -> None:
    changes = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    with megatron_context(), pytest.raises(ValueError, match="moe_router_enable_expert_bias=True: the bias would be updated"):
        build_model(MODEL, dtype=torch.float32, changes=changes)


@pytest.mark.parametrize("parted", [False, True])
def test_b14_ids_above_255_survive_narrow_types_and_every_way_of_cutting(parted: bool) -> None:
    routes = torch.from_numpy(np.array([[[300, 511]], [[44, 256]], [[0, 255]], [[1, 510]]], dtype=np.uint16))
    frame = GuidanceFrame(
        Rounding.GUIDED,
        routes=routes,
        routes_valid=torch.ones(4, dtype=torch.bool),
        is_token=torch.ones(4, dtype=torch.bool),
        sequence_part=(2, 4) if parted else None,
    )
    ids, valid = frame.take(torch.tensor([3, -1, 0, 1])).at("fc1_in").routes_of(0)
    expected = [[1, 510], None, [300, 511], [44, 256]][2 if parted else 0 :]
    assert ids.dtype is torch.int64
    assert [row if ok else None for row, ok in zip(ids.tolist(), valid.tolist(), strict=True)] == expected


@pytest.mark.parametrize("bits", [1, 4])
def test_a_record_cut_by_head_and_by_token_is_the_record_of_the_cut_values(bits: int) -> None:
    """Six tokens, two KV heads of 32: the second head, tokens 4, padding, 1."""
    model = tiny_config(head_dim=32)
    layout = RecordLayout.build(GuidanceSpec(bits=bits, layers=(1,), sites=("fc1_in", "k", "v")), model)
    x, k = torch.randn(6, 64), torch.randn(6, 64)
    amax = torch.linspace(1, 2, 6)
    rows = torch.zeros(6, layout.row_bytes, dtype=torch.uint8)
    for site, values in (("fc1_in", x), ("k", k), ("v", k)):
        column = layout.column(1, site)
        scope = {"scale_scope": "row"} if site == "fc1_in" else {"scale_scope": "static", "global_amax": amax[:, None]}
        record = guided.make_record(nvfp4.quantize(values, **scope), bits=bits)
        parts = [record.payload, record.block_scale.view(torch.uint8)]
        parts += [record.global_amax.contiguous().view(torch.uint8)] if column.amax_bytes else []
        rows[:, column.start : column.stop] = torch.cat(parts, dim=1)
    frame = GuidanceFrame(
        Rounding.GUIDED,
        layout=layout,
        rows=rows,
        valid=torch.ones(6, dtype=torch.bool),
        static_amax={(1, "k"): amax, (1, "v"): amax},
        heads=HeadShare(first=1, count=1, head_dim=32),
    ).take(torch.tensor([4, -1, 1]))
    assert frame.valid.tolist() == [True, False, True]
    keys = frame.record(1, "k")
    kept = torch.tensor([4, 1])
    expected = guided.make_record(nvfp4.quantize(k[kept, 32:], scale_scope="static", global_amax=amax[kept, None]), bits=bits)
    assert torch.equal(keys.payload[[0, 2]], expected.payload) and torch.equal(keys.global_amax[[0, 2]], amax[kept, None])
    assert torch.equal(keys.block_scale.view(torch.uint8)[[0, 2]], expected.block_scale.view(torch.uint8))
    whole = frame.record(1, "fc1_in")
    expected = guided.make_record(nvfp4.quantize(x[kept], scale_scope="row"), bits=bits)
    assert torch.equal(whole.payload[[0, 2]], expected.payload)
