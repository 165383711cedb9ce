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
export SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1
export TRTLLM_DISABLE_FP4_QUANT_FAST_MATH=1
python tools/plan.py --config configs/tiny_moe_cpu.yaml run.seed=3 --for-run --world-size 2 --json >/dev/null
torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 0 --standalone launch/pretrain_rl.py --config configs/tiny_moe_cpu.yaml run.seed=3 || { code=$?; echo "error: the trainer on $(hostname) ended with code $code; the first error above names the cause. Resume with checkpoint.resume=true." >&2; exit $code; }
