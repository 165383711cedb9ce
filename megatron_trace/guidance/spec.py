"""Which values are recorded, at how many bits, and where each of them lies in a token's record.

A *site* is one tensor that both sides round: ``fc1_in`` (the routed-expert input, one vector per token and layer), ``k`` (after
RoPE), ``v``, and optionally ``fc2_in`` (the unscaled expert activation, one vector per token and chosen expert). A record row
is all sites of all guided layers of one token, layers ascending: a pipeline stage's share is one contiguous range of columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_trace.config.model import ModelConfig

Site = Literal["fc1_in", "k", "v", "fc2_in"]
Bits = Literal[1, 4, "syndrome"]
SITES: tuple[Site, ...] = ("fc1_in", "k", "v")
"""Sites guided by default."""
ALL_SITES: tuple[Site, ...] = (*SITES, "fc2_in")
"""Sites in the order they take in a row."""
KV_SITES: frozenset[str] = frozenset({"k", "v"})
ROW_SCALED_SITES: frozenset[str] = frozenset({"fc1_in", "fc2_in"})
"""Sites with one FP32 amax per token (per token-expert row for fc2_in); the others carry one static amax per layer."""
BLOCK = 16
CHECK_VALUES = 512
"""Values that share one 16-bit checksum in a syndrome record."""
SYNDROME_BITS: tuple[int, ...] = (5, 9, 16)
"""Bits per 16 codes that a syndrome column may take; 16 is one whole bit per value."""


def latter_half(num_layers: int) -> tuple[int, ...]:
    """Global layers guided by default: ``l >= L - L // 2`` (DESIGN.md 3.4; the paper's L20 of 40)."""
    return tuple(range(num_layers - num_layers // 2, num_layers))


@dataclass(frozen=True)
class GuidedShape:
    """The widths that decide a record's size, for stacks that ``ModelConfig`` cannot describe.

    ``kv_layers`` are the global layers that have a softmax-attention KV cache, ``moe_layers`` those with routed experts; None
    means every layer (hybrid stacks have linear attention in the others; first-k-dense stacks have no experts in the first).
    """

    num_layers: int
    hidden_size: int
    num_key_value_heads: int
    head_dim: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    kv_layers: tuple[int, ...] | None = None
    moe_layers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, model: ModelConfig | GuidedShape) -> GuidedShape:
        """The widths of ``model``, whose every layer has routed experts."""
        if isinstance(model, GuidedShape):
            return model
        names = ("num_layers", "hidden_size", "num_key_value_heads", "head_dim", "num_experts_per_tok", "moe_intermediate_size")
        return cls(**{name: getattr(model, name) for name in names}, kv_layers=model.kv_layers)

    def has(self, layer: int, site: Site) -> bool:
        """Whether ``layer`` computes ``site`` at all."""
        layers = self.kv_layers if site in KV_SITES else self.moe_layers
        return layers is None or layer in layers

    def width(self, site: Site) -> int:
        """Values per token: H for the expert input, kv_heads x head_dim for K and V, top-k x I for the activation."""
        if site == "fc1_in":
            return self.hidden_size
        if site == "fc2_in":
            return self.num_experts_per_tok * self.moe_intermediate_size
        return self.num_key_value_heads * self.head_dim

    def rows(self, site: Site) -> int:
        """Rows per token that have an amax of their own under row scale: KV heads, chosen experts, or the token itself."""
        if site in KV_SITES:
            return self.num_key_value_heads
        return self.num_experts_per_tok if site == "fc2_in" else 1


@dataclass(frozen=True)
class GuidanceSpec:
    """What an engine records of global ``layers`` (0-based, ascending).

    ``bits`` 1 (mantissa bit), 4 (whole code) or "syndrome" (``guidance/syndrome.py``); a layer that lacks a site (no KV cache,
    no experts) is guided at its other sites. ValueError, naming the field, for anything else.
    """

    bits: Bits
    layers: tuple[int, ...]
    sites: tuple[Site, ...] = SITES
    prompt_tokens: bool = True
    raw_values: bool = False
    """Also keep the BF16 values before rounding: for measuring gaps on a few trajectories, never for training."""
    row_scaled: frozenset[str] = ROW_SCALED_SITES
    """Sites whose amax is one per row and rides in the record; all others have one static amax per layer and version."""
    syndrome_bits: int = 5
    """Bits per 16 codes of a syndrome column."""
    syndrome_overrides: tuple[tuple[int, Site, int], ...] = ()
    """(layer, site, bits per 16 codes) where measured noise asks for another code than ``syndrome_bits``."""
    left_out: tuple[tuple[int, Site], ...] = ()
    """(layer, site) pairs of ``layers`` x ``sites`` that are not recorded: a choice made by budget (``guidance/budget.py``)."""

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (1, 4, "syndrome"):
            raise ValueError(f"guidance.bits={self.bits!r}: must be 1 (mantissa bit), 4 (whole code) or 'syndrome'")
        if tuple(sorted(set(self.layers))) != self.layers:
            raise ValueError(f"guidance.layers={self.layers}: must be ascending and without repeats")
        for name, sites in (("sites", self.sites), ("row_scaled", self.row_scaled)):
            unknown = [s for s in sites if s not in ALL_SITES]
            if unknown:
                raise ValueError(f"guidance.{name}={unknown}: unknown; known sites are {', '.join(ALL_SITES)}")
        for bits in (self.syndrome_bits, *(b for _, _, b in self.syndrome_overrides)):
            if bits not in SYNDROME_BITS:
                raise ValueError(f"guidance.syndrome_bits={bits}: must be one of {SYNDROME_BITS} bits per 16 codes")

    def block_bits(self, layer: int, site: Site) -> int:
        """Bits that 16 codes of this column take."""
        if self.bits != "syndrome":
            return BLOCK * self.bits
        return next((b for at, s, b in self.syndrome_overrides if (at, s) == (layer, site)), self.syndrome_bits)


@dataclass(frozen=True)
class Column:
    """Byte range of one (layer, site) in a row: codes, block scales, row amax, checksums, raw BF16 values, where present."""

    layer: int
    site: Site
    width: int
    """Values K of the site that this record holds."""
    start: int
    code_bytes: int
    scale_bytes: int
    amax_bytes: int
    raw_bytes: int = 0
    check_bytes: int = 0
    block_bits: int = BLOCK
    """Bits that 16 codes take."""
    first: int = 0
    """Index, within the whole site, of the first value held (a tensor-parallel rank holds some heads only)."""
    whole: int = 0
    """Values of the whole site."""

    def __post_init__(self) -> None:
        if not self.whole:
            object.__setattr__(self, "whole", self.width)

    @property
    def size(self) -> int:
        """Bytes of the column."""
        return self.code_bytes + self.scale_bytes + self.amax_bytes + self.check_bytes + self.raw_bytes

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """(name, start, stop) in the row of codes, scale, amax, check and raw, those of no bytes included."""
        sizes = {
            "codes": self.code_bytes,
            "scale": self.scale_bytes,
            "amax": self.amax_bytes,
            "check": self.check_bytes,
            "raw": self.raw_bytes,
        }
        out, start = [], self.start
        for name, size in sizes.items():
            out.append((name, start, start + size))
            start += size
        return tuple(out)


def site_width(model: ModelConfig | GuidedShape, site: Site) -> int:
    """Values per token at ``site`` (``GuidedShape.width``)."""
    return GuidedShape.of(model).width(site)


@dataclass(frozen=True)
class RecordLayout:
    """Where every (layer, site) lies in a record row of ``row_bytes`` bytes. Equal layouts mean interchangeable rows."""

    bits: Bits
    columns: tuple[Column, ...]

    @classmethod
    def build(cls, spec: GuidanceSpec, model: ModelConfig | GuidedShape) -> RecordLayout:
        """Lay out ``spec`` for ``model``; raises ValueError for a layer the model does not have or a ragged width."""
        shape = GuidedShape.of(model)
        columns: list[Column] = []
        start = 0
        for layer in spec.layers:
            if not 0 <= layer < shape.num_layers:
                raise ValueError(f"guidance.layers: layer {layer} is outside 0..{shape.num_layers - 1}")
            for site in (s for s in ALL_SITES if s in spec.sites and shape.has(layer, s) and (layer, s) not in spec.left_out):
                column = _column(spec, shape, layer, site, start)
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

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Global layers with at least one column, ascending."""
        return tuple(sorted({c.layer for c in self.columns}))

    def column(self, layer: int, site: str) -> Column | None:
        """The column of (layer, site), or None where nothing is recorded."""
        return self._by_key.get((layer, site))

    def span(self, layer: int) -> tuple[int, int]:
        """Byte range (start, stop) of ``layer`` in a row; KeyError where it has no column."""
        own = [c for c in self.columns if c.layer == layer]
        if not own:
            raise KeyError(f"layer {layer} is not recorded; recorded are {self.layers}")
        return own[0].start, own[-1].stop

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)


def _column(spec: GuidanceSpec, shape: GuidedShape, layer: int, site: Site, start: int) -> Column:
    width, syndrome = shape.width(site), spec.bits == "syndrome"
    if width % BLOCK:
        raise ValueError(f"site {site} has {width} values per token: must be a multiple of {BLOCK}")
    blocks, block_bits = width // BLOCK, spec.block_bits(layer, site)
    amax_each = 2 if syndrome else 4  # the amax of BF16 values is itself a BF16 value
    return Column(
        layer=layer,
        site=site,
        width=width,
        start=start,
        code_bytes=-(-blocks * block_bits // 8),
        scale_bytes=-(-blocks * 3 // 8) if syndrome else blocks,
        amax_bytes=amax_each * shape.rows(site) if site in spec.row_scaled else 0,
        check_bytes=-(-width // CHECK_VALUES) * 2 if syndrome else 0,
        raw_bytes=2 * width if spec.raw_values else 0,
        block_bits=block_bits,
    )


def bytes_per_token(spec: GuidanceSpec, model: ModelConfig | GuidedShape) -> dict[str, int]:
    """Record bytes of one token by site, over all guided layers; their sum is ``RecordLayout.row_bytes``."""
    total = dict.fromkeys((s for s in ALL_SITES if s in spec.sites), 0)
    for column in RecordLayout.build(spec, model):
        total[column.site] += column.size
    return total


def rollout_bytes(spec: GuidanceSpec, model: ModelConfig | GuidedShape, *, samples: int, tokens: int) -> int:
    """Record bytes of a rollout of ``samples`` trajectories of ``tokens`` recorded tokens each."""
    return samples * tokens * sum(bytes_per_token(spec, model).values())
