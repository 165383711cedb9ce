#!/usr/bin/env bash
# The main job on this machine: sets up .venv, then trains the tiny MoE by RL from NVFP4 rollouts on two CPU processes.
#
#   bash tools/quickstart.sh [key=value ...]     overrides of configs/tiny_moe_cpu.yaml, such as precision.rollout=bf16
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tools/setup_venv.sh
. tools/setup_venv.sh
setup_venv
# First without torchrun, whose own report and exit code would hide a one-line error and code 2.
python -m megatron_trace.config configs/tiny_moe_cpu.yaml --world-size 2 "$@"
exec torchrun --nproc-per-node 2 launch/pretrain_rl.py --config configs/tiny_moe_cpu.yaml "$@"
