"""Score Centering (arXiv 2609.20807): cancels the drift of the score that a mismatched sampler adds, from its top-k
log-probabilities.

p current policy, q sampler, H the sampler's top-k tokens. Under q the expected score E_q[w grad log p] is not 0; the term
below is its estimate C, with the tail taken as q = rho p outside H: C = sum_{v in H} sg(m(v) - a p(v)) log p(v), rho = (1 -
sum_H q) / max(1 - sum_H p, 1e-6).

    weighting "none"  w = 1                          m = q                       a = rho
    weighting "tis"   w = clamp(p / q, low, high)    m = clamp(p, low q, high q)  a = clamp(1, low rho, high rho)

Minimising ``-A w log p(y) + A C`` then has a centred score. Axes: N token layout, K = |H|.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_TAIL_FLOOR = 1e-6


def score_centering_loss(
    *,
    topk_logprobs: Tensor,
    topk_behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weighting: Literal["none", "tis"],
    low: float = 0.0,
    high: float | None = None,
) -> Tensor:
    """Per-token ``A * C`` [N] to add to the loss (``LossInputs.auxiliary_loss``); gradient flows to ``topk_logprobs``.

    ``topk_logprobs`` [N, K]: the current policy's log-probabilities at the sampler's top-k token ids;
    ``topk_behavior_logprobs`` [N, K]: the sampler's own, -inf for unused slots; ``advantages``, ``mask`` [N]. Both
    distributions at the sampling temperature and over the whole vocabulary. ``high`` (the truncation C) is required by
    weighting "tis".
    """
    if topk_logprobs.shape != topk_behavior_logprobs.shape or topk_logprobs.shape[:-1] != mask.shape:
        raise ValueError(
            f"topk_logprobs {tuple(topk_logprobs.shape)}, topk_behavior_logprobs {tuple(topk_behavior_logprobs.shape)}, "
            f"mask {tuple(mask.shape)}: need [N, K], [N, K] and [N]"
        )
    kept = mask.bool()
    used = kept.unsqueeze(-1) & ~torch.isneginf(topk_behavior_logprobs)
    log_p = torch.where(used, topk_logprobs if topk_logprobs.dtype == torch.float64 else topk_logprobs.float(), 0.0)
    p = torch.where(used, log_p.detach().exp(), 0.0)
    q = torch.where(used, topk_behavior_logprobs.detach().to(p.dtype).exp(), 0.0)
    rho = (1.0 - q.sum(-1, keepdim=True)).clamp_min(0.0) / (1.0 - p.sum(-1, keepdim=True)).clamp_min(_TAIL_FLOOR)
    if weighting == "none":
        m, a = q, rho
    elif weighting == "tis":
        if high is None or not 0.0 <= low <= high:
            raise ValueError(f"low={low}, high={high} with weighting='tis': need 0 <= low <= high, high being the truncation C")
        m = torch.clamp(p, low * q, high * q)
        a = torch.clamp(torch.ones_like(rho), low * rho, high * rho)
    else:
        raise ValueError(f"weighting={weighting!r}: must be 'none' or 'tis'")
    centre = ((m - a * p) * log_p).sum(-1)
    return torch.where(kept, advantages.detach().to(centre.dtype), 0.0) * centre
