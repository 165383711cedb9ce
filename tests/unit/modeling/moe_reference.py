"""The guided MoE layer written out: router, rounding, a loop over tokens and experts, probability last; autograd all the way.

Shares with the layer only ``numerics``. Axes: T tokens, H hidden, I expert intermediate, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_trace.numerics import guided, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord


@dataclass
class MoeReference:
    """FP32. ``router`` [E, H]; ``fc1`` [E, 2I, H] gate above up; ``fc2`` [E, H, I]."""

    router: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor
    top_k: int
    quantized: bool = True

    def forward(
        self, x_TH: torch.Tensor, record: GuidanceRecord | None = None, routes: list[list[int]] | None = None
    ) -> torch.Tensor:
        """[T, H]; ``routes`` replace the live choice where given."""
        logits_TE = x_TH @ self.router.T
        rounded_TH = self._through(x_TH, _rounded(x_TH, record)) if self.quantized else x_TH
        rows = []
        for t in range(len(x_TH)):
            order = sorted(range(self.router.shape[0]), key=lambda e, t=t: (-float(logits_TE[t, e].detach()), e))
            experts = routes[t] if routes else order[: self.top_k]
            probs = torch.softmax(logits_TE[t, experts], dim=-1)
            rows.append(sum(self._expert(rounded_TH[t : t + 1], e, p)[0] for e, p in zip(experts, probs, strict=True)))
        return torch.stack(rows)

    def _expert(self, x_1H: torch.Tensor, expert: int, prob: torch.Tensor) -> torch.Tensor:
        fc1, fc2 = (self._weight(w[expert]) for w in (self.fc1, self.fc2))
        gate, up = (x_1H @ fc1.T).chunk(2, dim=-1)
        act = F.silu(gate) * up
        if self.quantized:
            act = self._through(act, nvfp4.quantize(act.detach(), scale_scope="row").dequantize(torch.float32))
        return act @ fc2.T * prob

    def _weight(self, w: torch.Tensor) -> torch.Tensor:
        if not self.quantized:
            return w
        return self._through(w, nvfp4.quantize(w.detach().bfloat16(), scale_scope="tensor").dequantize(torch.float32))

    @staticmethod
    def _through(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``value`` in the forward pass, the gradient of ``x`` in the backward pass."""
        return value.detach() + (x - x.detach())


def _rounded(x_TH: torch.Tensor, record: GuidanceRecord | None) -> torch.Tensor:
    if record is None:
        return nvfp4.quantize(x_TH.detach(), scale_scope="row").dequantize(torch.float32)
    return guided.fake_quantize(x_TH.detach(), record=record)
