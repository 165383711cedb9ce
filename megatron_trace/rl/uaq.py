"""Update-Aware Quantisation (QuRL Eq. 10-12): norm gains times s, every linear they feed divided by s, once before training.

Only norm-fed linears are scaled; o_proj and down_proj are not (scaling v_proj or up_proj for them would cancel their own
factor). *Every* consumer of a norm must be divided, quantised or not, or the function changes: q, k, v (and output gate),
linear-attention projections, gate/up of all routed and shared experts, the router and the shared-expert gate. Absmax
quantisation is scale equivariant, so INT8 codes of W/s are those of W (exactly for s a power of two); what grows is the
update: by s under Adam, s^2 under SGD. A static activation scale of a consumer (``input_scale``) grows by s with the
activation.

Names are Hugging Face's (Qwen2/3, Qwen3-MoE, Qwen3-Next and 3.5 families; fused 3-D experts too), under any prefix (``model.``,
``model.language_model.``, ``mtp.``). The final norm and the output head are left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_SCALE = 1.5
"""QuRL table 4: s = 1.5 gives 31.25, s = 1 30.63, s = 2 29.15 (AIME 2024 Avg@32, INT8 DAPO)."""

_LAYER = re.compile(r"^(?P<prefix>(?:.*\.)?layers\.\d+)\.(?P<rest>.+)$")
_EXPERT = r"mlp\.experts\.(?:\d+\.)?"
_CONSUMERS = {
    "input_layernorm": re.compile(
        r"self_attn\.(?:q_proj|k_proj|v_proj|gate_proj|g_proj|qkv_proj)"
        r"|linear_attn\.(?:in_proj_qkvz|in_proj_qkv|in_proj_ba|in_proj_z|in_proj_b|in_proj_a)"
    ),
    "post_attention_layernorm": re.compile(
        rf"mlp\.gate|{_EXPERT}(?:gate_proj|up_proj|gate_up_proj)|mlp\.shared_experts?\.(?:gate_proj|up_proj)"
        r"|mlp\.shared_expert_gate|mlp\.(?:gate_proj|up_proj|gate_up_proj)"
    ),
}
_OTHERS = re.compile(
    r"self_attn\.(?:o_proj|q_norm|k_norm)"
    r"|linear_attn\.(?:out_proj|norm|conv1d|A_log|dt_bias)"
    rf"|{_EXPERT}down_proj|mlp\.shared_experts?\.down_proj|mlp\.down_proj|mlp\.gate\.e_score_correction_bias"
)
_SUFFIX = re.compile(r"^(?P<base>.+?)\.(?P<kind>weight|bias|input_scale|weight_scale|weight_scale_2|weight_scale_inv)$")


@dataclass(frozen=True)
class UAQPlan:
    """Names to multiply and to divide. ``consumers`` maps each norm gain to the weights it feeds."""

    consumers: Mapping[str, tuple[str, ...]]
    input_scales: tuple[str, ...]

    @property
    def divided(self) -> frozenset[str]:
        """All weights that are divided by s."""
        return frozenset(name for names in self.consumers.values() for name in names)


def uaq_plan(names: Iterable[str]) -> UAQPlan:
    """Sort a checkpoint's tensor names into norm gains, what they feed, and the rest.

    Raises ValueError for a name inside a layer that is neither a known consumer nor known not to be one, for a norm without
    consumers, a consumer without its norm, and a consumer that is quantised already.
    """
    consumers: dict[str, list[str]] = {}
    norms: set[str] = set()
    input_scales: list[str] = []
    for name in names:
        match = _LAYER.match(name)
        if match is None:
            continue
        prefix, rest = match["prefix"], match["rest"]
        suffix = _SUFFIX.match(rest)
        base, kind = (suffix["base"], suffix["kind"]) if suffix else (rest, "weight")
        if base in _CONSUMERS:
            norms.add(name)
            continue
        norm = next((norm for norm, pattern in _CONSUMERS.items() if pattern.fullmatch(base)), None)
        if norm is None:
            if not _OTHERS.fullmatch(base):
                raise ValueError(f"{name}: not known to UAQ; it may read a scaled norm, so add it to megatron_trace/rl/uaq.py")
        elif kind == "weight":
            consumers.setdefault(f"{prefix}.{norm}.weight", []).append(name)
        elif kind == "input_scale":
            input_scales.append(name)
        elif kind != "bias":
            raise ValueError(f"{name}: its weight is quantised already; apply UAQ to the unquantised checkpoint")
    orphans, idle = sorted(set(consumers) - norms), sorted(norms - set(consumers))
    if orphans:
        raise ValueError(f"{orphans[0]}: missing, but {consumers[orphans[0]][0]} reads it; pass whole layers")
    if idle:
        raise ValueError(f"{idle[0]}: no weight that reads it was found; pass whole layers")
    return UAQPlan(consumers={norm: tuple(fed) for norm, fed in consumers.items()}, input_scales=tuple(input_scales))


def apply_uaq(
    tensors: Mapping[str, Tensor], *, scale: float = DEFAULT_SCALE, zero_centered_norms: bool = False
) -> dict[str, Tensor]:
    """The scaled checkpoint: new tensors where something changed, the same objects elsewhere; dtypes kept.

    ``zero_centered_norms``: the stored gain g means 1 + g (Qwen3-Next, Gemma), so g' = s (1 + g) - 1. Arithmetic is float64
    before the cast back: with s a power of two the function is preserved bit for bit up to range (plain gains), else to the
    dtype's rounding.
    """
    if not (scale > 0.0 and scale < float("inf")):
        raise ValueError(f"scale={scale}: must be positive and finite (QuRL: 1.5)")
    plan = uaq_plan(tensors)
    result = dict(tensors)
    for norm in plan.consumers:
        gain = _unquantised(norm, tensors[norm]).double()
        result[norm] = (scale * (1.0 + gain) - 1.0 if zero_centered_norms else scale * gain).to(tensors[norm].dtype)
    for name in plan.divided:
        result[name] = (_unquantised(name, tensors[name]).double() / scale).to(tensors[name].dtype)
    for name in plan.input_scales:
        result[name] = (tensors[name].double() * scale).to(tensors[name].dtype)
    return result


def _unquantised(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"{name} of dtype {tensor.dtype}: apply UAQ to the unquantised checkpoint")
    return tensor


@dataclass(frozen=True)
class NormalizedChange:
    """``change / reference``, squared Frobenius norms, mergeable over tensors and over parameter shards of ranks."""

    change: float
    reference: float

    def merge(self, other: NormalizedChange) -> NormalizedChange:
        """Both sets of tensors taken as one vector."""
        return NormalizedChange(change=self.change + other.change, reference=self.reference + other.reference)

    @property
    def value(self) -> float:
        """The normalised figure; 0/0 (all tensors zero or none) is an error rather than a number."""
        if self.reference == 0.0:
            raise ValueError("reference=0: the weights are all zero or none were given; a normalised change is undefined")
        return self.change / self.reference


def normalized_weight_update(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> NormalizedChange:
    """||theta_{t+1} - theta_t||^2 / ||theta_t||^2 (QuRL Eq. 13; the paper takes it every 16 steps)."""
    return _normalized_change(before, after)


def normalized_weight_quant_error(weights: Mapping[str, Tensor], dequantized: Mapping[str, Tensor]) -> NormalizedChange:
    """||Q(theta) - theta||^2 / ||theta||^2 (QuRL Eq. 14); ``dequantized`` holds Q(theta) in real units."""
    return _normalized_change(weights, dequantized)


def effective_update_gain(*, plain_update: Mapping[str, Tensor], scaled_update: Mapping[str, Tensor], scale: float) -> float:
    """How much farther the *function's* weights moved: ||s * dW_scaled|| / ||dW_plain||; s under Adam, s^2 under SGD.

    Both are one optimiser step's changes of the same consumers from equal functions, without and with UAQ.
    """
    _same_names(plain_update, scaled_update)
    plain = sum(float((tensor.double() ** 2).sum()) for tensor in plain_update.values())
    scaled = sum(float(((scale * tensor.double()) ** 2).sum()) for tensor in scaled_update.values())
    return math.sqrt(scaled / plain)


def _normalized_change(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> NormalizedChange:
    _same_names(old, new)
    change = sum(float(((new[name].double() - tensor.double()) ** 2).sum()) for name, tensor in old.items())
    reference = sum(float((tensor.double() ** 2).sum()) for tensor in old.values())
    return NormalizedChange(change=change, reference=reference)


def _same_names(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    if a.keys() != b.keys():
        raise ValueError(f"{sorted(a.keys() ^ b.keys())[0]}: present in only one of the two sets of tensors")
