"""Megatron-core's MoE layer with rollout-guided rounding.

The routed-expert input is rounded before dispatch (one vector per token, so guidance never crosses the expert all-to-all);
experts compute on quantised weights; the fc2 input is rounded to nearest *before* the router probability, which is applied
after fc2 as inference engines do. Upstream: megatron/core/transformer/moe/{moe_layer,experts}.py.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.func import functional_call

from megatron_trace.guidance import frames
from megatron_trace.modeling.dispatch import ArrivedRecords, dispatched_rows, permuted_tokens, unpacked_after_dispatch
from megatron_trace.modeling.expert_weights import QuantizedExpertWeight, WeightBackward, quantize_shards
from megatron_trace.modeling.sites import note_site, packed_site, record_rows, round_by_rows, round_fc2_input, round_site

Dispatch = Literal["rounded", "unrounded", "nvfp4"]
"""What crosses the expert all-to-all: rounded values; unrounded values with their records behind them, rounded where they
arrive; or codes and scales (4.5 bits a value and one FP32 amax a token instead of 16 bits a value)."""


class GuidedMoELayer(MoELayer):
    """MoE layer whose routed branch sees the rounded input; router and shared experts see the original."""

    quantizes: bool
    """False in layers that the precision contract leaves in BF16."""
    dispatches: Dispatch
    _rows: torch.Tensor | None = None
    """Bytes of each routed row of the call in progress that travel beside or instead of its values; None outside a call."""

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.quantizes or not frames.current().rounding.quantizes_activations:
            return super().preprocess(hidden_states, probs, routing_map)
        x_TH, layer = hidden_states.reshape(-1, hidden_states.shape[-1]), self.layer_number - 1
        if self.dispatches == "unrounded":
            rows, rounded_TH = record_rows(x_TH, layer=layer, site="fc1_in"), x_TH
            note_site(x_TH, layer=layer, site="fc1_in")
        else:
            rows = packed_site(x_TH, layer=layer, site="fc1_in") if self.dispatches == "nvfp4" else None
            rounded_TH = round_site(x_TH, layer=layer, site="fc1_in")
        self._rows = None if rows is None else rows[permuted_tokens(routing_map)]
        return super().preprocess(rounded_TH.view_as(hidden_states), probs, routing_map)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self._rows = self._rows, None
        if not self.quantizes or not frames.current().rounding.quantizes_activations or self.dispatches == "rounded":
            return super().dispatch(hidden_states, probs)
        if self.dispatches == "nvfp4":
            assert rows is not None
            arrived, probs = super().dispatch(rows, probs)
            return unpacked_after_dispatch(hidden_states, arrived, self.token_dispatcher), probs
        out = super().dispatch(hidden_states, probs)
        bits = frames.current().record_bits
        records = None if rows is None else dispatched_rows(rows, self.token_dispatcher)
        self.experts.arrived = ArrivedRecords(rows=records, bits=bits)
        return out


class GuidedSequentialMLP(SequentialMLP):
    """Experts that compute with NVFP4 weights and apply router probabilities after fc2.

    ``refresh`` must run after every change of the master weights; a quantised forward before the first ``refresh`` raises.
    """

    quantizes: bool
    quantized: list[tuple[QuantizedExpertWeight, QuantizedExpertWeight]]
    weight_backward: WeightBackward
    whole_row_scale: bool
    """Whether the fc2 input has one scale over all expert-tensor-parallel shards of a row, instead of one for each."""
    arrived: ArrivedRecords | None = None
    """Set by the layer for the one forward that follows: its rows are still to be rounded, by these records."""

    def refresh(self) -> None:
        """Quantise every local expert's weights anew: (fc1, fc2) per local expert. Collective over expert-tensor ranks."""
        weights = [w for e in self.local_experts for w in (e.linear_fc1.weight, e.linear_fc2.weight)]
        packed = quantize_shards(weights, self.tp_group)
        self.quantized = list(zip(packed[::2], packed[1::2], strict=True))

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``permuted_local_hidden_states`` [R, H] grouped by local expert; returns [R, H] and no bias.

        An expert without tokens still runs, so that its gradients are zeros instead of missing on this rank.
        """
        arrived, self.arrived = self.arrived, None
        if arrived is not None:
            permuted_local_hidden_states = round_by_rows(permuted_local_hidden_states, arrived.rows, bits=arrived.bits)
        sizes = tokens_per_expert.tolist()
        inputs = torch.split(permuted_local_hidden_states, sizes)
        probs = torch.split(permuted_probs, sizes)
        outputs = [self._expert(i, x, p) for i, (x, p) in enumerate(zip(inputs, probs, strict=True))]
        return torch.cat(outputs), None

    def _expert(self, index: int, x_RH: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
        expert = self.local_experts[index]
        q1, q2 = self._weights(index)
        act_RI = _swiglu(expert, self._linear(expert.linear_fc1, q1, x_RH))
        if self.quantizes:
            act_RI = round_fc2_input(act_RI, shards=self._row_shards())
        out_RH = self._linear(expert.linear_fc2, q2, act_RI)
        return (out_RH * probs_R.unsqueeze(-1)).to(out_RH.dtype)

    def _linear(self, module: torch.nn.Module, quantized: QuantizedExpertWeight | None, x_RK: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if quantized is not None and self.weight_backward == "straight_through":
            return quantized.linear_with_master_backward(x_RK, weight)
        used = weight if quantized is None else quantized.applied_to(weight)
        out, _ = functional_call(module, {"weight": used}, (x_RK,))
        return out

    def _weights(self, index: int) -> tuple[QuantizedExpertWeight | None, QuantizedExpertWeight | None]:
        if not self.quantizes or not frames.current().rounding.quantizes_weights:
            return None, None
        if not self.quantized:
            raise RuntimeError("expert weights were never quantised: call refresh() after building or loading the model")
        return self.quantized[index]

    def _row_shards(self) -> dist.ProcessGroup | None:
        return self.tp_group if self.whole_row_scale else None


def _swiglu(expert: MLP, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return expert.activation_func(gate) * up
