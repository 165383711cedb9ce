"""Routed experts replayed by key.

Fills Megatron-core's ``router_replay`` seam (moe_utils.topk_routing_with_score_function) with a lookup in the current frame
instead of upstream's first-in-first-out lists: the replayed indices gather from the full live logits, the router's own
normalisation follows, and gradients reach the router (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_trace.guidance import frames


def stable_topk(scores_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k along the last dim; among equal scores the lowest expert id wins (torch.topk leaves ties open)."""
    values, indices = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def spread_routes(tokens: int, experts: int, k: int) -> torch.Tensor:
    """Expert ids int64 [tokens, k], distinct in each row, that load all experts alike."""
    return (torch.arange(tokens * k) % experts).view(tokens, k)


class KeyedRouteReplay:
    """One router's replay: rows with a valid recorded route use it, all others route live."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the router with ``scores`` [T, E]; returns the selected scores [T, k] and expert ids [T, k]."""
        live_scores, live_ids = (
            default_compute_topk(scores, topk, num_groups, group_topk) if group_topk else stable_topk(scores, topk)
        )
        frame = frames.current().at("fc1_in")
        routes = frame.routes_of(self.layer)
        if routes is None:
            return live_scores, live_ids
        replayed_Tk, valid_T = routes
        ids_Tk = torch.where(valid_T.unsqueeze(-1), replayed_Tk, live_ids)
        if frame.is_token is not None:  # padding is spread: equal pad tokens would all go to the same experts
            ids_Tk = torch.where(frame.is_token.unsqueeze(-1), ids_Tk, spread_routes(*scores.shape, topk))
        return scores.gather(1, ids_Tk), ids_Tk
