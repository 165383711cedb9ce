"""Guided K/V: what core attention is given is what numerics says, in the rows it should be, with gradients straight through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.spec import Column, RecordLayout
from megatron_trace.modeling.guided_attention import GuidedCoreAttention
from megatron_trace.modeling.site_probe import probe
from megatron_trace.modeling.sites import UncalibratedError
from megatron_trace.numerics import guided, nvfp4

S, B, G, D, LAYER = 3, 2, 2, 16, 4
T, K = S * B, G * D
AMAX = {"k": 6.0, "v": 3.0}


class Spy(torch.nn.Module):
    """Stands for core attention: keeps what it is called with and mixes it, so that all of it has a gradient."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, *, flag: int) -> torch.Tensor:
        self.seen = query, key, value, mask, flag
        return query.sum() + (2 * key).sum() + (3 * value).sum()


@pytest.fixture
def attention() -> Iterator[GuidedCoreAttention]:
    module = GuidedCoreAttention(Spy(), layer=LAYER)
    module.static_amax = dict(AMAX)
    probe.reset()
    yield module
    frames.make_current(None)
    probe.reset()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(S, B, 4, D), 1.5 * torch.randn(S, B, G, D), torch.randn(S, B, G, D)


def call(attention: GuidedCoreAttention, frame: GuidanceFrame | None, *qkv: torch.Tensor) -> torch.Tensor:
    frames.make_current(frame)
    return attention(*qkv, "mask", flag=7)


def frame_of(keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, amax_T: torch.Tensor) -> GuidanceFrame:
    """A whole-code record of ``keys`` and ``values`` with the static amax ``amax_T`` of each token."""
    columns, parts, start = [], [], 0
    for site, x in (("k", keys), ("v", values)):
        q = nvfp4.quantize(x.reshape(T, K), scale_scope="static", global_amax=amax_T[:, None])
        record = guided.make_record(q, bits=4)
        column = Column(layer=LAYER, site=site, width=K, start=start, code_bytes=K // 2, scale_bytes=K // 16, amax_bytes=0)
        columns.append(column)
        parts += [record.payload, record.block_scale.view(torch.uint8)]
        start = column.stop
    return GuidanceFrame(
        rounding=Rounding.GUIDED,
        layout=RecordLayout(bits=4, columns=tuple(columns)),
        rows=torch.cat(parts, dim=1),
        valid=valid,
        is_token=torch.ones(T, dtype=torch.bool),
        static_amax={(LAYER, site): amax_T for site in "kv"},
    )


def test_k_and_v_are_rounded_with_their_own_static_amax_and_the_query_is_not(attention) -> None:
    q, k, v = inputs()
    call(attention, GuidanceFrame(Rounding.NEAREST), q, k, v)
    seen_q, seen_k, seen_v, mask, flag = attention.inner.seen
    assert torch.equal(seen_q, q) and (mask, flag) == ("mask", 7)
    for seen, x, site in ((seen_k, k, "k"), (seen_v, v, "v")):
        expected = nvfp4.quantize(x.reshape(T, K), scale_scope="static", global_amax=torch.tensor(AMAX[site]))
        assert torch.equal(seen, expected.dequantize(torch.float32).view_as(x))
        assert not torch.equal(seen, x)


def test_valid_rows_follow_the_record_on_its_version_s_scale_others_their_own(attention) -> None:
    q, k, v = inputs()
    valid = torch.tensor([True, False, True, True, True, False])
    amax_T = torch.tensor([6.0, 6.0, 9.0, 9.0, 6.0, 6.0])  # rows of two weight versions
    frame = frame_of(k * 1.1, v * 0.9, valid, amax_T)
    call(attention, frame, q, k, v)
    for seen, x, site in zip(attention.inner.seen[1:3], (k, v), ("k", "v"), strict=True):
        x_TK = x.reshape(T, K)
        followed = guided.fake_quantize(x_TK, record=frame.record(LAYER, site))
        record = frame.record(LAYER, site)
        for t in range(T):
            own = nvfp4.quantize(x_TK[t], scale_scope="static", global_amax=torch.tensor(AMAX[site])).dequantize(torch.float32)
            row = type(record)(4, record.payload[t], record.block_scale[t], torch.tensor(float(amax_T[t])))
            expected = guided.fake_quantize(x_TK[t], record=row) if valid[t] else own
            assert torch.equal(seen.reshape(T, K)[t], expected), (site, t)
        assert not torch.equal(
            followed, nvfp4.quantize_dequantize(x_TK, scale_scope="static", global_amax=torch.tensor(AMAX[site]))
        )
    assert dict(probe.guided_tokens) == {"k": 4, "v": 4} and dict(probe.fallback_tokens) == {"k": 2, "v": 2}


def test_gradients_pass_straight_through(attention) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    call(
        attention, frame_of(k.detach() * 1.1, v.detach(), torch.ones(T, dtype=torch.bool), torch.full((T,), 6.0)), q, k, v
    ).backward()
    for x, factor in ((q, 1.0), (k, 2.0), (v, 3.0)):
        assert torch.equal(x.grad, torch.full_like(x, factor))


@pytest.mark.parametrize("rounding", [Rounding.BF16, Rounding.WEIGHTS_ONLY])
def test_nothing_is_rounded_when_activations_are_not(attention, rounding: Rounding) -> None:
    q, k, v = inputs()
    call(attention, GuidanceFrame(rounding), q, k, v)
    assert torch.equal(attention.inner.seen[1], k) and torch.equal(attention.inner.seen[2], v)


def test_bf16_layers_round_nothing_and_measure_nothing(attention) -> None:
    attention.quantizes = False
    q, k, v = inputs()
    call(attention, GuidanceFrame(Rounding.NEAREST), q, k, v)
    assert torch.equal(attention.inner.seen[1], k) and torch.equal(attention.inner.seen[2], v)
    assert attention.seen_amax == {"k": 0.0, "v": 0.0}


def test_range_is_that_of_real_tokens_and_grows_only(attention) -> None:
    q, k, v = inputs()
    k[2, 1], v[2, 1] = 100.0, -100.0  # token 2 * B + 1 = 5 is padding
    is_token = torch.tensor([True, True, True, True, True, False])
    call(attention, GuidanceFrame(Rounding.BF16, is_token=is_token), q, k, v)
    expected = {"k": float(k.reshape(T, K)[:5].abs().max()), "v": float(v.reshape(T, K)[:5].abs().max())}
    assert attention.seen_amax == expected
    call(attention, GuidanceFrame(Rounding.BF16, is_token=is_token), q, k * 0.5, v * 2)
    assert attention.seen_amax == {"k": expected["k"], "v": 2 * expected["v"]}


def test_quantising_before_calibration_is_an_error(attention) -> None:
    attention.static_amax = {}
    with pytest.raises(UncalibratedError, match="k of layer 4 has no static amax"):
        call(attention, GuidanceFrame(Rounding.NEAREST), *inputs())
