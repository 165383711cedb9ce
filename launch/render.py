"""Print or write how to launch a run: ``python launch/render.py --config configs/X.yaml --kind slurm [key=value ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.config import ConfigError, load  # noqa: E402
from megatron_trace.planning import plan  # noqa: E402
from megatron_trace.planning.launch_commands import KINDS, LaunchSpec, render  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="render.py", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--hosts", help="comma-separated names of the trainer nodes")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="what a rank runs on")
    parser.add_argument("--image", default="megatron-trace:latest", help="container image of the manifests")
    parser.add_argument("--output", type=Path, help="write the files there instead of printing them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.config, options.overrides, planned_only=True)
        errors = plan(config).errors
        if errors:
            raise ConfigError(errors)
        spec = LaunchSpec.build(
            config,
            config_path=options.config,
            overrides=options.overrides,
            hosts=options.hosts.split(",") if options.hosts else (),
            gpu=options.device == "gpu",
            image=options.image,
        )
        files = render(spec, options.kind)
    except (ConfigError, ValueError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    if options.output is None:
        for name, text in files.items():
            print(f"# ---- {name}\n{text}", end="")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = options.output / name
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())
