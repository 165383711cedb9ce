#!/usr/bin/env bash
set -euo pipefail
export FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1
export NVTE_BACKWARD_OVERRIDE=dequantized
export NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1
export NVTE_NVFP4_DISABLE_RHT=1
export NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1
export NVTE_NVFP4_ROW_SCALED_ACTIVATION=1
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0
export SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1
export TRTLLM_DISABLE_FP4_QUANT_FAST_MATH=1
: "${RAY_HEAD:?set RAY_HEAD to the host that runs ray-head.sh}"
export RAY_ADDRESS="$RAY_HEAD:29501"
python tools/plan.py --config configs/presets/qwen3_5_35b_a3b.yaml --for-run --world-size 64 --json >/dev/null
python launch/preflight.py --config configs/presets/qwen3_5_35b_a3b.yaml --ray-nodes 8 --ray-wait 300
torchrun --nnodes 8 --nproc-per-node 8 --max-restarts 0 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id qwen3_5_35b_a3b --rdzv-conf join_timeout=300 launch/pretrain_rl.py --config configs/presets/qwen3_5_35b_a3b.yaml || { code=$?; echo "error: the trainer on $(hostname) ended with code $code; the first error above names the cause. Resume with checkpoint.resume=true." >&2; exit $code; }
