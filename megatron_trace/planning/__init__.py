"""What a run needs before it starts: ranks, shapes, memory, guidance bytes, ports. Imports no torch."""

from megatron_trace.planning.layout import Layout
from megatron_trace.planning.plan import Plan, plan

__all__ = ["Layout", "Plan", "plan"]
