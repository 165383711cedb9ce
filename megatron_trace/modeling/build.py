"""Build the guided Megatron-core model of one rank, and find its guided parts again by walking it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance import frames
from megatron_trace.guidance.errors import LayerError
from megatron_trace.guidance.spec import KV_SITES, RecordLayout
from megatron_trace.modeling import compat
from megatron_trace.modeling.core_attention import ExactCoreAttention
from megatron_trace.modeling.expert_weights import WeightBackward
from megatron_trace.modeling.guided_attention import GuidedCoreAttention
from megatron_trace.modeling.guided_moe import Dispatch, GuidedMoELayer, GuidedSequentialMLP
from megatron_trace.modeling.norms import SequenceParallelNorm
from megatron_trace.modeling.parallel import Layout
from megatron_trace.modeling.route_replay import KeyedRouteReplay

ONE_PROCESS = Layout()
Recompute = Literal["none", "full", "core_attn", "moe"]
"""What backward computes again: nothing, whole layers, core attention, or MoE layers."""


@dataclass(frozen=True)
class ModelOptions:
    """Choices that change how a model computes but not what: every combination gives the same rounding."""

    recompute: Recompute = "none"
    dispatch: Dispatch = "rounded"
    weight_backward: WeightBackward = "dequantized"
    whole_row_scale: bool = True
    """Whether the fc2 input has one scale over expert-tensor shards (contract ``fc2_row_scale: max_reduced``)."""
    packed_sequences: bool = False
    """Whether micro-batches may be packed (needs this project's core attention)."""


PLAIN = ModelOptions()


class Fp32OutputLayer(ColumnParallelLinear):
    """Output head with FP32 logits: BF16 logits near 10 lie 0.06 apart, more than the mismatch that is to be measured."""

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight if weight is None else weight
        return super().forward(input_.float(), weight.float(), *args, **kwargs)


def transformer_config(
    model: ModelConfig,
    *,
    layout: Layout = ONE_PROCESS,
    options: ModelOptions = PLAIN,
    dtype: torch.dtype,
    changes: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's config of ``model`` for local (non Transformer Engine) modules with every fusion off.

    ``changes`` are fields of Megatron's config for what ``ModelConfig`` does not describe (dense layers, shared experts).
    """
    fields: dict[str, Any] = dict(
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
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        variable_seq_lengths=layout.pipeline > 1,
        # Interleaved on two stages, one batch of messages would hold two from the same rank, which cannot be told apart.
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
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
    return TransformerConfig(**(fields | _recompute_fields(options.recompute) | dict(changes or {})))


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": [recompute]}


def attach_guidance(model: torch.nn.Module, *, bf16_layers: Collection[int] = (), options: ModelOptions = PLAIN) -> None:
    """Turn every MoE layer, expert block and core attention below ``model`` into its guided form, found by walking.

    Works on any Megatron-core model built from these modules, whatever its spec containers look like in a given release. The
    guided classes add behaviour, not parameters, so names, checkpoints and initialisation stay Megatron's. Global layers in
    ``bf16_layers`` get them too, told to quantise nothing: the router probability must come after fc2 in every layer.

    Left as they are: multi-token prediction heads; attention whose cache is a latent (MLA) or a state (linear attention), which
    has no K and V to round. Raises ValueError for settings under which rows and tokens would not stay together.
    """
    head = {id(m) for block in model.modules() if isinstance(block, MultiTokenPredictionBlock) for m in block.modules()}
    for module in [m for m in model.modules() if id(m) not in head]:
        if isinstance(module, MoELayer):
            _refuse_unsafe(module.config)
            module.__class__ = GuidedMoELayer
            module.quantizes = module.layer_number - 1 not in bf16_layers
            module.dispatches = options.dispatch
            _guide_experts(module, options)
            module.router.router_replay = KeyedRouteReplay(module.layer_number - 1)
        elif isinstance(module, SelfAttention):
            layer = module.layer_number - 1
            module.core_attention = GuidedCoreAttention(module.core_attention, layer=layer, quantizes=layer not in bf16_layers)
        elif isinstance(module, TransformerLayer) and options.recompute != "none":
            module.register_forward_hook(_keep_frame_at_output)


def _keep_frame_at_output(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
    """Backward of a layer begins by making its own frame current, whatever ran before it."""
    if isinstance(output, torch.Tensor):
        return frames.kept_for_backward(output)
    return (frames.kept_for_backward(output[0]), *output[1:])


def _refuse_unsafe(config: TransformerConfig) -> None:
    reasons = {
        "moe_expert_capacity_factor": (None, "dropped tokens make the loss depend on the micro-batch split"),
        "moe_shared_expert_overlap": (False, "shared experts would see the rounded input"),
        "overlap_moe_expert_parallel_comm": (False, "two micro-batches would be in one call"),
        "moe_apply_probs_on_input": (False, "experts would quantise another tensor than the engine does"),
        "moe_router_enable_expert_bias": (False, "the bias would be updated from replayed routes, which ignore it"),
        "add_bias_linear": (False, "the router probability does not commute with a bias of fc2"),
    }
    for name, (needed, reason) in reasons.items():
        value = getattr(config, name, needed)
        if value != needed:
            raise ValueError(f"{name}={value}: {reason}; use {needed}")
    if config.moe_token_dispatcher_type != "alltoall":
        raise ValueError(f"moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}: guided rounding knows 'alltoall'")


def _guide_experts(layer: MoELayer, options: ModelOptions) -> None:
    if type(layer.experts) is not SequentialMLP:
        raise TypeError(
            f"experts of layer {layer.layer_number} are {type(layer.experts).__name__}; guided rounding knows SequentialMLP "
            "(moe_grouped_gemm=False)"
        )
    layer.experts.__class__ = GuidedSequentialMLP
    layer.experts.quantizes = layer.quantizes
    layer.experts.quantized = []
    layer.experts.weight_backward = options.weight_backward
    layer.experts.whole_row_scale = options.whole_row_scale
    _mark_expert_gradients(layer.experts)


def _mark_expert_gradients(experts: SequentialMLP) -> None:
    """Have expert gradients summed over expert-data-parallel ranks wherever those are not the data-parallel ones.

    Megatron-core marks experts so only where the expert-parallel size is above 1. Without it, but with another tensor-parallel
    size inside experts than outside, the gradients of replicated experts would be summed over the wrong ranks.
    """
    if experts.config.expert_tensor_parallel_size != experts.config.tensor_model_parallel_size:
        for parameter in experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]


def build_model(
    model: ModelConfig,
    *,
    layout: Layout = ONE_PROCESS,
    options: ModelOptions = PLAIN,
    dtype: torch.dtype = torch.bfloat16,
    bf16_layers: Collection[int] = (),
    changes: Mapping[str, Any] | None = None,
) -> GPTModel:
    """This rank's GPTModel, where it is one chunk. Process groups must exist; run it in its ``megatron_context``."""
    (chunk,) = build_chunks(model, layout=layout, options=options, dtype=dtype, bf16_layers=bf16_layers, changes=changes)
    return chunk


def build_chunks(
    model: ModelConfig,
    *,
    layout: Layout = ONE_PROCESS,
    options: ModelOptions = PLAIN,
    dtype: torch.dtype = torch.bfloat16,
    bf16_layers: Collection[int] = (),
    changes: Mapping[str, Any] | None = None,
) -> list[GPTModel]:
    """This rank's model: one chunk, or one for each virtual pipeline stage, in their order; one config for all of them."""
    config = transformer_config(model, layout=layout, options=options, dtype=dtype, changes=changes)
    chunks = []
    for stage in range(layout.virtual_pipeline):
        vp_stage = stage if layout.virtual_pipeline > 1 else None
        core_attention = ExactCoreAttention if layout.context > 1 or options.packed_sequences else None
        block = compat.decoder_block_spec(config, vp_stage=vp_stage, norm=SequenceParallelNorm, core_attention=core_attention)
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=-(-model.vocab_size // layout.tensor) * layout.tensor,
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="rope",
            rotary_base=model.rope_theta,  # type: ignore[arg-type]  # only the base of a power
            share_embeddings_and_output_weights=model.tie_word_embeddings,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        if gpt.post_process:
            gpt.output_layer.__class__ = Fp32OutputLayer
        attach_guidance(gpt, bf16_layers=bf16_layers, options=options)
        chunks.append(gpt)
    return chunks


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


def local_layers(model: torch.nn.Module) -> tuple[int, ...]:
    """Global decoder layers (0-based, ascending) that this rank holds."""
    head = {id(m) for block in model.modules() if isinstance(block, MultiTokenPredictionBlock) for m in block.modules()}
    return tuple(sorted(m.layer_number - 1 for m in model.modules() if isinstance(m, TransformerLayer) and id(m) not in head))


def check_sites(model: torch.nn.Module, record: RecordLayout) -> None:
    """LayerError where ``record`` holds a site that a layer of this rank does not compute: it is of another model."""
    attention: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            attention.setdefault(module.layer_number - 1, module.self_attention)
    kv, experts = {a.layer for a in core_attentions(model)}, {m.layer_number - 1 for m in moe_layers(model)}
    for column in record:
        if column.layer not in attention:
            continue
        if column.site in KV_SITES and column.layer not in kv:
            raise LayerError(f"record of {column.site} in layer {column.layer}: {_why_no_kv(attention[column.layer])}")
        if column.site not in KV_SITES and column.layer not in experts:
            raise LayerError(f"record of {column.site} in layer {column.layer}: that layer has no routed experts")


def _why_no_kv(attention: torch.nn.Module) -> str:
    if isinstance(attention, MultiLatentAttention):
        return "multi-latent attention caches a latent, not K and V; record fc1_in only"
    kind = "unguided" if isinstance(attention, Attention) else "no softmax"
    return f"that layer's {type(attention).__name__} is {kind} attention and has no KV cache; leave K and V out for it"


def all_modules(chunks: Iterable[GPTModel]) -> torch.nn.Module:
    """One module to walk: the chunk itself, or all of them."""
    chunks = list(chunks)
    return chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
