"""Choosing columns by gain per byte, against trying everything."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.guidance.budget import ColumnGain, choose, column_bytes, spec_of, table
from megatron_trace.guidance.spec import RecordLayout
from tests.unit.guidance_wire.factory import SHAPE

KEYS = [(1, "fc1_in"), (1, "k"), (2, "fc1_in"), (3, "v")]


@st.composite
def tables(draw: st.DrawFn) -> list[ColumnGain]:
    entry = st.tuples(st.sampled_from(KEYS), st.sampled_from([5, 9, 16]))
    gains = draw(st.dictionaries(entry, st.tuples(st.integers(1, 30), st.integers(-2, 40)), max_size=9))
    return [ColumnGain(layer, site, bits, size, float(flips)) for ((layer, site), bits), (size, flips) in gains.items()]


@given(gains=tables(), budget=st.integers(0, 70))
def test_no_other_set_avoids_more(gains: list[ColumnGain], budget: int) -> None:
    chosen = choose(gains, budget=budget)
    assert sum(g.nbytes for g in chosen) <= budget
    assert len({(g.layer, g.site) for g in chosen}) == len(chosen)
    options = [[None, *(g for g in gains if (g.layer, g.site) == key)] for key in KEYS]
    sets = [[g for g in combination if g is not None] for combination in product(*options)]
    best = max(sum(g.gain for g in s) for s in sets if sum(g.nbytes for g in s) <= budget)
    assert sum(g.gain for g in chosen) == best
    assert chosen == choose(gains[::-1], budget=budget), "the order of the table does not matter"


def test_the_spec_of_a_choice_records_it_and_nothing_else() -> None:
    gains = [
        ColumnGain(layer, site, bits, column_bytes(SHAPE, layer, site, bits="syndrome", block_bits=bits), 1.0 + layer)
        for layer, site, bits in ((1, "fc1_in", 5), (1, "v", 16), (2, "fc1_in", 9), (3, "k", 5))
    ]
    spec = spec_of(choose(gains, budget=10_000), bits="syndrome")
    layout = RecordLayout.build(spec, SHAPE)
    assert [(c.layer, c.site, c.block_bits) for c in layout] == [(g.layer, g.site, g.block_bits) for g in gains]
    assert layout.row_bytes == sum(g.nbytes for g in gains)
    compact = RecordLayout.build(spec_of(gains[:2], bits=1), SHAPE)
    assert [(c.layer, c.site) for c in compact] == [(1, "fc1_in"), (1, "v")]
    with pytest.raises(ValueError, match="no column fits"):
        spec_of(choose(gains, budget=3), bits=1)
    with pytest.raises(ValueError, match="column of 0 bytes"):
        choose([ColumnGain(0, "k", 16, 0, 1.0)], budget=5)


def test_the_table_lists_best_value_first() -> None:
    gains = [ColumnGain(0, "k", 16, 10, 5.0), ColumnGain(1, "k", 16, 10, 9.0), ColumnGain(2, "k", 16, 2, 1.0)]
    rows = table(gains, choose(gains, budget=12))
    assert [(r["layer"], r["chosen"], r["gain_per_byte"]) for r in rows] == [(1, True, 0.9), (0, False, 0.5), (2, True, 0.5)]
