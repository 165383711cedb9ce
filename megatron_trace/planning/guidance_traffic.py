"""Bytes of guidance per token and per step (no torch): ``guidance.spec`` applied to a configuration.

A guided value costs ``bits`` and a sixteenth of an E4M3 scale: 1.5 bits compact, 4.5 bits full. The paper's figures (51,840 and
8,640 bytes a token for Qwen3.5-35B-A3B) are these. Row-scaled sites add the row's amax, which the paper's figures have no room
for; it is counted apart.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_trace.config.schema import RunConfig
from megatron_trace.guidance.spec import SITES, GuidanceSpec, GuidedShape, RecordLayout


def shape(config: RunConfig) -> GuidedShape:
    """The widths of the model that decide a record's size; K and V only where there is a KV cache."""
    model = config.model
    return GuidedShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        num_experts_per_tok=model.num_experts_per_tok,
        moe_intermediate_size=model.moe_intermediate_size,
        kv_layers=model.kv_layers,
    )


def _layout(config: RunConfig, layers: Collection[int]) -> RecordLayout:
    guided = tuple(layer for layer in config.guided_layers if layer in layers)
    return RecordLayout.build(
        GuidanceSpec(bits=config.guidance.bits, layers=guided, sites=config.guidance.sites), shape(config)
    )


def bytes_per_token(config: RunConfig) -> int:
    """Codes and block scales of one token under the configured bits, layers and sites; 0 unless the forward is guided."""
    return wire_bytes_per_token(config) - row_scale_bytes_per_token(config)


def row_scale_bytes_per_token(config: RunConfig) -> int:
    """Row amaxes of one token, beside ``bytes_per_token``."""
    return sum(column.amax_bytes for column in _layout(config, config.guided_layers))


def wire_bytes_per_token(config: RunConfig) -> int:
    """All bytes of one token's record row."""
    return _layout(config, config.guided_layers).row_bytes


def bytes_per_token_full(config: RunConfig) -> int:
    """Codes (4 bits) and block scales of one token at every site of every layer: full guidance, the paper's reference."""
    spec = GuidanceSpec(bits=4, layers=tuple(range(config.model.num_layers)), sites=SITES, row_scaled=frozenset())
    return RecordLayout.build(spec, shape(config)).row_bytes


def row_bytes(config: RunConfig, *, layers: Collection[int]) -> int:
    """Bytes of the part of a token's record row that belongs to ``layers`` (a pipeline stage's), row amaxes included."""
    return _layout(config, frozenset(layers)).row_bytes


def tokens_per_step(config: RunConfig) -> int:
    """Most tokens of one step that have a record row: every response at its longest, its prompt too where prompts are recorded.

    An upper bound: responses are mostly shorter, and a prompt's rows are shared by the samples of its group.
    """
    algorithm = config.algorithm
    trajectories = algorithm.prompts_per_step * algorithm.samples_per_prompt
    prompt = config.task.max_prompt_tokens if config.guidance.prompt_tokens else 0
    return trajectories * (prompt + config.rollout.max_new_tokens)
