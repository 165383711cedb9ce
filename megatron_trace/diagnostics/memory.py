"""Peak resident memory of this process."""

from __future__ import annotations

import resource
import sys


class PeakMemory:
    """High-water mark kept by the kernel since the process started."""

    def gib(self) -> float:
        """Peak resident set of this process in GiB."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**30 if sys.platform == "darwin" else 2**20)
