"""Log-probabilities of given tokens from logits that tensor parallelism cut along the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_trace.rl.logprobs import token_logprobs


def sharded_token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """``token_logprobs`` where ``logits`` [..., V / n] are this rank's equal part of a vocabulary padded beyond ``vocab_size``.

    The same FP32 result on every rank of ``group``; padding has probability 0. Collective.
    """
    if group.size() == 1:
        return token_logprobs(logits[..., :vocab_size], tokens, temperature=temperature)
    return _Sharded.apply(logits, tokens, temperature, vocab_size, group)  # type: ignore[no-any-return, no-untyped-call]


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        share = logits.shape[-1]
        first = group.rank() * share
        scaled = logits.float() / temperature
        scaled[..., max(0, vocab_size - first) :] = float("-inf")
        top = scaled.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exponentials = torch.exp(scaled - top.unsqueeze(-1))
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        local = tokens - first
        mine = (local >= 0) & (local < share)
        local = local.clamp(0, share - 1).unsqueeze(-1)
        chosen = torch.where(mine, scaled.gather(-1, local).squeeze(-1), 0.0)
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return chosen - top - total.log()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probs, local, mine = ctx.saved_tensors
        grad = probs.neg().scatter_add(-1, local, mine.unsqueeze(-1).float()) * grads[0].unsqueeze(-1)
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None
