"""Bytes of a record, against the paper's figures and a sum written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.guidance.spec import GuidanceSpec, GuidedShape, RecordLayout, bytes_per_token, latter_half, rollout_bytes

STATIC: frozenset[str] = frozenset()


def qwen(layers: int, hidden: int, intermediate: int) -> GuidedShape:
    """A hybrid stack with softmax attention in every fourth layer, 2 KV heads of 256, top-8 (reference/literature.md 1.4)."""
    return GuidedShape(
        num_layers=layers,
        hidden_size=hidden,
        num_key_value_heads=2,
        head_dim=256,
        num_experts_per_tok=8,
        moe_intermediate_size=intermediate,
        kv_layers=tuple(range(3, layers, 4)),
    )


QWEN_35B, QWEN_122B = qwen(40, 2048, 512), qwen(48, 3072, 1024)


def spec(shape: GuidedShape, bits: int | str, *, whole: bool, **changes: object) -> GuidanceSpec:
    layers = tuple(range(shape.num_layers)) if whole else latter_half(shape.num_layers)
    return GuidanceSpec(bits=bits, layers=layers, **({"row_scaled": STATIC} | changes))


@pytest.mark.parametrize(
    ("shape", "bits", "whole", "fc1", "kv"),
    [
        (QWEN_35B, 4, True, 46_080, 5_760),
        (QWEN_35B, 1, False, 7_680, 960),
        (QWEN_122B, 4, True, 82_944, 6_912),
        (QWEN_122B, 1, False, 13_824, 1_152),
    ],
)
def test_published_bytes_per_token(shape: GuidedShape, bits: int, whole: bool, fc1: int, kv: int) -> None:
    got = bytes_per_token(spec(shape, bits, whole=whole), shape)
    assert got == {"fc1_in": fc1, "k": kv // 2, "v": kv // 2}
    assert RecordLayout.build(spec(shape, bits, whole=whole), shape).row_bytes == fc1 + kv


def test_published_totals_and_ratio() -> None:
    full, compact = spec(QWEN_35B, 4, whole=True), spec(QWEN_35B, 1, whole=False)
    one = {"samples": 1, "tokens": 1}
    assert rollout_bytes(full, QWEN_35B, **one) == 51_840 and rollout_bytes(compact, QWEN_35B, **one) == 8_640
    assert 51_840 / 8_640 == 6.0
    everything = rollout_bytes(full, QWEN_35B, samples=4096, tokens=1 << 18)
    assert round(everything / 2**40, 1) == 50.6 and everything == 51_840 << 30
    assert rollout_bytes(spec(QWEN_122B, 4, whole=True), QWEN_122B, **one) == 89_856
    assert rollout_bytes(spec(QWEN_122B, 1, whole=False), QWEN_122B, **one) == 14_976


@pytest.mark.parametrize("bits", [1, 4])
def test_row_scale_adds_four_bytes_per_token_layer_and_site_and_kv_head(bits: int) -> None:
    static = bytes_per_token(spec(QWEN_35B, bits, whole=True), QWEN_35B)
    fc1 = bytes_per_token(spec(QWEN_35B, bits, whole=True, row_scaled=frozenset({"fc1_in"})), QWEN_35B)
    every = bytes_per_token(spec(QWEN_35B, bits, whole=True, row_scaled=frozenset({"fc1_in", "k", "v"})), QWEN_35B)
    assert fc1["fc1_in"] - static["fc1_in"] == 4 * 40 and fc1["k"] == static["k"]
    assert every["k"] - static["k"] == every["v"] - static["v"] == 4 * 10 * 2


def test_fc2_inputs_are_one_row_per_chosen_expert() -> None:
    with_fc2 = spec(QWEN_35B, 4, whole=True, sites=("fc1_in", "k", "v", "fc2_in"), row_scaled=frozenset({"fc2_in"}))
    extra = bytes_per_token(with_fc2, QWEN_35B)["fc2_in"]
    assert extra == 40 * (8 * 512 * 9 // 16 + 4 * 8)
    assert extra - 4 * 8 * 40 == 90 * 1024, "reference/literature.md 1.4: 90 KiB a token"


def test_syndrome_takes_at_most_six_tenths_of_a_bit_per_value_on_the_35b_model() -> None:
    everything = spec(QWEN_35B, "syndrome", whole=True, row_scaled=frozenset({"fc1_in"}))
    got = bytes_per_token(everything, QWEN_35B)
    # Per 16 values 5 + 3 bits, a BF16 amax per row, 16 bits per 512 values.
    assert got["fc1_in"] == 40 * (2048 * 8 // 16 // 8 + 2 + 2048 // 512 * 2)
    assert got["k"] == 10 * (512 * 8 // 16 // 8 + 2)
    values = 40 * 2048 + 10 * 2 * 512
    assert 8 * sum(got.values()) / values <= 0.6


def test_layers_lacking_a_site_are_guided_at_the_others() -> None:
    dense_first = GuidedShape(4, 64, 2, 16, 2, 32, kv_layers=(1, 3), moe_layers=(1, 2, 3))
    layout = RecordLayout.build(GuidanceSpec(bits=1, layers=(0, 1, 2, 3)), dense_first)
    assert [(c.layer, c.site) for c in layout] == [
        (1, "fc1_in"),
        (1, "k"),
        (1, "v"),
        (2, "fc1_in"),
        (3, "fc1_in"),
        (3, "k"),
        (3, "v"),
    ]
    assert layout.layers == (1, 2, 3)


@given(
    bits=st.sampled_from([1, 4, "syndrome"]),
    layers=st.sets(st.integers(0, 7), min_size=1),
    kv=st.sets(st.integers(0, 7)),
    blocks=st.integers(1, 40),
    heads=st.integers(1, 3),
    row_scaled=st.sets(st.sampled_from(["fc1_in", "k", "v"])),
)
def test_any_layout_has_the_bytes_summed_by_hand(bits, layers, kv, blocks, heads, row_scaled) -> None:
    shape = GuidedShape(8, 16 * blocks, heads, 16, 2, 32, kv_layers=tuple(sorted(kv)))
    total = 0
    for layer in layers:
        for site, width, rows in (("fc1_in", 16 * blocks, 1), ("k", 16 * heads, heads), ("v", 16 * heads, heads)):
            if site != "fc1_in" and layer not in kv:
                continue
            n = width // 16
            if bits == "syndrome":
                total += (5 * n + 7) // 8 + (3 * n + 7) // 8 + 2 * ((width + 511) // 512)
                total += 2 * rows if site in row_scaled else 0
            else:
                total += width * bits // 8 + n + (4 * rows if site in row_scaled else 0)
    layout = RecordLayout.build(GuidanceSpec(bits=bits, layers=tuple(sorted(layers)), row_scaled=frozenset(row_scaled)), shape)
    assert layout.row_bytes == total
    ends = [c.start for c in layout][1:] + [layout.row_bytes]
    assert [c.stop for c in layout] == ends, "columns lie one after another"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 2}, "guidance.bits=2"),
        ({"bits": True}, "guidance.bits=True"),
        ({"layers": (3, 2)}, "must be ascending"),
        ({"layers": (2, 2)}, "without repeats"),
        ({"sites": ("q",)}, r"guidance.sites=\['q'\]"),
        ({"row_scaled": frozenset({"w"})}, r"guidance.row_scaled=\['w'\]"),
        ({"syndrome_bits": 6}, "guidance.syndrome_bits=6"),
        ({"syndrome_overrides": ((0, "k", 4),)}, "guidance.syndrome_bits=4"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GuidanceSpec(**({"bits": 1, "layers": (0,)} | fields))


def test_layers_outside_the_model_and_ragged_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 40 is outside 0..39"):
        RecordLayout.build(GuidanceSpec(bits=1, layers=(40,)), QWEN_35B)
    with pytest.raises(ValueError, match="fc1_in has 40 values per token"):
        RecordLayout.build(GuidanceSpec(bits=1, layers=(0,)), GuidedShape(1, 40, 1, 16, 1, 16))
