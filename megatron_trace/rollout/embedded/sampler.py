"""Choosing the next token, and what its choice was worth.

Axis legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


def uniform_stream(*, seed: int, sample_id: int, length: int) -> np.ndarray:
    """The uniforms in [0, 1) that one sample consumes, float64 [length]; they depend on nothing but (seed, sample_id)."""
    return np.random.Generator(np.random.Philox(key=[seed, sample_id])).random(length)


@dataclass(frozen=True)
class SamplingBatch:
    """One decision per sequence: ``temperature``, ``top_p``, ``uniform`` float64 [B]; ``forced`` int64 [B], -1 where free."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    forced: torch.Tensor


def sample(logits_BV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverse CDF; returns tokens int64 [B] and their log-probabilities float32 [B].

    The distribution is softmax(logits / temperature) cut to the smallest set of most likely tokens whose mass reaches ``top_p``
    and renormalised; the log-probability is the chosen token's under that distribution (-inf for a forced token outside it).
    Temperature 0 takes the most likely token (lowest id on a tie) and reports the untempered softmax, whatever ``top_p`` says.
    """
    greedy_B = batch.temperature == 0
    divisor_B = torch.where(greedy_B, 1.0, batch.temperature)
    logp_BV = torch.log_softmax(logits_BV.double() / divisor_B[:, None], dim=-1)
    top_p_B = torch.where(greedy_B, 1.0, batch.top_p)
    if bool((top_p_B < 1).any()):
        logp_BV = _cut_to_nucleus(logp_BV, top_p_B)
    cdf_BV = logp_BV.exp().cumsum(-1)
    drawn_B = torch.searchsorted(cdf_BV, (batch.uniform * cdf_BV[:, -1])[:, None], right=True)[:, 0]
    token_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    token_B = torch.where(batch.forced >= 0, batch.forced, token_B)
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0].float()


def _cut_to_nucleus(logp_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
    p_BV = sorted_BV.exp()
    # A token stays while the mass before it is below top_p: the set always holds the most likely token.
    outside_BV = p_BV.cumsum(-1) - p_BV >= top_p_B[:, None]
    outside_BV = outside_BV & (top_p_B < 1)[:, None]
    cut_BV = logp_BV.masked_fill(torch.zeros_like(outside_BV).scatter(1, order_BV, outside_BV), float("-inf"))
    return cut_BV - cut_BV.logsumexp(-1, keepdim=True)
