"""Syndromes: the code against its definition, decoding against what the rollout rounded, its place in frames and records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.guidance import syndrome
from megatron_trace.guidance.errors import GuidanceError, LayerError
from megatron_trace.guidance.frames import Rounding
from megatron_trace.guidance.segments import narrowed
from megatron_trace.guidance.spec import Column, GuidanceSpec, GuidedShape, RecordLayout
from megatron_trace.guidance.store import GuidanceStore, RowRequest
from megatron_trace.numerics import e2m1, guided, nvfp4
from megatron_trace.numerics.nvfp4 import NVFP4Tensor
from tests.unit.guidance_wire.factory import CONTRACT, SHAPE, layout, segment


def column_of(width: int, block_bits: int, *, static: bool = False) -> Column:
    spec = GuidanceSpec(
        bits="syndrome",
        layers=(0,),
        sites=("fc1_in",),
        syndrome_bits=block_bits,
        row_scaled=frozenset() if static else frozenset({"fc1_in"}),
    )
    return RecordLayout.build(spec, GuidedShape(1, width, 1, 16, 1, 16)).columns[0]


def rollout(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, NVFP4Tensor]:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, nvfp4.quantize(x, scale_scope="row")


def noisy(x: torch.Tensor, relative: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return (x.float() + relative * torch.randn(x.shape, generator=generator)).bfloat16()


@given(values=st.lists(st.integers(0, 511), min_size=1, max_size=9), bits=st.sampled_from([1, 3, 5, 9]))
def test_packing_is_a_bit_stream_lowest_bit_first(values: list[int], bits: int) -> None:
    values = [v % (1 << bits) for v in values]
    stream = sum(v << (i * bits) for i, v in enumerate(values))
    packed = syndrome.pack(torch.tensor([values]), bits)
    assert bytes(packed[0].tolist()) == stream.to_bytes(-(-len(values) * bits // 8), "little")
    assert syndrome.unpack(packed, bits, len(values))[0].tolist() == values


@pytest.mark.parametrize(("bits", "distance"), [(5, 4), (9, 6)])
def test_the_smallest_set_of_flips_that_no_syndrome_sees(bits: int, distance: int) -> None:
    """Minimum distance by exhaustion over all sets of 16 places."""
    columns = syndrome.columns_of(bits)
    seen, smallest = [0], 99
    for column in columns:
        seen += [word ^ column for word in seen]
    for mask, word in enumerate(seen):
        if mask and word == 0:
            smallest = min(smallest, mask.bit_count())
    assert smallest == distance and max(columns) < 1 << bits


@pytest.mark.parametrize("bits", [5, 9, 16])
def test_syndrome_bytes_are_those_of_the_definition(bits: int) -> None:
    _, q = rollout(3, 48)
    column = column_of(48, bits)
    data = syndrome.encode(q, column)
    columns = syndrome.columns_of(bits) if bits < 16 else [1 << i for i in range(16)]
    codes = e2m1.unpack(q.codes)
    for row in range(3):
        stream = 0
        for block in range(3):
            word = 0
            for i in range(16):
                word ^= columns[i] * (int(codes[row, 16 * block + i]) & 1)
            stream |= word << (bits * block)
        size = column.code_bytes
        assert bytes(data[row, :size].tolist()) == stream.to_bytes(size, "little")
        low = sum((int(s) & 7) << (3 * b) for b, s in enumerate(q.block_scale.view(torch.uint8)[row]))
        assert bytes(data[row, size : size + 2].tolist()) == low.to_bytes(2, "little")
        amax = data[row, size + 2 : size + 4].contiguous().view(torch.bfloat16)
        assert float(amax) == float(q.global_amax[row, 0])
    assert data.shape[-1] == column.size == size + 2 + 2 + 2


@pytest.mark.parametrize("bits", [5, 9, 16])
@pytest.mark.parametrize("width", [16, 576, 2048])
def test_the_same_values_decode_exactly_and_verified(bits: int, width: int) -> None:
    x, q = rollout(40, width)
    column = column_of(width, bits)
    decoded = syndrome.decode(x, syndrome.encode(q, column), column)
    expected = guided.make_record(q, bits=1)
    assert torch.equal(decoded.record.payload, expected.payload)
    assert torch.equal(decoded.record.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
    assert torch.equal(decoded.record.global_amax, expected.global_amax)
    assert not decoded.unverified.any() and not decoded.retried.any()


@pytest.mark.parametrize(
    ("bits", "noise", "limit"), [(5, 0.005, 0.0001), (5, 0.01, 0.0005), (9, 0.01, 0.0001), (9, 0.02, 0.003)]
)
def test_noise_is_decoded_away(bits: int, noise: float, limit: float) -> None:
    """Nearest rounding differs in 1.6, 3.3 and 6.6% of codes at these noises (reference/literature.md 1.3)."""
    x, q = rollout(200, 2048)
    column = column_of(2048, bits)
    ours = noisy(x, noise)
    decoded = syndrome.decode(ours, syndrome.encode(q, column), column)
    truth = guided.record_codes(guided.make_record(q, bits=4))
    nearest = float((guided.nearest_codes(ours, guided.make_record(q)) != truth).float().mean())
    left = float((guided.guided_codes(ours, decoded.record) != truth).float().mean())
    assert nearest > 2.5 * noise and left < limit
    assert torch.equal(decoded.record.block_scale.view(torch.uint8), q.block_scale.view(torch.uint8))


def test_unverified_chunks_are_those_that_are_wrong() -> None:
    """A checksum of 16 bits misses one wrong chunk in 65,536, and retries are accepted by it alone."""
    x, q = rollout(300, 1024)
    column = column_of(1024, 5)
    decoded = syndrome.decode(noisy(x, 0.018), syndrome.encode(q, column), column)
    wrong = (
        (guided.unpack_bits(decoded.record.payload) != guided.unpack_bits(guided.make_record(q).payload))
        .view(300, 2, 512)
        .any(-1)
    )
    assert 0.05 < wrong.float().mean() < 0.95 and decoded.retried.any()
    assert (wrong == decoded.unverified).float().mean() > 0.985
    assert not (decoded.unverified & ~wrong).any(), "what decodes right is never called unverified"
    assert not (decoded.unverified & decoded.retried).any()


def test_dead_blocks_saturated_values_and_static_scale() -> None:
    x = torch.randn(6, 64).bfloat16()
    x[0] = 0
    x[1, :16] = 0
    x[2, 16:32] *= 1e-7  # the block scale underflows
    q = nvfp4.quantize(x, scale_scope="static", global_amax=torch.tensor(1.5))
    column = column_of(64, 5, static=True)
    assert column.amax_bytes == 0
    decoded = syndrome.decode(x, syndrome.encode(q, column), column, static_amax=torch.full((6, 1), 1.5))
    assert torch.equal(decoded.record.payload, guided.make_record(q).payload) and not decoded.unverified.any()


def test_scales_some_steps_apart_are_recovered() -> None:
    """The rollout's byte within 3 steps of the trainer's own, up or down, is named by its low 3 bits."""
    x, q = rollout(50, 256)
    own = q.block_scale.view(torch.uint8).int()
    for shift in range(-3, 5):
        sent = (own + shift).clamp(0, 0x7E)
        got = syndrome._recover_scale(x, q.global_amax, sent & 7).view(torch.uint8).int()
        inside = (own + shift > 0) & (own + shift < 0x7B)
        assert torch.equal(got[inside], sent[inside])


@pytest.mark.parametrize(("noise", "bits"), [(0.013, 5), (0.018, 9), (0.04, 16)])
def test_the_code_follows_the_measured_noise_and_leaves_at_most_half_a_percent(noise: float, bits: int) -> None:
    x, q = rollout(120, 2048)
    ours, truth = noisy(x, noise), guided.record_codes(guided.make_record(q, bits=4))
    rate = float((guided.nearest_codes(ours, guided.make_record(q)) != truth).float().mean())
    assert syndrome.code_for(rate) == bits
    column = column_of(2048, bits)
    decoded = syndrome.decode(ours, syndrome.encode(q, column), column)
    assert float((guided.guided_codes(ours, decoded.record) != truth).float().mean()) < 0.005


def test_an_amax_that_is_no_bf16_value_is_refused() -> None:
    q = nvfp4.quantize(torch.randn(4, 32), scale_scope="row")
    with pytest.raises(ValueError, match="row amax as BF16"):
        syndrome.encode(q, column_of(32, 5))


def test_frames_decode_against_the_trainers_values_and_count() -> None:
    whole = segment(8, shape=layout(4, layers=(1,)), versions=[0] * 8)
    rng = torch.Generator().manual_seed(3)
    x = {c.site: torch.randn(8, c.width, generator=rng).bfloat16() for c in whole.layout}
    rows = whole.rows.copy()
    for c in whole.layout:
        static = None if c.amax_bytes else torch.tensor(whole.static_amax[0][1, c.site])
        q = nvfp4.quantize(x[c.site], scale_scope="row" if static is None else "static", global_amax=static)
        parts = [q.codes, q.block_scale.view(torch.uint8)] + ([q.global_amax.view(torch.uint8)] if c.amax_bytes else [])
        rows[:, c.start : c.stop] = torch.cat(parts, -1).numpy()
    full = replace(whole, rows=rows)
    small = narrowed(full, layout("syndrome", layers=(1,)))
    assert small.layout.row_bytes < full.layout.row_bytes / 3

    def frame_of(held) -> object:  # noqa: ANN001
        store = GuidanceStore(contract_fingerprint=CONTRACT)
        store.put(held, None)
        return store.frame([RowRequest(7, 6, np.full(6, -1))], seq_len=7, rounding=Rounding.GUIDED)

    ours = {site: torch.cat((noisy(v, 0.005)[:6], torch.zeros(1, v.shape[-1]).bfloat16())) for site, v in x.items()}
    exact, coded = frame_of(narrowed(full, layout(1, layers=(1,)))), frame_of(small)
    for site, values in ours.items():
        want, got = exact.record(1, site), coded.record(1, site, values)
        assert torch.equal(got.payload[:6], want.payload[:6]) and torch.equal(got.global_amax[:6], want.global_amax[:6])
        assert got.valid.tolist() == [True] * 6 + [False]
    counts = coded.decode_counts
    assert (counts.chunks, counts.unverified) == (18, 0)
    with pytest.raises(TypeError, match="record of k in layer 1 is a syndrome"):
        coded.record(1, "k")
    with pytest.raises(LayerError, match="record of 64 values, x has 128"):
        coded.record(1, "fc1_in", ours["k"])
    with pytest.raises(GuidanceError, match="from whole codes"):
        narrowed(narrowed(full, layout(1, layers=(1,))), layout("syndrome", layers=(1,)))
    assert SHAPE.hidden_size == 64
