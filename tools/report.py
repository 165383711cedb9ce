"""Write the HTML report of one run, or compare several: ``python tools/report.py RUN [RUN ...] [--output FILE]``.

RUN is the directory of a run (finished or not). The report is one file without network: ``RUN/report.html`` unless ``--output``
names another (with several runs it must). Exit code 2 when a RUN is no run or the file cannot be written, 0 otherwise; needs no
torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.diagnostics.analysis import Analysis, analyse  # noqa: E402
from megatron_trace.diagnostics.compare import with_distinct_names  # noqa: E402
from megatron_trace.diagnostics.report import render  # noqa: E402
from megatron_trace.diagnostics.run_data import NotARunError, read_run  # noqa: E402


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="directory of a run")
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN/report.html; needed for several runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all that the report shows")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.output is None and len(options.runs) > 1:
        return _refuse("--output: name the file to write when several runs are compared", as_json=options.json)
    output = options.output or options.runs[0] / "report.html"
    try:
        analyses = with_distinct_names([analyse(read_run(run)) for run in options.runs])
        output.write_text(render(analyses), encoding="utf-8")
    except NotARunError as error:
        return _refuse(str(error), as_json=options.json)
    except OSError as error:
        return _refuse(f"{output}: cannot be written ({error.strerror}); name another file with --output", as_json=options.json)
    if options.json:
        print(json.dumps({"output": str(output), "runs": [a.to_dict() for a in analyses], "errors": []}))
    else:
        _say(analyses, output)
    return 0


def _say(analyses: Sequence[Analysis], output: Path) -> None:
    for a in analyses:
        for finding in a.findings:
            name = f"{a.run.name}: " if len(analyses) > 1 else ""
            print(f"{finding.severity}: {name}{finding.text}")
    print(f"report written to {output} ({output.stat().st_size / 1024:.0f} KiB)")


def _refuse(problem: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"errors": [problem]}))
    print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
