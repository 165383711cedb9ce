"""Tests of this folder build Megatron-core models: it is made ready before any test module imports it."""

from __future__ import annotations

from megatron_trace.platform.device import prepare_megatron

prepare_megatron()
