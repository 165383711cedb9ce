"""From the configuration to the task it names."""

from __future__ import annotations

from megatron_trace.config import ConfigError, RunConfig
from megatron_trace.tasks.arithmetic import ArithmeticTask
from megatron_trace.tasks.base import Task
from megatron_trace.tasks.reasoning_gym import ReasoningGymTask


def build_task(config: RunConfig) -> Task:
    """The task of ``config``, both splits generated; raises ConfigError where task, model and lengths do not fit together."""
    section = config.task
    sizes = {
        "seed": config.run.seed,
        "train_problems": section.train_problems,
        "heldout_problems": section.heldout_problems,
        "max_prompt_tokens": section.max_prompt_tokens,
        "max_new_tokens": config.rollout.max_new_tokens,
    }
    task: Task
    if section.name == "arithmetic":
        task = ArithmeticTask(section.arithmetic, **sizes)
    else:
        task = ReasoningGymTask(section.reasoning_gym, **sizes)
    needed, rows = task.tokenizer.vocab_size, config.model.vocab_size
    if needed > rows:
        raise ConfigError(
            f"model.vocab_size={rows}: the tokenizer of task.name={section.name} has {needed} ids; "
            f"use at least {-(-needed // 64) * 64}"
        )
    return task
