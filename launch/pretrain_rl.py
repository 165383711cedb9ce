"""RL post-training: ``torchrun --nproc-per-node N launch/pretrain_rl.py --config configs/X.yaml [key=value ...]``."""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    args = parser.parse_args()

    from megatron_trace.config import ConfigError, load, validate_world_size

    try:
        config = load(args.config, args.overrides)
        validate_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return 2
    os.environ.update(config.contract.environment())

    from megatron_trace.platform.device import prepare_megatron

    prepare_megatron()

    from megatron_trace.trainer.loop import train
    from megatron_trace.trainer.run import Run

    return train(Run(config))


if __name__ == "__main__":
    sys.exit(main())
