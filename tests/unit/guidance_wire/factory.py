"""Random segments of a small model, for tests of operations, wire format and store."""

from __future__ import annotations

import numpy as np

from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment
from megatron_trace.guidance.spec import GuidanceSpec, GuidedShape, RecordLayout

SHAPE = GuidedShape(
    num_layers=4,
    hidden_size=64,
    num_key_value_heads=4,
    head_dim=32,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    kv_layers=(1, 3),
)
CONTRACT = "c0ffee"


def layout(bits: int | str = 1, layers: tuple[int, ...] = (1, 2, 3), **changes: object) -> RecordLayout:
    return RecordLayout.build(GuidanceSpec(bits=bits, layers=layers, **changes), SHAPE)


def amax_of(version: int, shape: RecordLayout) -> dict[tuple[int, str], float]:
    """A static amax that differs by version, layer and site."""
    return {(c.layer, c.site): 1.0 + version + c.layer / 8 + (c.site == "v") / 16 for c in shape if not c.amax_bytes}


def segment(
    n: int, *, sample_id: int = 7, seed: int = 0, shape: RecordLayout | None = None, versions: list[int] | None = None
) -> GuidanceSegment:
    """Random rows, all valid, of version 0 unless told."""
    shape = layout() if shape is None else shape
    held = np.zeros(n, dtype=np.int32) if versions is None else np.array(versions, dtype=np.int32)
    return GuidanceSegment(
        sample_id=sample_id,
        layout=shape,
        rows=np.random.default_rng(seed).integers(1, 256, (n, shape.row_bytes), dtype=np.uint8),
        valid=np.ones(n, dtype=bool),
        versions=held,
        contract_fingerprint=CONTRACT,
        static_amax={int(v): amax_of(int(v), shape) for v in np.unique(held)},
    )


def routes(n: int, *, sample_id: int = 7, seed: int = 0, dtype: type = np.uint8) -> RouteSegment:
    """Two different experts of 300 or 4 per layer."""
    rng = np.random.default_rng(seed)
    experts = rng.permuted(np.tile(np.arange(4 if dtype == np.uint8 else 300), (n, SHAPE.num_layers, 1)), axis=-1)[..., :2]
    return RouteSegment(
        sample_id=sample_id,
        experts=experts.astype(dtype),
        valid=np.ones(n, dtype=bool),
        versions=np.zeros(n, dtype=np.int32),
    )


def equal(a: GuidanceSegment, b: GuidanceSegment) -> bool:
    """Same rows, flags, versions, layout and static amax."""
    same = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.ROW_FIELDS)
    tables = [{v: dict(t) for v, t in s.static_amax.items() if t} for s in (a, b)]
    return same and a.layout == b.layout and tables[0] == tables[1] and a.sample_id == b.sample_id
