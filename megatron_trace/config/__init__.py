"""Strict configuration, and the precision contract that rollout engine and trainer share. Imports no torch."""

from megatron_trace.config.contract import PrecisionContract, SiteFormat
from megatron_trace.config.errors import ConfigError
from megatron_trace.config.loading import from_mapping, load
from megatron_trace.config.model import ModelConfig
from megatron_trace.config.schema import RunConfig
from megatron_trace.config.validation import validate_world_size

__all__ = [
    "ConfigError",
    "ModelConfig",
    "PrecisionContract",
    "RunConfig",
    "SiteFormat",
    "from_mapping",
    "load",
    "validate_world_size",
]
