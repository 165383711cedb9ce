"""Report what this machine can do: ``python tools/env.py [--json]``. Tries each thing, trusts no package's name."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.planning.capabilities import probe  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="env.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    found = probe()
    if options.json:
        print(json.dumps({"capabilities": [asdict(item) for item in found]}))
        return 0
    width = max(len(item.name) for item in found)
    for item in found:
        print(
            f"{'yes' if item.present else 'no ':3}  {item.name:{width}}  {item.detail}\n{'':{width + 7}}for {item.needed_for}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
