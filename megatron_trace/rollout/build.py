"""From the configuration to this rank's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_trace.config import RunConfig

if TYPE_CHECKING:
    from megatron_trace.rollout.embedded.engine import EmbeddedEngine


def build_engine(config: RunConfig, *, quantized: bool | None = None) -> EmbeddedEngine:
    """The engine of ``rollout.*``; ``quantized`` overrides ``precision.rollout`` (the BF16 floor of the mismatch table)."""
    import torch

    from megatron_trace.rollout.embedded.engine import EmbeddedEngine

    if quantized is None:
        quantized = config.precision.rollout == "nvfp4"
    section = config.rollout
    return EmbeddedEngine(
        config.model,
        quantization="nvfp4" if quantized else "none",
        dtype=torch.bfloat16 if config.precision.compute_dtype == "bfloat16" else torch.float32,
        tensor_parallel=section.tensor_parallel,
        page_size=section.page_size,
        num_pages=section.num_pages,
        max_batch_size=section.max_batch_size,
        bf16_layers=config.precision.bf16_layers if quantized else (),
        contract_fingerprint=config.contract.fingerprint,
    )
