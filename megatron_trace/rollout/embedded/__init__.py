"""A small paged continuous-batching engine for the Qwen3-MoE family, in plain torch (docs/engines.md)."""

from __future__ import annotations

from megatron_trace.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
