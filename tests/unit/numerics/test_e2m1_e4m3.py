"""E2M1 and E4M3: every codeword, every tie and its neighbours, packing, signs of zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_trace.numerics import e2m1, e4m3
from tests.unit.numerics import oracle

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def around(value: float) -> list[float]:
    v = np.float32(value)
    return [float(np.nextafter(v, np.float32(-9))), float(v), float(np.nextafter(v, np.float32(9)))]


EDGES = sorted({s * a for t in (*TIES, *e2m1.MAGNITUDES) for a in around(t) for s in (1, -1)})


def test_ties_go_to_the_even_code() -> None:
    got = e2m1.decode(e2m1.encode(torch.tensor(TIES))).tolist()
    assert got == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_every_edge_and_its_neighbours_equal_the_exhaustive_search() -> None:
    codes = e2m1.encode(torch.tensor(EDGES)).tolist()
    assert codes == [oracle.e2m1_code(np.float32(v)) for v in EDGES]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=32))
def test_any_float_equals_the_exhaustive_search(values: list[float]) -> None:
    codes = e2m1.encode(torch.tensor(values, dtype=torch.float32)).tolist()
    assert codes == [oracle.e2m1_code(np.float32(v)) for v in values]


def test_signs_of_zero_and_nan() -> None:
    tiny = float(np.float32(1e-45))
    assert e2m1.encode(torch.tensor([0.0, -0.0, -tiny, tiny, -0.1, float("nan"), 1e30, -1e30])).tolist() == [
        0,
        0,
        8,
        0,
        8,
        0,
        7,
        15,
    ]


def test_all_codes_decode_and_encode_to_themselves() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(e2m1.codes_from_values(values), codes)


def test_known_byte_even_element_in_the_low_nibble() -> None:
    assert e2m1.pack(e2m1.encode(torch.tensor([6.0, -0.5]))).item() == 0x97
    assert e2m1.pack_values(torch.tensor([6.0, -0.5])).item() == 0x97
    assert e2m1.unpack_values(torch.tensor([0x97], dtype=torch.uint8)).tolist() == [6.0, -0.5]
    with pytest.raises(ValueError, match="last dimension is 3"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))


def test_every_byte_unpacks_like_arithmetic_and_packs_back() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    codes = e2m1.unpack(packed)
    assert codes.tolist() == [n for b in range(256) for n in (b % 16, b // 16)]
    assert e2m1.unpack_values(packed).tolist() == [float(oracle.e2m1_float(c)) for c in codes.tolist()]
    assert torch.equal(e2m1.pack(codes), packed)
    assert torch.equal(e2m1.pack_values(e2m1.unpack_values(packed)), packed)


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=-6, max_value=6, width=32))
def test_bracket_equals_the_search_over_the_grid(z: float) -> None:
    low, high = e2m1.bracket(torch.tensor([z], dtype=torch.float32))
    assert (low.item(), high.item()) == oracle.bracket(np.float32(z))


def test_bracket_at_edges() -> None:
    inside = [v for v in EDGES if abs(v) <= 6]
    low, high = e2m1.bracket(torch.tensor(inside))
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == [oracle.bracket(np.float32(v)) for v in inside]


def test_ladder_index() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    ladder = e2m1.ladder_from_codes(codes)
    assert ladder.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7]
    assert e2m1.values_from_ladder(ladder).tolist() == e2m1.decode(codes).tolist()


def test_e4m3_rounding_and_clamp() -> None:
    values = [186.67, 200, 216, 230, 460, 2**-10, 1.5 * 2**-9, 2**-9, 0, 1e30, float("inf")]
    got = e4m3.cast(torch.tensor(values, dtype=torch.float32))
    assert got.float().tolist() == [192, 192, 224, 224, 448, 0, 2**-8, 2**-9, 0, 448, 448]
    assert e4m3.cast(torch.tensor([1e9, float("nan")])).view(torch.uint8).tolist() == [0x7E, 0x7F]


def test_clamp_comes_before_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts disagree above 448 (saturation here, NaN on other devices), so nothing above it may reach one."""
    seen: list[float] = []
    original = torch.Tensor.to

    def spy(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if torch.float8_e4m3fn in args:
            seen.append(self.abs().max().item())
        return original(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", spy)
    e4m3.cast(torch.tensor([500.0, 1e4, float("inf")]))
    assert seen == [448.0]


def test_all_e4m3_bytes_and_midpoints() -> None:
    assert e4m3.decode(torch.arange(127, dtype=torch.uint8)).tolist() == [float(v) for v in oracle.E4M3]
    values = np.array([float(v) for v in oracle.E4M3], dtype=np.float32)
    middles = (values[:-1] + values[1:]) / 2
    probes = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e3)), values])
    got = e4m3.cast(torch.from_numpy(probes)).view(torch.uint8).tolist()
    assert got == [oracle.e4m3_byte(v) for v in probes]
    subnormal = e4m3.decode(torch.tensor([1, 7], dtype=torch.uint8)).tolist()
    assert subnormal == [0.001953125, 0.013671875]
