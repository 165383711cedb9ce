"""Log-probabilities and entropy at the sampling temperature: one convention for engine, proximal and current policy.

The temperature is part of the policy: all three sides divide logits by it before the softmax (DESIGN.md 3.9). Applied on one
side only, ratios are wrong everywhere (mean ratio 2.0 at T = 0.6 in huggingface/trl issue 4159). Axes: N tokens, V
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def temper(logits: Tensor, *, temperature: float) -> Tensor:
    """float32 (or float64) logits divided by ``temperature``; 0 means greedy decoding, whose log-probabilities are
    untempered."""
    if not temperature >= 0.0:
        raise ValueError(f"temperature={temperature}: must be positive, or 0 for greedy")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature in (0.0, 1.0) else wide / temperature


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at ``tokens``: logits [N, V], tokens int64 [N] -> [N], with gradient."""
    scaled = temper(logits, temperature=temperature)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_entropy(logits: Tensor, *, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): [N, V] -> [N], with gradient."""
    log_p = temper(logits, temperature=temperature).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
