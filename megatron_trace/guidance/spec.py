"""Which values are recorded, at how many bits, and where each of them lies in a token's record.

A *site* is one tensor that both sides round: ``fc1_in`` (the routed-expert input, one vector per token and layer), ``k`` (after
RoPE) and ``v``. A record row is all sites of all guided layers of one token, layers ascending, so that a pipeline stage's share
is one contiguous range of columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_trace.config.model import ModelConfig

Site = Literal["fc1_in", "k", "v"]
SITES: tuple[Site, ...] = ("fc1_in", "k", "v")
ROW_SCALED_SITES: frozenset[str] = frozenset({"fc1_in"})
"""Sites whose FP32 amax is one per token (4 bytes in each row); the others carry one static amax per layer in the manifest."""
BLOCK = 16


def latter_half(num_layers: int) -> tuple[int, ...]:
    """Global layers guided by default: ``l >= L - L // 2`` (DESIGN.md 3.4; the paper's L20 of 40)."""
    return tuple(range(num_layers - num_layers // 2, num_layers))


@dataclass(frozen=True)
class GuidanceSpec:
    """What an engine records: ``bits`` 1 (mantissa) or 4 (whole code) at ``sites`` of global ``layers`` (from 0, ascending)."""

    bits: int
    layers: tuple[int, ...]
    sites: tuple[Site, ...] = SITES
    prompt_tokens: bool = True
    raw_values: bool = False
    """Also keep the BF16 values before rounding: for measuring gaps on a few trajectories, never for training."""

    def __post_init__(self) -> None:
        if self.bits not in (1, 4):
            raise ValueError(f"guidance.bits={self.bits}: must be 1 (mantissa bit) or 4 (whole code)")
        if tuple(sorted(set(self.layers))) != self.layers:
            raise ValueError(f"guidance.layers={self.layers}: must be ascending and without repeats")
        unknown = [s for s in self.sites if s not in SITES]
        if unknown:
            raise ValueError(f"guidance.sites={unknown}: unknown; known sites are {', '.join(SITES)}")


@dataclass(frozen=True)
class Column:
    """Byte range of one (layer, site) in a row: codes, block scales, an FP32 row amax if any, raw BF16 values if kept."""

    layer: int
    site: Site
    width: int
    """Values K of the site."""
    start: int
    code_bytes: int
    scale_bytes: int
    amax_bytes: int
    raw_bytes: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.code_bytes + self.scale_bytes + self.amax_bytes + self.raw_bytes


def site_width(model: ModelConfig, site: Site) -> int:
    """Values per token at ``site``: H for the expert input, kv_heads x head_dim for K and V."""
    return model.hidden_size if site == "fc1_in" else model.num_key_value_heads * model.head_dim


@dataclass(frozen=True)
class RecordLayout:
    """Where every (layer, site) lies in a record row of ``row_bytes`` bytes. Equal layouts mean interchangeable rows."""

    bits: int
    columns: tuple[Column, ...]

    @classmethod
    def build(cls, spec: GuidanceSpec, model: ModelConfig) -> RecordLayout:
        """Lay out ``spec`` for ``model``; raises ValueError for a layer the model does not have or a ragged width."""
        columns: list[Column] = []
        start = 0
        for layer in spec.layers:
            if not 0 <= layer < model.num_layers:
                raise ValueError(f"guidance.layers: layer {layer} is outside 0..{model.num_layers - 1}")
            for site in (s for s in SITES if s in spec.sites):
                width = site_width(model, site)
                if width % BLOCK:
                    raise ValueError(f"site {site} has {width} values per token: must be a multiple of {BLOCK}")
                column = Column(
                    layer=layer,
                    site=site,
                    width=width,
                    start=start,
                    code_bytes=width * spec.bits // 8,
                    scale_bytes=width // BLOCK,
                    amax_bytes=4 if site in ROW_SCALED_SITES else 0,
                    raw_bytes=2 * width if spec.raw_values else 0,
                )
                columns.append(column)
                start = column.stop
        return cls(bits=spec.bits, columns=tuple(columns))

    @cached_property
    def _by_key(self) -> Mapping[tuple[int, str], Column]:
        return {(c.layer, c.site): c for c in self.columns}

    @property
    def row_bytes(self) -> int:
        """Bytes one token's record takes."""
        return self.columns[-1].stop if self.columns else 0

    def column(self, layer: int, site: str) -> Column | None:
        """The column of (layer, site), or None where nothing is recorded."""
        return self._by_key.get((layer, site))

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)
