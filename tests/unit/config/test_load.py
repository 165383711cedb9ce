"""Loading: every kind of bad input gives one line naming field, value and remedy; every shipped file loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.config import ConfigError, RunConfig, from_mapping, load, strict_yaml, validate_world_size
from megatron_trace.config.loading import provenance, read_mapping
from megatron_trace.config.validation import unsupported
from megatron_trace.guidance.spec import latter_half


def test_every_shipped_file_loads(repository: Path) -> None:
    files = sorted((repository / "configs").glob("**/*.yaml"))
    assert [path.name for path in files].count("tiny_moe_cpu.yaml") == 1
    for path in files:
        assert isinstance(load(path, planned_only=path.parent.name == "presets"), RunConfig)


def test_defaults_that_the_design_fixes(tiny_config_path: Path) -> None:
    config = load(tiny_config_path)
    assert config.precision.rollout == "nvfp4"
    assert config.trainer_forward == "guided"
    assert config.guidance.bits == 1
    assert config.guidance.sites == ("fc1_in", "k", "v")
    assert config.guidance.prompt_tokens is True
    assert config.rollout.tensor_parallel == 2
    assert config.parallel.expert == 2
    assert config.task.heldout_problems >= 512
    assert config.rollout.top_p == 1.0
    assert config.evidence.stale_updates == (0, 2)


def test_numbers_in_exponent_form_are_numbers(tiny_config_path: Path) -> None:
    exponents = ["optimizer.learning_rate=1e-6", "model.rms_norm_eps=1e-5", "algorithm.clip_low=1e-1"]
    config = load(tiny_config_path, [*exponents, "optimizer.min_learning_rate=null"])
    assert (config.optimizer.learning_rate, config.model.rms_norm_eps, config.algorithm.clip_low) == (1e-6, 1e-5, 0.1)


BAD_INPUT = [
    ("rollout.topp=0.5", "rollout.topp=0.5: unknown key; did you mean rollout.top_p?"),
    ("algorithm.top_p=0.5", "algorithm.top_p=0.5: unknown key; did you mean rollout.top_p?"),
    ("learning_rate=1", "learning_rate=1: unknown key; did you mean warmup.learning_rate or optimizer.learning_rate?"),
    ("precison.rollout=bf16", "precison={'rollout': 'bf16'}: unknown key; did you mean precision?"),
    ("task.arithmetic.operand=2", "task.arithmetic.operand=2: unknown key; did you mean task.arithmetic.operands?"),
    ("run.qqqq=1", "run.qqqq=1: unknown key; section run knows name, output_dir, seed"),
    ("model.hidden=64", "model.hidden=64: unknown key; did you mean model.hidden_size?"),
    ("trainer.steps=1e3", "trainer.steps=1000.0: must be an integer; write 1000"),
    ("trainer.steps=012", "trainer.steps='012': must be an integer; write 12 without quotes or leading zeros"),
    ("trainer.steps=true", "trainer.steps=True: must be an integer"),
    ("trainer.steps=many", "trainer.steps='many': must be an integer"),
    ("trainer.steps=-1", "trainer.steps=-1: must be at least 0"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate='fast': must be a number"),
    ("optimizer.learning_rate='1e-6'", "optimizer.learning_rate='1e-6': must be a number; write 1e-6 without quotes"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate=0: must be greater than 0"),
    ("optimizer.learning_rate=.nan", "optimizer.learning_rate=nan: must be a finite number"),
    ("optimizer.learning_rate=true", "optimizer.learning_rate=True: must be a number"),
    ("evidence.enabled=on", "evidence.enabled='on': must be true or false"),
    ("run.name=1", "run.name=1: must be text; put it in quotes"),
    ("run.name=../x", "run.name='../x': must match ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    ("precision.rollout=nvpf4", "precision.rollout='nvpf4': must be one of nvfp4, bf16; did you mean nvfp4?"),
    ("guidance.bits=3", "guidance.bits=3: must be one of 1, 4"),
    ("guidance.bits=true", "guidance.bits=True: must be a number, not true or false"),
    ("guidance.layers=later_half", "guidance.layers='later_half': must be latter_half, all or a list of 0-based layer numbers"),
    ("guidance.layers=[true]", "guidance.layers=[True]: must be latter_half, all or a list of 0-based layer numbers"),
    ("guidance.layers=[2, 4]", "guidance.layers=[2, 4]: layer 4 is outside 0..3 (model.num_layers=4); remove it"),
    ("guidance.layers=[2, 2]", "guidance.layers=[2, 2]: a layer is listed twice; list each once"),
    ("guidance.layers=[]", "guidance.layers=(): no layer is left to guide; name some or use precision.trainer_forward=qat"),
    ("guidance.sites=[k, q]", "guidance.sites[1]='q': must be one of fc1_in, k, v"),
    ("guidance.sites=k", "guidance.sites='k': must be a list; write [k]"),
    ("guidance.sites=", "guidance.sites=None: must be a list in brackets"),
    ("guidance.sites=[k]", "guidance.sites=['k']: K and V are guided together; add v or remove k"),
    ("guidance.sites=[fc1_in, v]", "guidance.sites=['fc1_in', 'v']: K and V are guided together; add k or remove v"),
    ("guidance.sites=[]", "guidance.sites=[]: must have at least 1 entries"),
    ("guidance.layers=[-1]", "guidance.layers=[-1]: must be latter_half, all or a list of 0-based layer numbers"),
    ("guidance.sites=[fc2_in]", "guidance.sites[0]='fc2_in': must be one of fc1_in, k, v; did you mean fc1_in?"),
    ("evidence.stale_updates=[-1]", "evidence.stale_updates[0]=-1: must be at least 0"),
    ("evidence.stale_updates=[2]", "evidence.stale_updates=[2]: the summary needs the table at 0; use [0, 2]"),
    ("evidence.prompts=513", "evidence.prompts=513: must be at most task.heldout_problems=512; use 512 or fewer"),
    ("model.rope_theta=1.0", "model.rope_theta=1.0: must be greater than 1"),
    (
        "model.num_experts_per_tok=1",
        "model.num_experts_per_tok=1: not supported yet (the router's softmax over one selected logit is always 1); "
        "use at least 2",
    ),
    (
        "run.seed=9223372036854775808",
        "run.seed=9223372036854775808:1: 9223372036854775808 has more than 64 bits; write a smaller number",
    ),
    ("run.seed=!!int abc", "run.seed=!!int abc:1: 'abc' is no int; write a plain value"),
    ('run.output_dir="a\\0b"', "run.output_dir='a\\x00b': must not hold a NUL byte"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate='nan': must be a finite number"),
    ("optimizer.learning_rate=012", "optimizer.learning_rate='012': must be a number; write 12.0 without quotes"),
    (
        "task.reasoning_gym.params=&a {x: *a}",
        "task.reasoning_gym.params=&a {x: *a}:1:1: not valid YAML: found unconstructable "
        "recursive node; mend the line or quote the value",
    ),
    ("guidance.sites=[k, k]", "guidance.sites=['k', 'k']: a site is listed twice; list each once"),
    ("precision.bf16_layers=[1.0]", "precision.bf16_layers[0]=1.0: must be an integer; write 1"),
    ("precision.bf16_layers=[9]", "precision.bf16_layers=[9]: layer 9 is outside 0..3 (model.num_layers=4); remove it"),
    ("model=3", "model=3: must be a section: indented key: value lines"),
    ("warmup=", "warmup=None: must be a section: indented key: value lines"),
    ("model.hidden_size=100", "model.hidden_size=100: must be a multiple of 16 (one NVFP4 block); use 112"),
    ("model.head_dim=24", "model.head_dim=24: must be a multiple of 16 (one NVFP4 block); use 32"),
    ("model.moe_intermediate_size=40", "model.moe_intermediate_size=40: must be a multiple of 16 (one NVFP4 block); use 48"),
    (
        "model.moe_intermediate_size=48",
        "rollout.tensor_parallel=2: model.moe_intermediate_size=48 must be a multiple of 2 x 16 for shards of whole NVFP4 "
        "blocks; use 64 or a smaller rollout.tensor_parallel",
    ),
    (
        "rollout.tensor_parallel=4",
        "rollout.tensor_parallel=4: must divide model.num_key_value_heads=2; use a divisor of 2",
    ),
    (
        "model.num_attention_heads=7",
        "model.num_key_value_heads=2: must divide model.num_attention_heads=7; use a divisor of 7",
    ),
    (
        "model.num_experts_per_tok=9",
        "model.num_experts_per_tok=9: a token cannot go to more than model.num_experts=8 experts; use at most 8",
    ),
    ("parallel.expert=3", "parallel.expert=3: must divide model.num_experts=8; use one of 1, 2, 4, 8"),
    (
        "parallel.tensor=4",
        "parallel.tensor=4: the trainer cuts K and V guidance by head, so it must divide model.num_key_value_heads=2",
    ),
    ("parallel.pipeline=3", "parallel.pipeline=3: 3 chunks (x virtual_pipeline 1) must divide model.num_layers=4"),
    (
        "parallel.expert_tensor=3",
        "parallel.expert_tensor=3: must leave shards of model.moe_intermediate_size=64 of whole blocks of 16",
    ),
    (
        "precision.fc2_row_scale=per_shard",
        "precision.fc2_row_scale='per_shard': the engine has 2 shards (rollout.tensor_parallel) and the trainer 1 "
        "(parallel.expert_tensor), so their scales differ; use max_reduced or equal sizes",
    ),
    (
        "rollout.top_p=0.9",
        "rollout.top_p=0.9: importance sampling (algorithm.objective=tis) needs the whole distribution, and nucleus sampling "
        "cuts it; use rollout.top_p=1.0 or algorithm.objective=naive_proximal",
    ),
    (
        "algorithm.kl_coef=0.1",
        "algorithm.kl_coef=0.1: not supported yet (no reference policy is kept); use 0",
    ),
    ("rollout.temperature=0", "rollout.temperature=0: must be at least 0.0001"),
    (
        "algorithm.updates_per_rollout=3",
        "algorithm.updates_per_rollout=3: must divide the 128 sequences of a step (prompts_per_step 16 x samples_per_prompt 8)"
        "; use a divisor of 128",
    ),
    (
        "trainer.sequence_length=63",
        "trainer.sequence_length=63: must hold task.max_prompt_tokens=40 + rollout.max_new_tokens=24; use at least 64",
    ),
    (
        "trainer.sequence_length=512",
        "trainer.sequence_length=512: must be at most model.max_position_embeddings=256; lower it",
    ),
    (
        "rollout.num_pages=3",
        "rollout.num_pages=3: a sequence of task.max_prompt_tokens + rollout.max_new_tokens = 64 tokens needs 4 pages of 16; "
        "use at least 4",
    ),
    (
        "optimizer.min_learning_rate=1.0",
        "optimizer.min_learning_rate=1.0: must be at most optimizer.learning_rate=0.0001; lower it or leave it out",
    ),
    (
        "task.reasoning_gym.dataset=leg_counting",
        "task.reasoning_gym: given, but task.name=arithmetic does not read it; remove it or set task.name=reasoning_gym",
    ),
    ("run.name.first=x", "run.name.first='x': run.name is the value 'tiny', not a section; set run.name itself"),
    ("run.name", "run.name: not an override; write section.key=value"),
    ("=3", "=3: not an override; write section.key=value"),
]

TINY = """\
run: {name: tiny}
model:
  {vocab_size: 64, hidden_size: 128, num_layers: 4, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 16,
   num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 64, max_position_embeddings: 256}
rollout: {max_new_tokens: 24}
task: {max_prompt_tokens: 40}
warmup: {steps: 10}
algorithm: {prompts_per_step: 16, samples_per_prompt: 8}
trainer: {steps: 2, sequence_length: 64}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(("override", "message"), BAD_INPUT, ids=[override for override, _ in BAD_INPUT])
def test_bad_input_is_one_line_with_field_value_and_remedy(tiny: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny, [override])
    assert str(caught.value) == message


def test_missing_settings_are_named(tiny: Path) -> None:
    values = read_mapping(tiny)
    del values["run"]
    del values["model"]["vocab_size"]
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    assert caught.value.problems == (
        "run: required and not given; add it to the file or give run=VALUE",
        "model.vocab_size: required and not given; add it to the file or give model.vocab_size=VALUE",
    )


def test_several_problems_are_all_told_one_line_each(tiny: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny, ["parallel.expert=3", "rollout.top_p=0.5"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["parallel.expert=3", "rollout.top_p=0.5"]


def test_overrides_replace_values_lists_and_create_sections(tiny: Path) -> None:
    config = load(
        tiny, ["run.seed=7", "guidance.layers=[1, 3]", "checkpoint.directory=/tmp/c=d", "evidence.stale_updates=[0, 1]"]
    )
    assert config.run.seed == 7
    assert config.guided_layers == (1, 3)
    assert config.checkpoint.directory == "/tmp/c=d"
    assert config.evidence.stale_updates == (0, 1)


def test_an_override_given_twice_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run\.seed=2: run\.seed is given twice on the command line; keep one$"):
        load(tiny, ["run.seed=1", "run.seed=2"])


def test_base_is_merged_by_section_and_goes_one_level(tiny: Path) -> None:
    child = tiny.with_name("child.yaml")
    child.write_text("base: tiny.yaml\nrun: {seed: 3}\nguidance: {layers: [0]}\n")
    config = load(child, ["run.seed=4"])
    assert (config.run.name, config.run.seed, config.guided_layers) == ("tiny", 4, (0,))

    grandchild = tiny.with_name("grandchild.yaml")
    grandchild.write_text("base: child.yaml\n")
    with pytest.raises(ConfigError, match=r"base=child\.yaml: .* has a base of its own; only one level is allowed"):
        load(grandchild)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: 3\n", "base=3: must be the path of one YAML file"),
        ("- 1\n", "holds [1]; must hold sections"),
        ("", "holds None; must hold sections"),
        ("run:\n  seed: 1\n  seed: 2\n", ":3: seed: given twice (first in line 2); keep one"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file or directory\); give the path"):
        load(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(binary)


@pytest.mark.parametrize(
    ("rollout", "forward", "resolved"),
    [
        ("nvfp4", "auto", "guided"),
        ("bf16", "auto", "bf16"),
        ("nvfp4", "qat", "qat"),
        ("nvfp4", "w4a16", "w4a16"),
        ("nvfp4", "bf16", "bf16"),
        ("bf16", "bf16", "bf16"),
    ],
)
def test_trainer_forward_follows_the_rollout(tiny: Path, rollout: str, forward: str, resolved: str) -> None:
    config = load(tiny, [f"precision.rollout={rollout}", f"precision.trainer_forward={forward}"])
    assert config.trainer_forward == resolved
    assert bool(config.guided_layers) == (resolved == "guided")


@pytest.mark.parametrize("forward", ["guided", "qat", "w4a16"])
def test_rounding_forwards_need_a_quantised_rollout(tiny: Path, forward: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny, ["precision.rollout=bf16", f"precision.trainer_forward={forward}"])
    assert str(caught.value) == (
        f"precision.trainer_forward='{forward}': needs precision.rollout=nvfp4, but the rollout is bf16; "
        "use auto or bf16, or precision.rollout=nvfp4"
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 40])
def test_guided_layers_are_those_of_the_guidance_room(tiny: Path, layers: int) -> None:
    config = load(tiny, [f"model.num_layers={layers}"]) if layers > 1 else None
    if config is None:
        with pytest.raises(ConfigError, match=r"^guidance\.layers='latter_half': no layer is left to guide"):
            load(tiny, ["model.num_layers=1"])
    else:
        assert config.guided_layers == latter_half(layers)


def test_layers_in_bf16_are_not_guided(tiny: Path) -> None:
    assert load(tiny, ["precision.bf16_layers=[3]"]).guided_layers == (2,)
    assert load(tiny, ["precision.bf16_layers=[0]", "guidance.layers=all"]).guided_layers == (1, 2, 3)
    with pytest.raises(
        ConfigError, match=r"layer 3 is in precision\.bf16_layers and not rounded; remove it from one of the two"
    ):
        load(tiny, ["precision.bf16_layers=[3]", "guidance.layers=[2, 3]"])


@pytest.mark.parametrize("objective", ["tis", "acr", "decoupled", "naive_behavior"])
def test_a_nucleus_is_refused_with_importance_sampling(tiny: Path, objective: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.top_p=0\.9: importance sampling \(algorithm\.objective={objective}\)"):
        load(tiny, ["rollout.top_p=0.9", f"algorithm.objective={objective}"])


def test_a_nucleus_is_allowed_without_importance_sampling(tiny: Path) -> None:
    assert load(tiny, ["rollout.top_p=0.9", "algorithm.objective=naive_proximal"]).rollout.top_p == 0.9


def test_world_size_accepts_what_divides(tiny: Path) -> None:
    config = load(tiny)
    validate_world_size(config, 2)
    validate_world_size(config, 4)


def test_world_size_errors_name_the_numbers(tiny: Path) -> None:
    config = load(tiny, ["warmup.batch_size=64", "trainer.micro_batch_size=32"])
    with pytest.raises(ConfigError) as caught:
        validate_world_size(config, 3)
    assert caught.value.problems == (
        "parallel.expert=2: must divide the world size 3; start a multiple of 2 processes or set parallel.expert to "
        "a divisor of 3",
        "algorithm.prompts_per_step=16: 128 sequences (x samples_per_prompt 8) must be a multiple of 96 = world size 3 x "
        "trainer.micro_batch_size 32 x algorithm.updates_per_rollout 1; change one of them",
        "warmup.batch_size=64: must be a multiple of the world size 3; the nearest above is 66",
        "evidence.prompts=32: must be a multiple of the world size 3; the nearest above is 33",
    )


def test_a_batch_smaller_than_the_data_parallel_size_is_refused(tiny: Path) -> None:
    config = load(tiny, ["algorithm.prompts_per_step=1", "algorithm.samples_per_prompt=8", "trainer.micro_batch_size=3"])
    with pytest.raises(
        ConfigError, match="8 sequences .* must be a multiple of 24 = world size 8 x trainer.micro_batch_size 3"
    ):
        validate_world_size(config, 8)


def test_shares_of_prompts_are_whole_and_equal(tiny: Path) -> None:
    overrides = ["algorithm.prompts_per_step=3", "trainer.micro_batch_size=4", "evidence.prompts=31", "warmup.batch_size=5"]
    with pytest.raises(ConfigError) as caught:
        validate_world_size(load(tiny, [*overrides, "warmup.steps=0"]), 2)
    assert caught.value.problems == (
        "warmup.batch_size=5: must be a multiple of the world size 2; the nearest above is 6",
        "algorithm.prompts_per_step=3: must be a multiple of the world size 2; the nearest above is 4",
        "evidence.prompts=31: must be a multiple of the world size 2; the nearest above is 32",
    )
    even = ["algorithm.prompts_per_step=4", "trainer.micro_batch_size=4", "warmup.batch_size=6", "evidence.enabled=false"]
    validate_world_size(load(tiny, even), 2)


def test_an_integer_given_from_python_is_bounded_too() -> None:
    with pytest.raises(ConfigError, match=r"^run\.seed=9223372036854775808: must be less than 9223372036854775808$"):
        from_mapping(strict_yaml.parse(TINY, source="tiny") | {"run": {"name": "x", "seed": 2**63}})


def test_resolved_round_trips_and_holds_every_setting(tiny: Path) -> None:
    config = load(tiny, ["guidance.layers=[1]"])
    values = config.resolved()
    assert values["guidance"] == {"bits": 1, "layers": [1], "sites": ["fc1_in", "k", "v"], "prompt_tokens": True}
    assert set(values) == set(RunConfig.model_fields)
    del values["task"]["reasoning_gym"]
    assert from_mapping(values).resolved() == config.resolved()


def test_a_configuration_cannot_be_changed(tiny: Path) -> None:
    config = load(tiny)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]


def test_loading_imports_no_torch(repository: Path) -> None:
    program = "import sys; from megatron_trace.config import load; load(sys.argv[1]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "configs/tiny_moe_cpu.yaml"]
    assert subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_provenance_names_file_base_and_command_line(tiny: Path) -> None:
    child = tiny.with_name("child.yaml")
    child.write_text("base: tiny.yaml\nrun: {seed: 3}\n")
    found = provenance(child, ["trainer.steps=1"])
    assert (found["run.seed"], found["run.name"]) == (str(child), str(tiny))
    assert found["trainer.steps"] == "command line"
    assert "run.output_dir" not in found


HYBRID = ["model.family=qwen3_5_moe", "model.full_attention_interval=2"]


def test_a_hybrid_stack_names_its_sizes(tiny: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny, HYBRID, planned_only=True)
    assert len(caught.value.problems) == 5
    assert caught.value.problems[0] == (
        "model.linear_num_key_heads=0: full_attention_interval=2 leaves linear-attention layers, which need it; give "
        "model.linear_num_key_heads=VALUE"
    )
    sizes = ["key_heads=4", "value_heads=6"]
    given = [*HYBRID, *(f"model.linear_num_{size}" for size in sizes)]
    given += ["model.linear_key_head_dim=16", "model.linear_value_head_dim=16", "model.linear_conv_kernel_dim=4"]
    with pytest.raises(ConfigError, match=r"^model\.linear_num_value_heads=6: must be a multiple of .*; use 8$"):
        load(tiny, given, planned_only=True)
    given[3] = "model.linear_num_value_heads=8"
    assert load(tiny, given, planned_only=True).model.kv_layers == (1, 3)
    with pytest.raises(ConfigError, match=r"^model\.family='qwen3_5_moe': not supported yet; use qwen3_moe$"):
        load(tiny, given)


PLANNED_ONLY = [
    ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline=2: needs parallel.pipeline of 2 or more; use 1"),
    ("rollout.tensor_parallel=4", "rollout.tensor_parallel=4: must divide model.num_key_value_heads=2; use a divisor of 2"),
    ("rollout.engine=sglang", "rollout.engine='sglang': not supported yet; use embedded"),
    ("rollout.placement=ray", "rollout.placement='ray': not supported yet; use local"),
    ("rollout.expert_parallel=2", "rollout.expert_parallel=2: not supported yet; use 1"),
    ("cluster.rollout_nodes=1", "cluster.rollout_nodes=1: not supported yet (engines live in the trainer); use 0"),
    ("trainer.recompute=full", "trainer.recompute='full': not supported yet; use none"),
    ("model.mtp_num_layers=1", "model.mtp_num_layers=1: not supported yet; use 0"),
    ("model.attention_output_gate=true", "model.attention_output_gate=True: not supported yet; use false"),
]


@pytest.mark.parametrize(("override", "message"), PLANNED_ONLY, ids=[override for override, _ in PLANNED_ONLY])
def test_what_this_version_does_not_run_can_only_be_planned(tiny: Path, override: str, message: str) -> None:
    assert unsupported(load(tiny, [override], planned_only=True)) == (message,)
    with pytest.raises(ConfigError) as caught:
        load(tiny, [override])
    assert caught.value.problems == (message,)
