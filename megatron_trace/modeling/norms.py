"""Norms of the local layer specs, allowed under sequence parallelism.

Megatron-core's own wrapper of torch's norms refuses sequence parallelism, which its MoE layers require under tensor
parallelism. All that is needed is the mark by which ``finalize_model_grads`` sums gradients of replicated weights.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """RMSNorm or LayerNorm as ``config.normalization`` says; builds torch's module, so names and bits are torch's."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore[misc]
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(f"normalization={config.normalization!r}: must be one of {', '.join(kinds)}")
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma=True: torch's norms have none; use Transformer Engine's")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
