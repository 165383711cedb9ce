"""The main job as a user starts it, with a configuration that takes two seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from processes import ROOT, environment

SMALL = """\
run: {name: small}
model:
  {vocab_size: 64, hidden_size: 32, num_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,
   num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, rope_theta: 10000.0, max_position_embeddings: 64}
parallel: {expert: 1}
rollout: {max_new_tokens: 8, num_pages: 64, tensor_parallel: 2}
task:
  {heldout_problems: 8, train_problems: 64, max_prompt_tokens: 40,
   arithmetic: {operands: 2, max_operand: 9, word_problem_fraction: 0.0}}
warmup: {steps: 60, batch_size: 16, learning_rate: 1.0e-2}
algorithm: {prompts_per_step: 4, samples_per_prompt: 4, updates_per_rollout: 2}
trainer: {steps: 4, sequence_length: 48, micro_batch_size: 8}
evidence: {enabled: false}
"""
"""Learns enough in its warm-up that some groups have mixed rewards, so that the RL steps really move the weights."""


def small_config(directory: Path) -> Path:
    path = directory / "small.yaml"
    path.write_text(SMALL)
    return path


def command(config: Path, *overrides: str) -> list[str]:
    """One process, no torchrun: its exit code is the program's own."""
    return [sys.executable, str(ROOT / "launch" / "pretrain_rl.py"), "--config", str(config), *overrides]


def launch(config: Path, *overrides: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, f"run.output_dir={config.parent}", *overrides),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` without what a clock decides."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]
