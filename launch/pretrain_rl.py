"""RL post-training: ``torchrun --nproc-per-node N launch/pretrain_rl.py --config configs/X.yaml [key=value ...]``."""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    """Exit code: 0 at the end, 2 for input that cannot run (one line for each problem), 128 + signal when stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    args = parser.parse_args()

    from megatron_trace.config import ConfigError, load, validate_world_size
    from megatron_trace.config.loading import provenance

    try:
        config = load(args.config, args.overrides)
        validate_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        return refuse(error)
    os.environ.update(config.contract.environment())

    from megatron_trace.platform.device import leave_process_group, prepare_megatron

    prepare_megatron()

    from megatron_trace.trainer.checkpoint import CheckpointError
    from megatron_trace.trainer.loop import train
    from megatron_trace.trainer.run import Run

    try:
        run = Run(config, provenance=provenance(args.config, args.overrides))
    except (ConfigError, CheckpointError) as error:  # found by every rank alike, before any model is built
        leave_process_group()
        return refuse(error)
    return train(run)


def refuse(error: Exception) -> int:
    """Say what is wrong once, whatever the number of processes."""
    if os.environ.get("RANK", "0") == "0":
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
