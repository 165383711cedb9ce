"""Routed experts of one layer: route, round, compute each expert once on all of its tokens, combine.

Axis legend: T tokens, H hidden, I expert intermediate, E experts, k experts per token, R = T * k token-expert rows by expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_trace.numerics import nvfp4
from megatron_trace.rollout.embedded.recorder import Recorder
from megatron_trace.rollout.embedded.weights import LayerWeights


def route(x_TH: torch.Tensor, router_EH: torch.Tensor, *, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [T, k], most likely first (lowest id on a tie), and their FP32 weights [T, k].

    Logits are FP32; softmax over the k selected logits equals Qwen's softmax over all, selection, renormalisation.
    """
    logits_TE = F.linear(x_TH.float(), router_EH)
    sorted_TE, order_TE = logits_TE.sort(dim=-1, descending=True, stable=True)
    return order_TE[:, :top_k], torch.softmax(sorted_TE[:, :top_k], dim=-1)


def moe(x_TH: torch.Tensor, weights: LayerWeights, *, layer: int, top_k: int, recorder: Recorder) -> torch.Tensor:
    """Output [T, H] of the routed experts in ``x_TH``'s dtype.

    Quantised layers round the expert input per token before dispatch, and the unscaled activation per token-expert row over the
    whole intermediate width: under tensor parallelism that row scale is the MAX over the shards, so it is computed before the
    row is cut. Router weights are applied after fc2, in FP32, and the products rounded.
    """
    dtype, quantized = x_TH.dtype, weights.kv_amax is not None
    experts_Tk, probs_Tk = route(x_TH, weights.router, top_k=top_k)
    recorder.route(layer, experts_Tk)
    if quantized:
        packed, rounded_TH = nvfp4.quantize_with_dequantized(x_TH, scale_scope="row")
        recorder.site(layer, "fc1_in", packed, x_TH)
        x_TH = rounded_TH
    flat_R = experts_Tk.flatten()
    by_expert_R = flat_R.argsort(stable=True)
    token_R = by_expert_R // top_k
    counts = torch.bincount(flat_R, minlength=len(weights.fc1)).tolist()
    prob_R1 = probs_Tk.flatten()[by_expert_R].unsqueeze(-1)

    gate_up = grouped_matmul(x_TH.float().index_select(0, token_R), weights.fc1, counts).to(dtype)
    gate_RI, up_RI = gate_up.chunk(2, dim=-1)
    act_RI = F.silu(gate_RI) * up_RI
    if quantized:
        act_RI = nvfp4.quantize_dequantize(act_RI, scale_scope="row")
    target_RH = token_R.unsqueeze(-1).expand(-1, x_TH.shape[-1])
    total_TH: torch.Tensor | None = None
    for fc2, act in zip(weights.fc2, act_RI.float().chunk(len(weights.fc2), dim=-1), strict=True):
        out_RH = (grouped_matmul(act, fc2, counts).to(dtype) * prob_R1).to(dtype)
        # The op Megatron-core's unpermute uses: on a CPU it adds a token's experts in ascending order in FP32 and rounds once.
        partial_TH = torch.zeros_like(x_TH).scatter_add_(0, target_RH, out_RH)
        total_TH = partial_TH if total_TH is None else total_TH + partial_TH
    assert total_TH is not None
    return total_TH


def grouped_matmul(x_RK: torch.Tensor, weights_ENK: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """``x @ weights[e].T`` for consecutive groups of ``counts[e]`` rows, FP32 [R, N]; experts without rows cost nothing."""
    out_RN = x_RK.new_empty(len(x_RK), weights_ENK.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(x_RK[rows], weights_ENK[expert].t(), out=out_RN[rows])
            start += count
    return out_RN
