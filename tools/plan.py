"""Plan a run without starting it: ``python tools/plan.py --config configs/X.yaml [key=value ...]``.

Prints ranks and groups, parameters and memory of each rank, guidance and refit traffic, ports, and all that is wrong. Exit code
2 when the configuration or the layout cannot work, 0 otherwise; needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.config import ConfigError, RunConfig, load  # noqa: E402
from megatron_trace.planning import plan  # noqa: E402


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument("--world-size", type=int, help="number of trainer ranks (default: those of the cluster section)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--for-run", action="store_true", help="refuse also what this version's trainer does not run yet")
    parser.add_argument("--all-ranks", action="store_true", help="list every rank")
    parser.add_argument("--suggest", action="store_true", help="search the cluster's layouts and print the best that fit")
    parser.add_argument("--simulate", action="store_true", help="simulate steps of a run of this size from its constants")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(arguments)
    if options.world_size is not None and options.world_size < 1:
        return _refuse([f"--world-size={options.world_size}: must be at least 1"], as_json=options.json)
    try:
        config = load(options.config, options.overrides, planned_only=not options.for_run)
    except ConfigError as error:
        return _refuse(error.problems, as_json=options.json)
    if options.suggest:
        return _suggest(config, world_size=options.world_size, as_json=options.json)
    if options.simulate:
        return _simulate(config, world_size=options.world_size, as_json=options.json)
    found = plan(config, world_size=options.world_size)
    if options.json:
        print(json.dumps(found.to_dict()))
    elif not found.errors:
        from rich.console import Console

        from megatron_trace.planning import render

        render.show(found, Console(width=None if sys.stdout.isatty() else 160), all_ranks=options.all_ranks)
    if found.errors:
        _print_errors(found.errors)
        return 2
    return 0


def _refuse(problems: Sequence[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"errors": list(problems), "warnings": []}))
    _print_errors(problems)
    return 2


def _print_errors(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


def _suggest(config: RunConfig, *, world_size: int | None, as_json: bool) -> int:
    from megatron_trace.planning.plan import GIB
    from megatron_trace.planning.suggest import suggest

    found = suggest(config, world_size=world_size)
    if not found:
        return _refuse(["cluster: no layout fits; give more nodes, or trainer.recompute=full"], as_json=as_json)
    rows = [
        {
            "layout": item.layout.to_dict(),
            "memory_gib_per_rank": round(item.device_bytes / GIB, 2),
            "pipeline_waits": round(item.bubble, 4),
            "experts_within_node": item.expert_groups_per_node,
            "overrides": list(item.overrides),
        }
        for item in found
    ]
    if as_json:
        print(json.dumps({"suggestions": rows, "errors": [], "warnings": []}))
        return 0
    for row in rows:
        print(f"{row['memory_gib_per_rank']:8.2f} GiB  waits {row['pipeline_waits']:5.1%}  {' '.join(row['overrides'])}")
    return 0


def _simulate(config: RunConfig, *, world_size: int | None, as_json: bool) -> int:
    from megatron_trace.planning.simulation import simulate_config

    try:
        result = simulate_config(config, world_size=world_size)
    except ConfigError as error:
        return _refuse(error.problems, as_json=as_json)
    print(json.dumps(result.to_dict()) if as_json else result.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
