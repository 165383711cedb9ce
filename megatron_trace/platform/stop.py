"""Ctrl-C and SIGTERM as a request that the loop answers between steps, on all ranks at once."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Installed once per process; ``agreed`` is collective, so that every rank leaves at the same step."""

    def __init__(self) -> None:
        self.signal: int = 0
        self._previous = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal:  # asked twice: do not make the user wait for the step
            raise KeyboardInterrupt
        self.signal = number

    def agreed(self) -> int:
        """The signal any rank received since the start, 0 for none; the same answer on every rank."""
        flag = torch.tensor(self.signal)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.signal = int(flag)
        return self.signal

    def restore(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
