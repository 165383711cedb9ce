"""Checks a configuration without starting anything: ``python -m megatron_trace.config FILE [key=value ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import yaml

from megatron_trace.config.errors import ConfigError
from megatron_trace.config.loading import leaves, load, provenance
from megatron_trace.config.validation import validate_world_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Print nothing, or with ``--show`` every setting; one line for each problem on stderr and 2 if there is any, else 0."""
    parser = argparse.ArgumentParser(prog="python -m megatron_trace.config", description=__doc__)
    parser.add_argument("file", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument("--world-size", type=int, help="check also what depends on the number of processes")
    parser.add_argument("--show", action="store_true", help="print every setting with its value, as YAML")
    parser.add_argument("--provenance", action="store_true", help="print every setting with where its value comes from")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.file, options.overrides)
        if options.world_size is not None:
            validate_world_size(config, options.world_size)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.provenance:
        origin = provenance(options.file, options.overrides)
        for name, value in leaves(config.resolved()):
            print(f"{name} = {value!r}  # {origin.get(name, 'default')}")
    if options.show:
        print(yaml.safe_dump(config.resolved(), sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
