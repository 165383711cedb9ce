"""Problems, tokenizers and rules that score responses. Imports no torch."""

from megatron_trace.tasks.base import Problem, SupervisedBatch, Task
from megatron_trace.tasks.factory import build_task
from megatron_trace.tasks.tokenizer import CharTokenizer

__all__ = ["CharTokenizer", "Problem", "SupervisedBatch", "Task", "build_task"]
