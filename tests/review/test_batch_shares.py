"""Every rank must run equally many micro-batches, or the expert all-to-all waits for ever: refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_trace.config import ConfigError, load, validate_world_size

SMALL = ("trainer.micro_batch_size=2", "algorithm.samples_per_prompt=4", "algorithm.prompts_per_step=2", "evidence.prompts=2")


def start(path: Path, *overrides: str) -> None:
    given = {o.partition("=")[0]: o for o in (*SMALL, *overrides)}
    validate_world_size(load(path, given.values()), 2)


def test_equal_shares_are_accepted(tiny_config_path: Path) -> None:
    start(tiny_config_path)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        # 12 sequences = 2 ranks x 2 x 3, but prompts are dealt whole: 8 and 4 sequences
        (("algorithm.prompts_per_step=3",), "algorithm.prompts_per_step"),
        # rank 1 gets no prompt at all
        (("algorithm.prompts_per_step=1",), "algorithm.prompts_per_step"),
        (("evidence.prompts=3",), "evidence.prompts"),
        (("evidence.prompts=1",), "evidence.prompts"),
        # the calibrating forward uses this batch too, when there is no warm-up
        (("warmup.steps=0", "warmup.batch_size=5"), "warmup.batch_size"),
        (("warmup.batch_size=5",), "warmup.batch_size"),
    ],
)
def test_unequal_shares_are_refused(tiny_config_path: Path, override: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        start(tiny_config_path, *override)


def test_more_evidence_prompts_than_heldout_problems_are_refused(tiny_config_path: Path) -> None:
    with pytest.raises(ConfigError, match="evidence.prompts"):
        start(tiny_config_path, "task.heldout_problems=16", "evidence.prompts=64")
