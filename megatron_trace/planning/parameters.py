"""Parameters of a model and of one rank, in closed form (no torch).

Every term is one Megatron-core module (megatron/core/transformer, ssm/gated_delta_net.py, multi_token_prediction.py); a test
compares the sums with those modules built on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.config.model import ModelConfig
from megatron_trace.planning.layout import Layout


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, apart by how the optimiser shards them."""

    dense: int = 0
    """Replicated or tensor-parallel modules, sharded over data x context parallel ranks by the distributed optimiser."""
    expert: int = 0
    """Matrices of routed experts, sharded over expert-data-parallel ranks."""

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(dense=self.dense + other.dense, expert=self.expert + other.expert)


def softmax_attention(model: ModelConfig, *, tensor: int) -> int:
    """Query (and its gate), key, value and output projections of one rank, and the two head norms."""
    query = model.num_attention_heads * model.head_dim
    key_value = 2 * model.num_key_value_heads * model.head_dim
    projections = query * (2 if model.attention_output_gate else 1) + key_value
    return model.hidden_size * (projections + query) // tensor + 2 * model.head_dim


def linear_attention(model: ModelConfig, *, tensor: int) -> int:
    """Gated delta net of one rank: q, k, v, z and two scalars per value head; convolution; dt bias and A; norm; output."""
    query_key = 2 * model.linear_num_key_heads * model.linear_key_head_dim
    value = model.linear_num_value_heads * model.linear_value_head_dim
    heads = model.linear_num_value_heads
    projection = model.hidden_size * (query_key + 2 * value + 2 * heads)
    convolution = (query_key + value) * model.linear_conv_kernel_dim
    return (projection + convolution + 2 * heads + value * model.hidden_size) // tensor + model.linear_value_head_dim


def moe(model: ModelConfig, *, tensor: int, expert: int, expert_tensor: int) -> Parameters:
    """Router, shared expert with its gate, and this rank's routed experts of one layer."""
    shared = 3 * model.hidden_size * model.shared_expert_intermediate_size // tensor
    gate = model.hidden_size if model.shared_expert_intermediate_size else 0
    return Parameters(
        dense=model.hidden_size * model.num_experts + shared + gate,
        expert=model.num_experts // expert * expert_matrices(model) // expert_tensor,
    )


def expert_matrices(model: ModelConfig) -> int:
    """Parameters of one routed expert: gate, up and down."""
    return 3 * model.hidden_size * model.moe_intermediate_size


def layer(model: ModelConfig, *, softmax: bool, layout: Layout) -> Parameters:
    """One decoder layer of one rank, with its two norms."""
    attention = softmax_attention if softmax else linear_attention
    dense = 2 * model.hidden_size + attention(model, tensor=layout.tensor)
    experts = moe(model, tensor=layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)
    return Parameters(dense=dense) + experts


def stage(model: ModelConfig, layout: Layout, index: int) -> Parameters:
    """All of one rank of pipeline stage ``index``; equal on every rank of a stage."""
    found = Parameters()
    for number in layout.stage_layers(index, model.num_layers):
        found += layer(model, softmax=model.has_kv_cache(number), layout=layout)
    first, last = index == 0, index == layout.pipeline - 1
    matrix = model.vocab_size * model.hidden_size // layout.tensor
    if first:
        found += Parameters(dense=matrix + -(-model.other_parameters // layout.tensor))
    if last:
        found += Parameters(dense=model.hidden_size)
        # A tied head on a stage of its own is a copy; so is the embedding that MTP layers look the next token up in.
        copy = model.tie_word_embeddings or model.mtp_num_layers
        found += Parameters(dense=(0 if model.tie_word_embeddings else matrix) + (matrix if copy and not first else 0))
        for _ in range(model.mtp_num_layers):
            mtp_only = 3 * model.hidden_size + 2 * model.hidden_size**2 // layout.tensor
            found += Parameters(dense=mtp_only) + layer(model, softmax=True, layout=layout)
    return found


SINGLE = Layout(world_size=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, expert_tensor=1)
"""Everything on one rank."""


def total(model: ModelConfig) -> Parameters:
    """The whole model, each parameter once."""
    return stage(model, SINGLE, 0)


def active_per_token(model: ModelConfig) -> int:
    """Parameters that one token of the decoder is multiplied with: all but idle experts, lookup tables and MTP layers."""
    everything = stage(model.model_copy(update={"mtp_num_layers": 0, "other_parameters": 0}), SINGLE, 0)
    routed = model.num_layers * model.num_experts_per_tok * expert_matrices(model)
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return everything.dense - embedding + routed
