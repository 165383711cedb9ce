"""Say where a run's mismatch comes from, by layer and site: ``python tools/replay_mismatch.py RUN``.

Reads what the run measured on its evidence trajectories (summary.json): |dlogp| of each way of rounding; per layer and site the
noise, the local gap under own scales (qat), nearest on the rollout's scale, whole codewords and one bit, the codes that differ
and how many are neighbours. Shares (marked *) are computed from those. Exit code 2 when RUN is no run or measured nothing, 0
otherwise; needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.diagnostics.analysis import analyse  # noqa: E402
from megatron_trace.diagnostics.replay import NoEvidenceError, attribute, show  # noqa: E402
from megatron_trace.diagnostics.run_data import NotARunError, read_run  # noqa: E402


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay_mismatch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a finished run")
    parser.add_argument("--updates-newer", type=int, help="only the evidence of a policy this many updates newer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        result = attribute(analyse(read_run(options.run)), updates_newer=options.updates_newer)
    except (NotARunError, NoEvidenceError) as error:
        if options.json:
            print(json.dumps({"errors": [str(error)]}))
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
    else:
        from rich.console import Console

        show(result, Console(width=None if sys.stdout.isatty() else 160, highlight=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
