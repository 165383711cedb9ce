"""What rollout engine and trainer must agree on about numbers: said once, hashed, rendered for the packages that obey it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

Scope = Literal["row", "static", "tensor"]


@dataclass(frozen=True)
class SiteFormat:
    """How one tensor is rounded. ``scale_scope`` is the reach of its one FP32 scale (DESIGN.md 3.2)."""

    format: Literal["nvfp4", "bf16"]
    scale_scope: Scope | None
    """``row``: one per token; ``static``: calibrated, one per layer; ``tensor``: one per matrix; None: not scaled."""


BF16 = SiteFormat(format="bf16", scale_scope=None)


@dataclass(frozen=True)
class PrecisionContract:
    """Formats, scales and rounding shared by both sides. Two sides with different fingerprints must not exchange anything."""

    fc1_in: SiteFormat
    """Routed-expert input, quantised before dispatch."""
    fc2_in: SiteFormat
    """Activation before the second expert matrix, before the router probability is applied."""
    k: SiteFormat
    """Keys after RoPE."""
    v: SiteFormat
    """Values."""
    expert_weights: SiteFormat
    """Matrices of routed experts; gate and up share a scale where ``gate_up_paired``."""
    gate_up_paired: bool
    """Whether gate and up projections are quantised as one matrix with one FP32 scale."""
    block_size: int
    """Values along K that share one E4M3 block scale; 0 where nothing is quantised."""
    e4m3_max: int
    """Largest block scale used."""
    rounding: Literal["nearest_even"]
    """Rounding of codes and of block scales."""
    source_dtype: Literal["bfloat16", "float32"]
    """Type of the values that are quantised, on both sides."""
    bf16_layers: tuple[int, ...]
    """Global layers that are not quantised, ascending."""
    fc2_row_scale: Literal["max_reduced", "per_shard"]
    """Whether the row scale of the fc2 input spans the row or one shard of it."""
    expert_tensor_parallel: int
    """Shards of a fc2-input row that have a scale of their own."""
    temperature: float
    """Temperature of the distribution that log-probabilities are taken from."""
    schema: int = field(default=1)
    """Version of this record's meaning."""

    def __post_init__(self) -> None:
        for name in ("fc1_in", "fc2_in", "k", "v"):
            if getattr(self, name).scale_scope == "tensor":
                raise ValueError(
                    f"{name}.scale_scope='tensor': one outlier token would move every other token's codes; use row or static"
                )

    @classmethod
    def nvfp4(
        cls,
        *,
        temperature: float = 1.0,
        source_dtype: Literal["bfloat16", "float32"] = "bfloat16",
        bf16_layers: tuple[int, ...] = (),
        fc2_row_scale: Literal["max_reduced", "per_shard"] = "max_reduced",
        expert_tensor_parallel: int = 1,
    ) -> PrecisionContract:
        """W4A4 routed experts and an NVFP4 KV cache, with the default scale scopes."""
        row = SiteFormat(format="nvfp4", scale_scope="row")
        static = SiteFormat(format="nvfp4", scale_scope="static")
        return cls(
            fc1_in=row,
            fc2_in=row,
            k=static,
            v=static,
            expert_weights=SiteFormat(format="nvfp4", scale_scope="tensor"),
            gate_up_paired=True,
            block_size=16,
            e4m3_max=448,
            rounding="nearest_even",
            source_dtype=source_dtype,
            bf16_layers=bf16_layers,
            fc2_row_scale=fc2_row_scale,
            expert_tensor_parallel=expert_tensor_parallel,
            temperature=temperature,
        )

    @classmethod
    def bf16(cls, *, temperature: float = 1.0, source_dtype: Literal["bfloat16", "float32"] = "bfloat16") -> PrecisionContract:
        """Nothing quantised on either side."""
        return cls(
            fc1_in=BF16,
            fc2_in=BF16,
            k=BF16,
            v=BF16,
            expert_weights=BF16,
            gate_up_paired=False,
            block_size=0,
            e4m3_max=448,
            rounding="nearest_even",
            source_dtype=source_dtype,
            bf16_layers=(),
            fc2_row_scale="max_reduced",
            expert_tensor_parallel=1,
            temperature=temperature,
        )

    @property
    def quantized(self) -> bool:
        """Whether anything is quantised."""
        return self.block_size > 0

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = asdict(self)
        values["bf16_layers"] = list(self.bf16_layers)
        values["temperature"] = float(self.temperature)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrecisionContract:
        """Inverse of ``to_dict``; a missing or unknown field is a TypeError of the constructor."""
        sites = ("fc1_in", "fc2_in", "k", "v", "expert_weights")
        fields: dict[str, Any] = {name: SiteFormat(**value) if name in sites else value for name, value in values.items()}
        fields["bf16_layers"] = tuple(values["bf16_layers"])
        return cls(**fields)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical JSON of all fields: rides in checkpoints, guidance and refit messages."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def diff(self, other: PrecisionContract) -> tuple[str, ...]:
        """Each differing field as ``name: here != there``, in field order; empty when the contracts are equal."""
        mine, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        return tuple(f"{name}: {mine[name]!r} != {theirs[name]!r}" for name in mine if mine[name] != theirs[name])

    def environment(self) -> dict[str, str]:
        """Environment variables that make Transformer Engine, SGLang and FlashInfer obey; empty when nothing is quantised.

        Names as in Transformer Engine 2.20 (``common/recipe``), SGLang 0.5 and FlashInfer: no random Hadamard transform, no
        stochastic rounding, 1 x 16 weight blocks, one FP32 scale per token, exact division, backward from dequantised values.
        """
        if not self.quantized:
            return {}
        per_token = "1" if self.fc1_in.scale_scope == "row" else "0"
        return {
            "NVTE_NVFP4_DISABLE_RHT": "1",
            "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
            "NVTE_NVFP4_ROW_SCALED_ACTIVATION": per_token,
            "NVTE_BACKWARD_OVERRIDE": "dequantized",
            "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": per_token,
            "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
            "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
        }


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
