"""Entry point of the worker processes: ``torchrun ... tests/dist/worker.py {cases,layout_cases} OUT [CASE ...]``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("dist", "support", "engine")]

if __name__ == "__main__":
    from megatron_trace.platform.device import prepare_megatron

    prepare_megatron()

    room = importlib.import_module(sys.argv.pop(1))
    room.main()
