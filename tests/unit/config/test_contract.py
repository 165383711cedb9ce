"""The precision contract: its fingerprint, the field a difference is in, and the environment it renders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from megatron_trace.config import PrecisionContract, SiteFormat, load

NVFP4 = PrecisionContract.nvfp4()


def test_default_scale_scopes() -> None:
    scopes = {name: getattr(NVFP4, name).scale_scope for name in ("fc1_in", "fc2_in", "k", "v", "expert_weights")}
    assert scopes == {"fc1_in": "row", "fc2_in": "row", "k": "static", "v": "static", "expert_weights": "tensor"}
    assert (NVFP4.block_size, NVFP4.e4m3_max, NVFP4.gate_up_paired, NVFP4.rounding) == (16, 448, True, "nearest_even")
    assert NVFP4.source_dtype == "bfloat16"


def test_fingerprint_is_sha256_of_canonical_json() -> None:
    text = json.dumps(NVFP4.to_dict(), sort_keys=True, separators=(",", ":"))
    assert NVFP4.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    assert PrecisionContract.from_dict(json.loads(text)) == NVFP4
    assert PrecisionContract.from_dict(json.loads(text)).fingerprint == NVFP4.fingerprint


def test_integer_and_float_temperature_are_one_contract() -> None:
    assert PrecisionContract.nvfp4(temperature=1).fingerprint == PrecisionContract.nvfp4(temperature=1.0).fingerprint


OTHER = {
    "fc1_in": SiteFormat(format="nvfp4", scale_scope="static"),
    "fc2_in": SiteFormat(format="bf16", scale_scope=None),
    "k": SiteFormat(format="nvfp4", scale_scope="row"),
    "v": SiteFormat(format="nvfp4", scale_scope="row"),
    "expert_weights": SiteFormat(format="bf16", scale_scope=None),
    "gate_up_paired": False,
    "block_size": 32,
    "e4m3_max": 256,
    "rounding": "stochastic",
    "source_dtype": "float32",
    "bf16_layers": (0,),
    "fc2_row_scale": "per_shard",
    "expert_tensor_parallel": 2,
    "temperature": 0.7,
    "schema": 2,
}


def test_every_field_has_a_counterexample() -> None:
    assert set(OTHER) == {item.name for item in dataclasses.fields(PrecisionContract)}


@pytest.mark.parametrize("name", OTHER)
def test_a_change_of_any_field_changes_the_fingerprint_and_is_named(name: str) -> None:
    changed = dataclasses.replace(NVFP4, **{name: OTHER[name]})
    assert changed.fingerprint != NVFP4.fingerprint
    assert [line.split(":")[0].split(".")[0] for line in NVFP4.diff(changed)] == [name] * len(NVFP4.diff(changed))
    assert NVFP4.diff(changed)


def test_diff_shows_both_values() -> None:
    assert NVFP4.diff(dataclasses.replace(NVFP4, e4m3_max=256, temperature=0.5)) == (
        "e4m3_max: 448 != 256",
        "temperature: 1.0 != 0.5",
    )
    assert NVFP4.diff(dataclasses.replace(NVFP4, k=OTHER["k"])) == ("k.scale_scope: 'static' != 'row'",)
    assert NVFP4.diff(PrecisionContract.nvfp4()) == ()


def test_environment_of_a_quantised_run() -> None:
    assert NVFP4.environment() == {
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
        "NVTE_BACKWARD_OVERRIDE": "dequantized",
        "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": "1",
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
    }


def test_a_bf16_run_sets_no_environment() -> None:
    assert PrecisionContract.bf16().environment() == {}


def test_contract_of_a_configuration(tiny_config_path: Path) -> None:
    assert load(tiny_config_path).contract == NVFP4
    assert load(tiny_config_path, ["precision.rollout=bf16"]).contract == PrecisionContract.bf16()
    changed = load(tiny_config_path, ["rollout.temperature=0.8", "precision.bf16_layers=[1, 0]"]).contract
    assert changed.bf16_layers == (0, 1)
    assert [line.split(":")[0] for line in NVFP4.diff(changed)] == ["bf16_layers", "temperature"]


def test_how_the_trainer_rounds_is_not_part_of_the_contract(tiny_config_path: Path) -> None:
    for override in ("precision.trainer_forward=qat", "guidance.bits=4", "run.seed=5"):
        assert load(tiny_config_path, [override]).contract.fingerprint == NVFP4.fingerprint


def test_row_scale_per_shard_pins_the_number_of_shards(tiny_config_path: Path) -> None:
    contract = load(tiny_config_path, ["precision.fc2_row_scale=per_shard", "rollout.tensor_parallel=1"]).contract
    assert (contract.fc2_row_scale, contract.expert_tensor_parallel) == ("per_shard", 1)


@pytest.mark.parametrize("site", ["fc1_in", "fc2_in", "k", "v"])
def test_one_scale_for_all_tokens_is_refused(site: str) -> None:
    with pytest.raises(ValueError, match=rf"^{site}\.scale_scope='tensor': .*; use row or static$"):
        dataclasses.replace(NVFP4, **{site: SiteFormat(format="nvfp4", scale_scope="tensor")})
