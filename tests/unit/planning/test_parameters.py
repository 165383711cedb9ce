"""Parameter counts: against published totals, and against Megatron-core's own modules on the meta device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.config import load
from megatron_trace.config.model import ModelConfig
from megatron_trace.planning import parameters
from megatron_trace.planning.layout import Layout

TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
HYBRID = TINY | {
    "family": "qwen3_5_moe",
    "full_attention_interval": 4,
    "attention_output_gate": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 96,
}


def _preset(repository: Path, name: str) -> ModelConfig:
    return load(repository / "configs" / "presets" / f"{name}.yaml", planned_only=True).model


@pytest.mark.parametrize(
    ("preset", "billions", "active"),
    [
        ("qwen3_30b_a3b", 30.53, 3.35),
        ("qwen3_235b_a22b", 235.09, 22.19),
        ("qwen3_5_35b_a3b", 35.5, 3.5),
        ("qwen3_5_122b_a10b", 125.0, 10.0),
        ("qwen3_8_2_4t_a95b", 2450.0, 95.0),
    ],
)
def test_totals_are_those_the_models_are_named_after(repository: Path, preset: str, billions: float, active: float) -> None:
    model = _preset(repository, preset)
    assert parameters.total(model).total / 1e9 == pytest.approx(billions, rel=0.03)
    assert (parameters.active_per_token(model) + model.vocab_size * model.hidden_size) / 1e9 == pytest.approx(active, rel=0.12)


def test_stages_add_up_to_the_whole() -> None:
    model = ModelConfig.model_validate(HYBRID)
    split = Layout(world_size=16, tensor=1, context=1, pipeline=2, virtual_pipeline=2, expert=8, expert_tensor=1)
    stages = [parameters.stage(model, split, index) for index in range(2)]
    whole = parameters.total(model)
    assert sum(stage.dense for stage in stages) == whole.dense
    assert sum(stage.expert for stage in stages) * 8 == whole.expert


PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from megatron_trace.platform.device import megatron_context, prepare_megatron
prepare_megatron()
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

def count(case):
    model, sizes, rank = case["model"], case["sizes"], case["rank"]
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=sizes["world"])
    parallel_state.initialize_model_parallel(
        sizes["tensor"], sizes["pipeline"], expert_model_parallel_size=sizes["expert"],
        expert_tensor_parallel_size=sizes["expert_tensor"], create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=model["num_layers"], hidden_size=model["hidden_size"], num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_key_value_heads"], kv_channels=model["head_dim"],
        ffn_hidden_size=model["moe_intermediate_size"], moe_ffn_hidden_size=model["moe_intermediate_size"],
        num_moe_experts=model["num_experts"], moe_router_topk=model["num_experts_per_tok"],
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=model.get("shared_expert_intermediate_size") or None,
        moe_shared_expert_gate=bool(model.get("shared_expert_intermediate_size")),
        attention_output_gate=model.get("attention_output_gate", False),
        tensor_model_parallel_size=sizes["tensor"], pipeline_model_parallel_size=sizes["pipeline"],
        expert_model_parallel_size=sizes["expert"], expert_tensor_parallel_size=sizes["expert_tensor"],
        sequence_parallel=False, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        perform_initialization=False, qk_layernorm=True, use_cpu_initialization=False, init_model_with_meta_device=True,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True,
        mtp_num_layers=model.get("mtp_num_layers") or None, **case.get("extra", {}))
    spec = get_gpt_layer_local_spec(
        num_experts=model["num_experts"], moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm")
    real, torch.cuda.current_device = torch.cuda.current_device, lambda: torch.device("meta")
    try:
        with megatron_context(), torch.device("meta"):
            if case.get("gdn"):
                from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
                from megatron.core.models.backends import LocalSpecProvider
                import megatron.core.ssm.gated_delta_net as gdn
                gdn.HAVE_FLA = True
                backend = LocalSpecProvider()
                parts = GatedDeltaNetSubmodules(
                    in_proj=backend.column_parallel_linear(), out_norm=backend.layer_norm(rms_norm=True, for_qk=False),
                    out_proj=backend.row_parallel_linear())
                from megatron.core.process_groups_config import ProcessGroupCollection
                groups = ProcessGroupCollection.use_mpu_process_groups()
                built = GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
            else:
                mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
                built = GPTModel(
                    config=config, transformer_layer_spec=spec, mtp_block_spec=mtp, vocab_size=model["vocab_size"],
                    max_sequence_length=4096, pre_process=parallel_state.is_pipeline_first_stage(),
                    post_process=parallel_state.is_pipeline_last_stage(), position_embedding_type="rope",
                    share_embeddings_and_output_weights=model.get("tie_word_embeddings", False))
    finally:
        torch.cuda.current_device = real
    devices = {p.device.type for p in built.parameters()}
    assert devices == {"meta"}, devices
    total = sum(p.numel() for p in built.parameters())
    parallel_state.destroy_model_parallel(); dist.destroy_process_group()
    return total

print(json.dumps([count(case) for case in json.loads(sys.argv[1])]))
"""


def _sizes(*, world: int = 1, tensor: int = 1, pipeline: int = 1, expert: int = 1, expert_tensor: int = 1) -> dict[str, int]:
    return {"world": world, "tensor": tensor, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}


def _layout(sizes: dict[str, int]) -> Layout:
    return Layout(
        world_size=sizes["world"],
        tensor=sizes["tensor"],
        context=1,
        pipeline=sizes["pipeline"],
        virtual_pipeline=1,
        expert=sizes["expert"],
        expert_tensor=sizes["expert_tensor"],
    )


@pytest.mark.slow
def test_counts_equal_those_of_megatron_modules_on_the_meta_device(repository: Path) -> None:
    plain = ModelConfig.model_validate(TINY)
    shared = {key: value for key, value in HYBRID.items() if not key.startswith(("linear_", "family", "full_attention"))}
    shared_mtp = ModelConfig.model_validate(shared | {"mtp_num_layers": 1})
    tied = ModelConfig.model_validate(TINY | {"tie_word_embeddings": True})
    thirty = _preset(repository, "qwen3_30b_a3b")
    big = _preset(repository, "qwen3_235b_a22b")
    cases = [
        (plain, _sizes(), 0),
        (plain, _sizes(world=4, tensor=2, pipeline=2, expert=2), 0),
        (plain, _sizes(world=4, tensor=2, pipeline=2, expert=2), 3),
        (plain, _sizes(world=8, tensor=4, expert=2, expert_tensor=4), 5),
        (shared_mtp, _sizes(), 0),
        (shared_mtp, _sizes(world=4, tensor=2, pipeline=2, expert=2), 3),
        (tied, _sizes(world=2, pipeline=2), 1),
        (thirty, _sizes(), 0),
        (big, _sizes(world=64, tensor=4, pipeline=2, expert=8), 63),
    ]
    asked = [{"model": model.model_dump(), "sizes": sizes, "rank": rank} for model, sizes, rank in cases]
    hybrid = ModelConfig.model_validate(HYBRID)
    linear = {key: HYBRID[key] for key in HYBRID if key.startswith("linear_")}
    extra = linear | {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
    for tensor in (1, 2):
        asked.append(
            {"model": HYBRID, "sizes": _sizes(world=tensor, tensor=tensor), "rank": 0, "extra": extra, "gdn": True},
        )
    command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, env=None)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    expected = [
        parameters.stage(model, _layout(sizes), rank * sizes["pipeline"] // sizes["world"]).total
        for model, sizes, rank in cases
    ]
    expected += [parameters.linear_attention(hybrid, tensor=tensor) for tensor in (1, 2)]
    assert measured == expected
