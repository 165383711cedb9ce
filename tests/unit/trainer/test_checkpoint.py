"""Checkpoints of a trainer: everything comes back bit for bit, incomplete ones do not count, others' are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from trainers import batches_of, rollout, run_config, samples_of, step, trainer_of

from megatron_trace.config import RunConfig
from megatron_trace.trainer import checkpoint
from megatron_trace.trainer.checkpoint import CheckpointError, changed_settings, checkpoints, find, load, save, set_aside
from megatron_trace.trainer.megatron import MegatronTrainer
from megatron_trace.trainer.refit import build_bundle


def config_of(dtype: str = "bfloat16") -> RunConfig:
    return run_config(precision={"compute_dtype": dtype})


def progress(step: int) -> dict[str, Any]:
    return {"warmup_steps": 10, "step": step, "rewards": [0.5] * step}


def moments(trainer: MegatronTrainer) -> list[torch.Tensor]:
    """Master weights, both Adam moments and step counts of every parameter, in order."""
    out = []
    for optimizer in checkpoint._inner_optimizers(trainer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                out.append(p.detach())
                out += [torch.as_tensor(v) for _, v in sorted(optimizer.state[p].items())]
    return out


def train(trainer: MegatronTrainer, steps: range) -> list[float]:
    samples = samples_of(rollout(trainer.config, tensor_parallel=2))
    norms = []
    for i in steps:
        batches = batches_of(trainer.config, samples[i % 2 :: 2])
        norms.append(step(trainer, batches, denominator=30.0, learning_rate=1e-3 * (i + 1)).result.grad_norm)
        trainer.calibrate_kv()
    return norms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_continues_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    config = config_of(dtype)
    whole = trainer_of(config)
    train(whole, range(3))
    torch.manual_seed(5)
    save(tmp_path, whole, progress(3), keep_last=1)
    drawn = torch.rand(4)
    expected_norms = train(whole, range(3, 6))

    resumed = MegatronTrainer(config)
    torch.manual_seed(99)
    assert load(find(tmp_path, config, world_size=1), resumed) == progress(3)
    assert torch.equal(torch.rand(4), drawn), "random state"
    assert resumed.version == 3
    assert train(resumed, range(3, 6)) == expected_norms
    assert resumed.version == whole.version == 6 and resumed.kv_amax() == whole.kv_amax()
    for (name, a), (_, b) in zip(resumed.gpt.named_parameters(), whole.gpt.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ours, theirs = moments(resumed), moments(whole)
    assert len(ours) == len(theirs) >= 4 * len(list(whole.gpt.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    bundles = [build_bundle(t, quantized=True, contract_fingerprint="c") for t in (resumed, whole)]
    assert bundles[0].kv_amax == bundles[1].kv_amax
    for name, weight in bundles[0].quantized.items():
        assert torch.equal(weight.codes, bundles[1].quantized[name].codes), name


def test_a_checkpoint_before_any_optimiser_step_can_be_resumed(tmp_path: Path) -> None:
    config = config_of()
    save(tmp_path, trainer_of(config), progress(0), keep_last=1)
    resumed, fresh = MegatronTrainer(config), trainer_of(config)
    load(find(tmp_path, config, world_size=1), resumed)
    assert train(resumed, range(2)) == train(fresh, range(2))


@pytest.fixture(scope="module")
def trainer(lone_process: None) -> MegatronTrainer:
    return trainer_of(config_of())


def test_partial_and_unfinished_directories_do_not_count(tmp_path: Path, trainer: MegatronTrainer) -> None:
    assert checkpoints(tmp_path) == [] and checkpoints(tmp_path / "absent") == []
    good = save(tmp_path, trainer, progress(3), keep_last=2)
    assert good.name == "step_000013" and sorted(p.name for p in good.iterdir()) == ["manifest.json", "rank_0.pt"]
    (tmp_path / ".step_000020.partial").mkdir()
    (tmp_path / ".step_000020.partial" / "manifest.json").write_text("{}")
    (tmp_path / "step_000021").mkdir()
    (tmp_path / "step_000021" / "rank_0.pt").write_bytes(b"")
    assert checkpoints(tmp_path) == [good] and find(tmp_path, trainer.config, world_size=1) == good


def test_a_save_that_dies_half_way_leaves_the_last_checkpoint(
    tmp_path: Path, trainer: MegatronTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(tmp_path, trainer, progress(3), keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda *_a, **_k: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path, trainer, progress(4), keep_last=1)
    assert checkpoints(tmp_path) == [good]
    assert save(tmp_path, trainer, progress(4), keep_last=1).name == "step_000014", "what is left of it is no obstacle"
    assert [p.name for p in tmp_path.iterdir()] == ["step_000014"]


def test_only_the_newest_are_kept_and_one_step_is_saved_once(tmp_path: Path, trainer: MegatronTrainer) -> None:
    for i in (1, 2, 2, 9, 10):
        save(tmp_path, trainer, progress(i), keep_last=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000019", "step_000020"]
    assert json.loads((tmp_path / "step_000020" / "manifest.json").read_text())["progress"] == progress(10)


def test_none_to_resume_from(tmp_path: Path, trainer: MegatronTrainer) -> None:
    with pytest.raises(CheckpointError, match=f"^checkpoint.resume=true: {tmp_path} holds no complete checkpoint; use false"):
        find(tmp_path, trainer.config, world_size=1)


@pytest.mark.parametrize(
    ("other", "world", "difference"),
    [
        ({}, 2, "world_size=1, this run has 2"),
        ({"parallel": {"expert": 2}}, 1, "parallel.expert=1, this run has 2"),
        ({"model": tiny_config(num_experts=8)}, 1, "model.num_experts=4, this run has 8"),
        ({"precision": {"rollout": "bf16"}}, 1, "contract.fc1_in.format='nvfp4', this run has 'bf16'"),
        ({"run": {"name": "test", "seed": 1}}, 1, "run.seed=0, this run has 1"),
        ({"task": {"max_prompt_tokens": 23}}, 1, "task.max_prompt_tokens=24, this run has 23"),
        ({"task": {"arithmetic": {"operands": 4}}}, 1, "task.arithmetic.operands=3, this run has 4"),
        ({"warmup": {"steps": 2}}, 1, "warmup.steps=0, this run has 2"),
        ({"rollout": {"temperature": 0.5}}, 1, "contract.temperature=1.0, this run has 0.5"),
        ({"precision": {"bf16_layers": [0]}, "guidance": {"layers": [1]}}, 1, r"contract.bf16_layers=\[\], this run has \[0\]"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, trainer: MegatronTrainer, other: dict, world: int, difference: str) -> None:
    path = save(tmp_path, trainer, progress(1), keep_last=1)
    with pytest.raises(CheckpointError) as caught:
        find(tmp_path, run_config(**other), world_size=world)
    message = str(caught.value)
    assert message.startswith(f"checkpoint.resume=true: {path} was saved with ") and "\n" not in message
    assert re.search(difference, message), message


def test_settings_that_may_change_between_parts_of_a_run_may(tmp_path: Path, trainer: MegatronTrainer) -> None:
    path = save(tmp_path, trainer, progress(1), keep_last=1)
    longer = run_config(trainer={"steps": 9}, optimizer={"learning_rate": 3e-4}, guidance={"bits": 1})
    assert find(tmp_path, longer, world_size=1) == path
    assert changed_settings(path, longer) == [
        "guidance.bits=1 (was 4)",
        "optimizer.learning_rate=0.0003 (was 0.0001)",
        "trainer.steps=9 (was 1)",
    ]
    elsewhere = run_config(run={"name": "other"}, checkpoint={"resume": True, "directory": "x"})
    assert changed_settings(path, elsewhere) == []


def test_earlier_checkpoints_are_set_aside_not_mixed_in(tmp_path: Path, trainer: MegatronTrainer) -> None:
    """An older, longer run's would sort as the newest: this run's would be deleted, and resuming would take the other's."""
    directory = tmp_path / "checkpoints"
    assert set_aside(directory) is None
    for number in (1, 2):
        old = save(directory, trainer, progress(90), keep_last=2)
        assert set_aside(directory) == tmp_path / f"checkpoints.{number}" and not directory.exists()
        assert (tmp_path / f"checkpoints.{number}" / old.name / "rank_0.pt").is_file()
    new = save(directory, trainer, progress(5), keep_last=2)
    assert find(directory, trainer.config, world_size=1) == new


def test_another_set_of_parameters_is_refused(tmp_path: Path, trainer: MegatronTrainer) -> None:
    path = save(tmp_path, trainer, progress(1), keep_last=1)
    state = torch.load(path / "rank_0.pt", weights_only=True)
    del state["weights"]["decoder.final_layernorm.weight"]
    torch.save(state, path / "rank_0.pt")
    with pytest.raises(CheckpointError, match="parameters differ from the checkpoint's: decoder.final_layernorm.weight"):
        load(path, trainer)
