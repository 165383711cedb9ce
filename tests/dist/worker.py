"""Entry point of the worker processes: ``torchrun ... tests/dist/worker.py OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("dist", "support", "engine")]

if __name__ == "__main__":
    from megatron_trace.platform.device import prepare_megatron

    prepare_megatron()

    import cases

    cases.main()
