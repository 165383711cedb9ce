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
ray get-auth-token --generate >/dev/null
python launch/preflight.py --config configs/presets/qwen3_5_35b_a3b.yaml --local
ray start --head --port=29501 --include-dashboard=false --num-gpus=8 --node-manager-port=29502 --object-manager-port=29503 --runtime-env-agent-port=29504 --dashboard-agent-grpc-port=29505 --dashboard-agent-listen-port=29506 --metrics-export-port=29507 --min-worker-port=29517 --max-worker-port=29772 --disable-usage-stats --block
