"""Build the guided Megatron-core model of one rank, and find its guided parts again by walking it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_trace.config.model import ModelConfig
from megatron_trace.modeling.guided_attention import GuidedCoreAttention
from megatron_trace.modeling.guided_moe import GuidedMoELayer, GuidedSequentialMLP
from megatron_trace.modeling.route_replay import KeyedRouteReplay


class Fp32OutputLayer(ColumnParallelLinear):
    """Output head with FP32 logits: BF16 logits near 10 lie 0.06 apart, more than the mismatch that is to be measured."""

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight if weight is None else weight
        return super().forward(input_.float(), weight.float(), *args, **kwargs)


def transformer_config(model: ModelConfig, *, expert_parallel: int, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config of ``model`` for local (non Transformer Engine) modules with every fusion off."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.moe_intermediate_size,
        moe_ffn_hidden_size=model.moe_intermediate_size,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.num_experts_per_tok,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=expert_parallel,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
    )


def attach_guidance(model: torch.nn.Module, *, bf16_layers: Collection[int] = ()) -> None:
    """Turn every MoE layer, expert block and core attention below ``model`` into its guided form, found by walking.

    Works on any Megatron-core model built from these modules, whatever its spec containers look like in a given release. The
    guided classes add behaviour, not parameters, so names, checkpoints and initialisation stay Megatron's. Global layers in
    ``bf16_layers`` get them too, told to quantise nothing: the router probability must come after fc2 in every layer.
    """
    for module in list(model.modules()):
        if isinstance(module, MoELayer):
            module.__class__ = GuidedMoELayer
            module.quantizes = module.layer_number - 1 not in bf16_layers
            _guide_experts(module)
            module.router.router_replay = KeyedRouteReplay(module.layer_number - 1)
        elif isinstance(module, SelfAttention):
            layer = module.layer_number - 1
            module.core_attention = GuidedCoreAttention(module.core_attention, layer=layer, quantizes=layer not in bf16_layers)


def _guide_experts(layer: MoELayer) -> None:
    if type(layer.experts) is not SequentialMLP:
        raise TypeError(
            f"experts of layer {layer.layer_number} are {type(layer.experts).__name__}; guided rounding knows SequentialMLP "
            "(moe_grouped_gemm=False)"
        )
    layer.experts.__class__ = GuidedSequentialMLP
    layer.experts.quantizes = layer.quantizes
    layer.experts.quantized = []


def build_model(
    model: ModelConfig,
    *,
    expert_parallel: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    bf16_layers: Collection[int] = (),
) -> GPTModel:
    """This rank's GPTModel. Process groups must exist; run inside ``platform.device.megatron_context``."""
    config = transformer_config(model, expert_parallel=expert_parallel, dtype=dtype)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=model.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        parallel_output=True,
    )
    if gpt.post_process:
        gpt.output_layer.__class__ = Fp32OutputLayer
    attach_guidance(gpt, bf16_layers=bf16_layers)
    return gpt


def moe_layers(model: torch.nn.Module) -> Iterator[GuidedMoELayer]:
    """Guided MoE layers of this rank, found by walking, never by construction order."""
    return (m for m in model.modules() if isinstance(m, GuidedMoELayer))


def core_attentions(model: torch.nn.Module) -> Iterator[GuidedCoreAttention]:
    """Guided core attentions of this rank."""
    return (m for m in model.modules() if isinstance(m, GuidedCoreAttention))


def refresh_expert_weights(model: torch.nn.Module) -> None:
    """Quantise every local expert anew; call once after each change of the master weights."""
    for layer in moe_layers(model):
        layer.experts.refresh()
