"""Records owned by one sample, found by (sample, position, global layer, weight version), never by order (DESIGN.md 3.5).

Row i of a segment belongs to position i of the sample's full token sequence. Arrays are numpy uint8, so that they travel through
shared memory and object stores without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_trace.guidance.spec import RecordLayout


class GuidanceError(ValueError):
    """A record that must not be used: wrong sample, layer, version, contract, or shape. Never turned into a number."""


@dataclass(frozen=True)
class GuidanceSegment:
    """All guidance rows of one sample.

    ``rows`` uint8 [n, layout.row_bytes]; ``valid`` bool [n]; ``versions`` int32 [n], the weight version each row was recorded
    under; ``static_amax`` {version: {(layer, site): FP32 amax}} for the sites that carry no amax of their own.
    """

    sample_id: int
    layout: RecordLayout
    rows: np.ndarray
    valid: np.ndarray
    versions: np.ndarray
    contract_fingerprint: str
    static_amax: Mapping[int, Mapping[tuple[int, str], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.valid)
        if self.rows.shape != (n, self.layout.row_bytes) or self.rows.dtype != np.uint8:
            raise GuidanceError(
                f"guidance of sample {self.sample_id}: rows are {self.rows.dtype}{list(self.rows.shape)}, "
                f"must be uint8[{n}, {self.layout.row_bytes}]"
            )
        if self.versions.shape != (n,):
            raise GuidanceError(f"guidance of sample {self.sample_id}: {len(self.versions)} versions for {n} rows")

    def __len__(self) -> int:
        return len(self.valid)


@dataclass(frozen=True)
class RouteSegment:
    """Routed experts of one sample: ``experts`` uint8 or uint16 [n, num_layers, top_k], ``valid`` bool [n], ``versions`` int32 [n]."""

    sample_id: int
    experts: np.ndarray
    valid: np.ndarray
    versions: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.valid)
        if self.experts.ndim != 3 or len(self.experts) != n or len(self.versions) != n:
            raise GuidanceError(
                f"routes of sample {self.sample_id}: experts {list(self.experts.shape)}, {n} valid flags, "
                f"{len(self.versions)} versions; lengths must agree"
            )

    def __len__(self) -> int:
        return len(self.valid)
