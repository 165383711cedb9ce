"""Where Megatron-core releases differ, in one place. Supported: 0.16.x and 0.19.x; any other version is refused.

0.16 writes specs as ``ModuleSpec``; 0.19 as ``functools.partial`` of builders with keyword submodules.
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

SUPPORTED = ("0.16", "0.19")


class UnsupportedMegatronError(ImportError):
    """The installed Megatron-core is a release this project was not tested with."""


def version() -> str:
    """Version of the Megatron-core that is imported."""
    import megatron.core

    return str(getattr(megatron.core, "__version__", None) or metadata.version("megatron-core"))


def require_supported(found: str | None = None) -> None:
    """UnsupportedMegatronError unless the installed release (or ``found``) is one of ``SUPPORTED``."""
    found = version() if found is None else found
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise UnsupportedMegatronError(
            f"megatron-core {found}: this release was not tested; install one of {', '.join(f'{s}.x' for s in SUPPORTED)}"
        )


def decoder_block_spec(
    config: TransformerConfig, *, vp_stage: int | None, norm: Any, core_attention: Any | None
) -> TransformerBlockSubmodules:
    """Megatron's local spec of this stage's decoder with ``norm`` for its norms and, where given, ``core_attention``."""
    require_supported()
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    block.layer_norm = norm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = norm
        parts.pre_mlp_layernorm = norm
        attention = submodules_of(parts.self_attention)
        for name in ("q_layernorm", "k_layernorm"):
            if config.qk_layernorm and hasattr(attention, name):
                setattr(attention, name, norm)
        if core_attention is not None:
            attention.core_attention = core_attention
    return block


def submodules_of(spec: Any) -> Any:
    """The submodules of a module spec of either kind."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
