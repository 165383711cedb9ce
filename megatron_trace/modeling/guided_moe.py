"""Megatron-core's MoE layer with rollout-guided rounding.

The routed-expert input is rounded before dispatch (one vector per token, so guidance never crosses the expert all-to-all);
experts compute on quantised weights; the fc2 input is rounded to nearest *before* the router probability, which is applied
after fc2 as inference engines do. Upstream: megatron/core/transformer/moe/{moe_layer,experts}.py.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.func import functional_call

from megatron_trace.guidance import frames
from megatron_trace.modeling.expert_weights import QuantizedExpertWeight
from megatron_trace.modeling.sites import round_fc2_input, round_site


class GuidedMoELayer(MoELayer):
    """MoE layer whose routed branch sees the rounded input; router and shared experts see the original."""

    quantizes: bool
    """False in layers that the precision contract leaves in BF16."""

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.quantizes:
            return super().preprocess(hidden_states, probs, routing_map)
        rounded_TH = round_site(hidden_states.reshape(-1, hidden_states.shape[-1]), layer=self.layer_number - 1, site="fc1_in")
        return super().preprocess(rounded_TH.view_as(hidden_states), probs, routing_map)


class GuidedSequentialMLP(SequentialMLP):
    """Experts that compute with NVFP4 weights and apply router probabilities after fc2.

    ``refresh`` must run after every change of the master weights; a quantised forward before the first ``refresh`` raises.
    """

    quantizes: bool
    quantized: list[tuple[QuantizedExpertWeight, QuantizedExpertWeight]]

    def refresh(self) -> None:
        """Quantise every local expert's weights anew: (fc1, fc2) per local expert."""
        self.quantized = [
            (QuantizedExpertWeight.of(e.linear_fc1.weight), QuantizedExpertWeight.of(e.linear_fc2.weight))
            for e in self.local_experts
        ]

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``permuted_local_hidden_states`` [R, H] grouped by local expert; returns [R, H] and no bias.

        An expert without tokens still runs, so that its gradients are zeros instead of missing on this rank.
        """
        sizes = tokens_per_expert.tolist()
        inputs = torch.split(permuted_local_hidden_states, sizes)
        probs = torch.split(permuted_probs, sizes)
        outputs = [self._expert(i, x, p) for i, (x, p) in enumerate(zip(inputs, probs, strict=True))]
        return torch.cat(outputs), None

    def _expert(self, index: int, x_RH: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
        expert = self.local_experts[index]
        fc1, fc2 = self._weights(index)
        gate_up_R2I, _ = functional_call(expert.linear_fc1, {"weight": fc1}, (x_RH,))
        act_RI = _swiglu(expert, gate_up_R2I)
        if self.quantizes:
            act_RI = round_fc2_input(act_RI)
        out_RH, _ = functional_call(expert.linear_fc2, {"weight": fc2}, (act_RI,))
        return (out_RH * probs_R.unsqueeze(-1)).to(out_RH.dtype)

    def _weights(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        expert = self.local_experts[index]
        fc1, fc2 = expert.linear_fc1.weight, expert.linear_fc2.weight
        if not self.quantizes or not frames.current().rounding.quantizes_weights:
            return fc1, fc2
        if not self.quantized:
            raise RuntimeError("expert weights were never quantised: call refresh() after building or loading the model")
        q1, q2 = self.quantized[index]
        return q1.applied_to(fc1), q2.applied_to(fc2)


def _swiglu(expert: MLP, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return expert.activation_func(gate) * up
