"""Check the nodes of a run before it starts: ``python launch/preflight.py --config configs/X.yaml --nodes N --meet HOST:PORT``.

One process on each node (``srun`` numbers them, else give ``--node``). Exit code 1 with one line for each problem, which names
the node; ``--local`` checks only this one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.config import ConfigError, load  # noqa: E402
from megatron_trace.planning import plan, preflight  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="preflight.py", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--local", action="store_true", help="check this node alone")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that meet")
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_NODEID", "0")), help="this node's number, from 0")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where they meet: on node 0")
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for a node")
    parser.add_argument("--ray-nodes", type=int, default=0, help="rollout nodes that Ray must have")
    parser.add_argument("--ray-wait", type=float, default=300.0, help="seconds to wait for them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.config, options.overrides, planned_only=True)
    except ConfigError as error:
        for line in error.problems:
            print(f"error: {line}", file=sys.stderr)
        return 2
    ray = config.rollout.placement == "ray"
    host, _, port = (options.meet or ":0").rpartition(":")
    if not port.isdecimal():
        print(f"error: --meet={options.meet}: must be HOST:PORT", file=sys.stderr)
        return 2
    checks = preflight.local(plan(config), output_dir=Path(config.run.output_dir), ray=ray, meeting_port=int(port))
    problems = [f"{os.uname().nodename}: {check.name}: {check.detail}" for check in checks if not check.ok]
    if not options.local and options.meet:
        problems = preflight.meet(
            checks, node=options.node, nodes=options.nodes, endpoint=(host, int(port)), wait_s=options.wait
        )
    if not problems and options.ray_nodes:
        problems = preflight.wait_for_ray(preflight.ray_nodes, nodes=options.ray_nodes, wait_s=options.ray_wait)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems and options.node == 0:
        print(f"preflight: {options.nodes} node{'s' if options.nodes > 1 else ''} ready")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
