"""Which tensors are quantised, said for trainer and engine from the one precision contract (no torch).

There are no name patterns: layers are listed by number and tensors by their place in a layer, so nothing can match by accident
(``mlp.gate`` and ``mlp.gate_proj``), and both sides read the same list.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.config.schema import RunConfig


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind: how each side holds them, in which layers (0-based), and which of those are guided."""

    tensor: str
    engine: str
    trainer: str
    layers: tuple[int, ...]
    guided: tuple[int, ...] = ()


def tensor_groups(config: RunConfig) -> tuple[TensorGroup, ...]:
    """Quantised groups first, then one row for all that stays in the compute type."""
    contract, model = config.contract, config.model
    plain = config.precision.compute_dtype
    quantized = [layer for layer in range(model.num_layers) if layer not in contract.bf16_layers] if contract.quantized else []
    kv = tuple(layer for layer in quantized if model.has_kv_cache(layer))
    forward = config.trainer_forward
    weights = contract.expert_weights.format if forward != "bf16" else plain
    activations = contract.fc1_in.format if forward in ("guided", "qat") else plain
    groups = []
    for tensor, site, layers, trainer in (
        ("routed expert weights", None, tuple(quantized), weights),
        ("routed expert input (fc1_in)", "fc1_in", tuple(quantized), activations),
        ("routed expert activation (fc2_in)", None, tuple(quantized), activations),
        ("keys after RoPE (k)", "k", kv, activations),
        ("values (v)", "v", kv, activations),
    ):
        guided = tuple(layer for layer in layers if site in config.guidance.sites and layer in config.guided_layers)
        if layers:
            groups.append(TensorGroup(tensor=tensor, engine="nvfp4", trainer=trainer, layers=layers, guided=guided))
    rest = "router, shared experts, attention projections, linear attention, norms, embedding, head, MTP"
    every = tuple(range(model.num_layers))
    return (*groups, TensorGroup(tensor=rest, engine=plain, trainer=plain, layers=every))
