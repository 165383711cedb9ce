"""Settings that cannot run, or that both sides would read differently: one clear line each, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_trace.config import ConfigError, load


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("run.seed=!!int abc", "run.seed"),
        ("run.seed=!!float x", "run.seed"),
        ("run.name=!!timestamp x", "run.name"),
        ("run.seed=" + "9" * 5000, "run.seed"),
        ("run.seed=" + "[" * 3000, "run.seed"),
        # Megatron-core refuses it only when the model is built
        ("model.num_experts_per_tok=1", "model.num_experts_per_tok"),
        # every frequency would be 1
        ("model.rope_theta=1.0", "model.rope_theta"),
        # torch's generators take 64 bits
        ("run.seed=99999999999999999999", "run.seed"),
        # cases/capture.md, unreported case 5: K guided and V not
        ("guidance.sites=[k]", "guidance.sites"),
        # logits / 1e-300 overflow: every log-probability is NaN
        ("rollout.temperature=1e-300", "rollout.temperature"),
    ],
)
def test_a_setting_that_cannot_run_is_refused(tiny_config_path: Path, override: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load(tiny_config_path, [override])


@pytest.mark.parametrize(
    "override",
    [
        "guidance.layers=[-1]",
        "guidance.sites=[fc2_in]",
        "evidence.stale_updates=[-1]",
        "guidance.layers=half",
        "rollout.top_p=0.9",
    ],
)
def test_one_mistake_is_one_line(tiny_config_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tiny_config_path, [override])
    assert len(error.value.problems) == 1, error.value.problems


def test_a_base_with_a_nul_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('base: "a\\0b"\n')
    with pytest.raises(ConfigError, match="base"):
        load(path)
