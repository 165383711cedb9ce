"""``python -m megatron_trace.config``: exit codes and what is printed where."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_trace.config import load
from megatron_trace.config.__main__ import main


def test_a_right_configuration_is_quiet(tiny_config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_config_path), "--world-size", "2", "run.seed=1"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["parallel.expert=3"], "error: parallel.expert=3: must divide model.num_experts=8; use one of 1, 2, 4, 8"),
        (["rollout.topp=1"], "error: rollout.topp=1: unknown key; did you mean rollout.top_p?"),
        (
            ["--world-size", "1"],
            "error: parallel.expert=2: must divide the world size 1; start a multiple of 2 processes or set parallel.expert to "
            "a divisor of 1",
        ),
    ],
)
def test_a_wrong_one_is_one_line_and_code_2(
    tiny_config_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main([str(tiny_config_path), *arguments]) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


def test_show_prints_every_setting(tiny_config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_config_path), "--show"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == load(tiny_config_path).resolved()
