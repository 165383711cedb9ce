"""Figures of whole plans, and the command line: exit codes, one line for each problem, no torch, and how long it takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.config import ConfigError, load
from megatron_trace.planning import plan
from megatron_trace.planning.suggest import suggest

TINY = "tests/unit/planning/tiny.yaml"
KEYS = (
    "world_size layout parameters_total parameters_per_rank memory_gib_per_rank guidance_bytes_per_token "
    "guidance_bytes_per_token_full guidance_bytes_per_step errors warnings"
).split()


def _preset(repository: Path, name: str, *overrides: str):  # type: ignore[no-untyped-def]
    return plan(load(repository / "configs" / "presets" / f"{name}.yaml", overrides, planned_only=True))


def test_the_papers_guidance_figures(repository: Path) -> None:
    found = _preset(repository, "qwen3_5_35b_a3b")
    assert found.guidance_bytes_per_token_full == 51_840 == 46_080 + 5_760
    assert found.guidance_bytes_per_token == 8_640 == 7_680 + 960
    assert found.guidance_row_scale_bytes_per_token == 20 * 4
    assert found.rates.tokens_per_step == 2**18 * 2**12
    assert round(found.rates.guidance_bytes_per_step_full / 2**40, 1) == 50.6
    assert found.rates.guidance_bytes_per_step * 6 == found.rates.guidance_bytes_per_step_full
    assert found.rates.guidance_full_seconds_storage / 3600 == pytest.approx(3.09, abs=0.01)
    fast = _preset(repository, "qwen3_5_35b_a3b", "cluster.storage_gb_s=300")
    assert fast.rates.guidance_full_seconds_storage / 60 == pytest.approx(3.09, abs=0.01)


@pytest.mark.parametrize(
    ("preset", "full", "compact"),
    [("qwen3_5_122b_a10b", 82_944 + 6_912, 13_824 + 1_152), ("qwen3_8_flash_next", 69_120 + 6_912, 11_520 + 1_152)],
)
def test_guidance_of_other_hybrid_models(repository: Path, preset: str, full: int, compact: int) -> None:
    found = _preset(repository, preset)
    assert (found.guidance_bytes_per_token_full, found.guidance_bytes_per_token) == (full, compact)


def test_keys_and_values_are_guided_only_where_there_is_a_cache(repository: Path) -> None:
    groups = {group.tensor: group for group in _preset(repository, "qwen3_5_35b_a3b").precision}
    assert groups["keys after RoPE (k)"].layers == tuple(range(3, 40, 4))
    assert groups["keys after RoPE (k)"].guided == (23, 27, 31, 35, 39)
    assert groups["routed expert input (fc1_in)"].guided == tuple(range(20, 40))


def test_every_shipped_configuration_can_be_planned(repository: Path) -> None:
    files = sorted((repository / "configs").glob("**/*.yaml"))
    assert len(files) >= 7
    for path in files:
        found = plan(load(path, planned_only=True))
        assert found.errors == (), path.name
        assert found.stages


def test_a_preset_without_a_size_asks_for_it(repository: Path, tmp_path: Path) -> None:
    text = (repository / "configs/presets/qwen3_8_2_4t_a95b.yaml").read_text().replace("  hidden_size: 8192\n", "")
    path = tmp_path / "unknown.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.hidden_size: required and not given; .* or give model\.hidden_size=VALUE$"):
        load(path, planned_only=True)
    assert plan(load(path, ["model.hidden_size=8192"], planned_only=True)).errors == ()


def test_compact_and_unguided_runs(tiny_config_path: Path) -> None:
    assert plan(load(tiny_config_path)).guidance_bytes_per_token == 2 * 192 * 3 // 16
    assert plan(load(tiny_config_path, ["guidance.bits=4", "guidance.layers=all"])).guidance_bytes_per_token == 432
    assert plan(load(tiny_config_path, ["precision.rollout=bf16"])).guidance_bytes_per_token == 0


# ---- the command ----------------------------------------------------------------------------------------------------------


PROGRAM = """
import runpy, sys
sys.modules["torch"] = None  # importing it fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(repository: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """tools/plan.py in a process of its own that cannot import torch, and the processor seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", PROGRAM, "tools/plan.py", *arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_json_of_the_largest_preset(repository: Path) -> None:
    done, seconds = _run(repository, "--config", "configs/presets/qwen3_8_2_4t_a95b.yaml", "--json", "--world-size", "256")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [key for key in KEYS if key not in found] == []
    assert found["world_size"] == 256
    assert found["parameters_total"] == pytest.approx(2.4e12, rel=0.03)
    assert seconds < 3


CASES = [
    # (id in cases, override, the one line on stderr)
    (
        "G01-text",
        "optimizer.learning_rate='1e-6'",
        "optimizer.learning_rate='1e-6': must be a number; write 1e-6 without quotes",
    ),
    ("G01-octal", "trainer.steps=012", "trainer.steps='012': must be an integer; write 12 without quotes or leading zeros"),
    ("G01-on", "evidence.enabled=on", "evidence.enabled='on': must be true or false"),
    ("G02", "rollout.temprature=1.0", "rollout.temprature=1.0: unknown key; did you mean rollout.temperature?"),
    (
        "G03",
        "trainer.micro_batch_size=3",
        "algorithm.prompts_per_step=16: 128 sequences (x samples_per_prompt 8) must be a multiple of 12 = world size 2 x "
        "trainer.micro_batch_size 3 x algorithm.updates_per_rollout 2; change one of them",
    ),
    (
        "G05",
        "precision.bf16_layers=[mlp.gate.]",
        "precision.bf16_layers[0]='mlp.gate.': must be an integer",
    ),
    (
        "G05-unmatched",
        "precision.bf16_layers=[7]",
        "precision.bf16_layers=[7]: layer 7 is outside 0..3 (model.num_layers=4); remove it",
    ),
    ("G07", "algorithm.advantage=gae", "algorithm.advantage='gae': must be one of grpo"),
    (
        "G08",
        "precision.fc2_row_scale=per_shard",
        "precision.fc2_row_scale='per_shard': the engine has 2 shards (rollout.tensor_parallel) and the trainer 1 "
        "(parallel.expert_tensor), so their scales differ; use max_reduced or equal sizes",
    ),
]


@pytest.mark.parametrize(("override", "line"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_bad_setting_is_one_line_and_code_2_in_time(repository: Path, override: str, line: str) -> None:
    done, seconds = _run(repository, "--config", TINY, override)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n")
    assert seconds < 1.5


def test_exponents_are_numbers(tiny_config_path: Path) -> None:
    """G01: a learning rate of 1e-6 is a float."""
    assert load(tiny_config_path, ["optimizer.learning_rate=1e-6"]).optimizer.learning_rate == 1e-6


def test_a_repeated_key_is_refused(repository: Path, tmp_path: Path) -> None:
    """G01: of two equal keys neither wins."""
    path = tmp_path / "twice.yaml"
    path.write_text((repository / TINY).read_text() + "\nrun:\n  name: other\n")
    done, _ = _run(repository, "--config", str(path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "run: given twice (first in line 2); keep one of the two" in done.stderr


def test_the_layout_is_printed(repository: Path) -> None:
    """G04: expert tensor parallelism stands in the table, and is not a copy of tensor parallelism."""
    done, _ = _run(repository, "--config", TINY, "parallel.tensor=4", "parallel.expert=4", "--json")
    assert done.returncode == 0, done.stderr
    layout = json.loads(done.stdout)["layout"]
    assert (layout["tensor"], layout["expert"], layout["expert_tensor"], layout["data"]) == (4, 4, 1, 1)
    table, _ = _run(repository, "--config", TINY)
    assert "expert tensor" in table.stdout and "ranks (2 of 2)" in table.stdout


def test_where_every_value_comes_from(repository: Path) -> None:
    """G06: one source, shown."""
    command = [
        sys.executable,
        "-m",
        "megatron_trace.config",
        TINY,
        "optimizer.beta2=0.9",
        "--provenance",
    ]
    lines = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "optimizer.beta1 = 0.9  # default" in lines
    assert "optimizer.beta2 = 0.9  # command line" in lines
    assert "optimizer.learning_rate = 0.0003  # tests/unit/planning/tiny.yaml" in lines


def test_the_environment_follows_the_recipe(tiny_config_path: Path) -> None:
    """G09: no variable of a quantised recipe is set for another."""
    assert load(tiny_config_path, ["precision.rollout=bf16"]).contract.environment() == {}
    assert load(tiny_config_path).contract.environment()["NVTE_NVFP4_ROW_SCALED_ACTIVATION"] == "1"


def test_for_run_refuses_what_the_launcher_refuses(repository: Path) -> None:
    arguments = ("--config", TINY, "trainer.recompute=full")
    assert _run(repository, *arguments)[0].returncode == 0
    done, _ = _run(repository, *arguments, "--for-run")
    assert (done.returncode, done.stderr) == (2, "error: trainer.recompute='full': not supported yet; use none\n")


def test_errors_are_json_too(repository: Path) -> None:
    done, _ = _run(repository, "--config", TINY, "parallel.expert=3", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["errors"] == ["parallel.expert=3: must divide model.num_experts=8; use one of 1, 2, 4, 8"]


def test_suggestions_are_legal_and_fit(repository: Path) -> None:
    path = "configs/presets/qwen3_235b_a22b.yaml"
    done, _ = _run(repository, "--config", path, "--suggest", "--json")
    assert done.returncode == 0, done.stderr
    suggestions = json.loads(done.stdout)["suggestions"]
    assert 1 <= len(suggestions) <= 8
    for item in suggestions:
        found = plan(load(repository / path, item["overrides"], planned_only=True))
        assert found.errors == ()
        assert round(found.fullest.memory.device / 2**30, 2) == item["memory_gib_per_rank"]


def test_suggestions_for_a_run_of_this_version(tiny_config_path: Path) -> None:
    """Expert parallelism alone is what the trainer runs; its memory is that of the modules it runs."""
    config = load(tiny_config_path, ["trainer.micro_batch_size=8"])
    plain = [item for item in suggest(config, world_size=4, most=1000) if (item.layout.tensor, item.layout.pipeline) == (1, 1)]
    experts = {item.layout.expert: item for item in plain if item.layout.context == 1}
    assert set(experts) == {1, 2, 4}
    for size, item in experts.items():
        found = plan(load(tiny_config_path, ["trainer.micro_batch_size=8", f"parallel.expert={size}"]), world_size=4)
        assert found.unsupported == () and found.fullest.memory.device == item.device_bytes


def test_no_layout_fits_is_said(repository: Path) -> None:
    done, _ = _run(repository, "--config", "configs/presets/qwen3_235b_a22b.yaml", "--suggest", "cluster.device_memory_gib=4")
    assert (done.returncode, done.stderr) == (2, "error: cluster: no layout fits; give more nodes, or trainer.recompute=full\n")
