"""Mutated records: a named error every time; never a crash, never a record that passes for whole."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from megatron_trace.guidance import wire
from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.guidance.wire import encode, open_record
from tests.unit.guidance_wire.factory import CONTRACT, layout, routes, segment


def originals() -> list[bytes]:
    small = segment(3, shape=layout(4, layers=(1,)))
    return [bytes(encode(segment(9), routes(9))), bytes(encode(small)), bytes(encode(segment(0)))]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """One to four mutations: flipped bits, overwritten, removed, repeated, moved or inserted stretches."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        n = max(1, len(out))
        at, other, length = int(rng.integers(n)), int(rng.integers(n)), int(rng.integers(1, 80))
        kind = int(rng.integers(7))
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            out[at : at + length] = rng.bytes(len(out[at : at + length]))
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[other : other + length]
        elif kind == 4:
            out[at : at + 64], out[other : other + 64] = out[other : other + 64], out[at : at + 64]
        elif kind == 5:
            out[at : at + length] = bytes(len(out[at : at + length]))
        else:
            del out[at:]
    return bytes(out)


def forged(data: bytes, rng: np.random.Generator) -> bytes:
    """A manifest with one value, key or character replaced, honestly checksummed again: only the rules can object."""
    text, start = wire._manifest_text(np.frombuffer(data, dtype=np.uint8))
    values = [-1, 0, 1, 2**63, 1e300, True, None, "x", [], {}, [[]], "layer.1", float("inf")]
    manifest = json.loads(text)
    node, path = manifest, []
    while isinstance(node, dict | list) and node and (not path or rng.random() < 0.8):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        path.append(keys[int(rng.integers(len(keys)))])
        parent, node = node, node[path[-1]]
    parent[path[-1]] = values[int(rng.integers(len(values)))]
    return bytes(wire._assemble(manifest, data[start:]))


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """(mutants that differ from what they were made of, forgeries that were accepted)."""
    rng, pool, differ, forged_through = np.random.default_rng(seed), originals(), 0, 0
    for i in range(count):
        good = pool[i % len(pool)]
        bad = mutated(good, rng)
        if bad != good:
            differ += 1
            with pytest.raises(GuidanceError):
                open_record(bad, contract_fingerprint=CONTRACT).verify()
        if i % 4 == 0:
            try:
                open_record(forged(good, rng), contract_fingerprint=CONTRACT).verify()
                forged_through += 1
            except GuidanceError:
                pass
    return differ, forged_through


def test_two_thousand_mutants_are_all_refused() -> None:
    differ, forged_through = fuzz(2000, seed=1)
    assert differ > 1800
    # Values that may honestly differ (a sample id, an amax, a digest, a shard count) pass; nothing else does.
    assert forged_through < 2000 / 4 / 2


@pytest.mark.slow
def test_a_hundred_thousand_mutants_are_all_refused() -> None:
    differ, _ = fuzz(100_000, seed=2)
    assert differ > 90_000


def test_mutation_is_deterministic_and_does_something() -> None:
    a, b = (mutated(originals()[0], np.random.default_rng(5)) for _ in range(2))
    assert a == b and zlib.crc32(a) != zlib.crc32(originals()[0])
