"""Weights of the Qwen3-MoE family as they arrive in a refit: checked, kept as bytes, and laid out for computing.

Axis legend: H hidden, I expert intermediate, E experts, V vocabulary, R tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_trace.config.model import ModelConfig
from megatron_trace.numerics.nvfp4 import BLOCK, NVFP4Tensor
from megatron_trace.rollout.protocol import QuantizedWeight, RefitBundle
from megatron_trace.rollout.refit_digest import digest_tensors, flatten_bundle

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LayerWeights:
    """One layer, ready to compute. Matrices are FP32 copies of values of the engine's dtype; norms keep that dtype."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qk_norm: torch.Tensor
    """FP32 [heads + kv_heads, head_dim]: the q norm for each query head, then the k norm for each KV head."""
    qkv: torch.Tensor
    """[(heads + 2 kv_heads) * head_dim, H]"""
    o: tuple[torch.Tensor, ...]
    """One [H, heads * head_dim / R] per tensor-parallel rank."""
    router: torch.Tensor
    """[E, H]"""
    fc1: torch.Tensor
    """[E, 2I, H], gate above up."""
    fc2: tuple[torch.Tensor, ...]
    """One [E, H, I / R] per tensor-parallel rank."""
    kv_amax: torch.Tensor | None
    """Static FP32 amax of K and of V [2, 1]; None in a layer that is not quantised."""


@dataclass(frozen=True)
class Weights:
    """One weight version. ``stored`` holds the received bytes, the truth that ``digest`` covers (NVFP4 stays packed);
    everything else is a dequantised copy in the layout the arithmetic wants, rebuilt from ``stored`` at each refit."""

    version: int
    stored: Mapping[str, torch.Tensor]
    digest: str
    kv_amax: dict[tuple[int, str], float]
    embedding: torch.Tensor
    """[V, H] in the engine's dtype."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    """FP32 [V, H]"""


class WeightLoader:
    """Turns a refit bundle into ``Weights`` or refuses it with a ValueError that names what is wrong."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        quantized_layers: frozenset[int],
        dtype: torch.dtype,
        tensor_parallel: int,
        contract_fingerprint: str,
        device: torch.device,
    ) -> None:
        self._model = model
        self._quantized_layers = quantized_layers
        self._dtype = dtype
        self._ranks = tensor_parallel
        self._fingerprint = contract_fingerprint
        self._device = device
        self._plain, self._packed = expected_shapes(model, quantized_layers)

    def load(self, bundle: RefitBundle, *, current_version: int | None) -> Weights:
        """Check all of ``bundle``, copy its bytes, and lay them out. Raises ValueError and changes nothing otherwise."""
        self._check_identity(bundle, current_version)
        self._check_names(bundle)
        self._check_plain(bundle.plain)
        self._check_packed(bundle.quantized)
        self._check_kv_amax(bundle.kv_amax)
        stored = {name: t.detach().to(self._device, copy=True) for name, t in flatten_bundle(bundle).items()}
        head = "model.embed_tokens.weight" if self._model.tie_word_embeddings else "lm_head.weight"
        return Weights(
            version=bundle.version,
            stored=stored,
            digest=digest_tensors(stored),
            kv_amax={key: float(stored[f"kv_amax#{key[0]}#{key[1]}"]) for key in bundle.kv_amax},
            embedding=stored["model.embed_tokens.weight"],
            layers=tuple(self._layer(stored, layer) for layer in range(self._model.num_layers)),
            final_norm=stored["model.norm.weight"],
            head=stored[head].float(),
        )

    def _layer(self, stored: Mapping[str, torch.Tensor], layer: int) -> LayerWeights:
        m, prefix = self._model, f"model.layers.{layer}."
        attention = {x: stored[f"{prefix}self_attn.{x}_proj.weight"].float() for x in "qkvo"}
        norms = (stored[f"{prefix}self_attn.{x}_norm.weight"].float() for x in "qk")
        heads = (m.num_attention_heads, m.num_key_value_heads)
        experts = [[self._expert(stored, layer, e, name) for name in PROJECTIONS] for e in range(m.num_experts)]
        down = torch.stack([d for _, _, d in experts])
        amax = [stored[f"kv_amax#{layer}#{site}"] for site in "kv"] if layer in self._quantized_layers else None
        return LayerWeights(
            input_norm=stored[f"{prefix}input_layernorm.weight"],
            post_norm=stored[f"{prefix}post_attention_layernorm.weight"],
            qk_norm=torch.cat([w.expand(n, -1) for w, n in zip(norms, heads, strict=True)]),
            qkv=torch.cat([attention[x] for x in "qkv"]),
            o=tuple(s.contiguous() for s in attention["o"].chunk(self._ranks, dim=-1)),
            router=stored[f"{prefix}mlp.gate.weight"].float(),
            fc1=torch.stack([torch.cat((gate, up)) for gate, up, _ in experts]),
            fc2=tuple(s.contiguous() for s in down.chunk(self._ranks, dim=-1)),
            kv_amax=None if amax is None else torch.stack(amax).unsqueeze(-1),
        )

    def _expert(self, stored: Mapping[str, torch.Tensor], layer: int, expert: int, projection: str) -> torch.Tensor:
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
        if layer not in self._quantized_layers:
            return stored[name].float()
        packed = NVFP4Tensor(
            codes=stored[f"{name}#codes"], block_scale=stored[f"{name}#block_scale"], global_amax=stored[f"{name}#global_amax"]
        )
        return packed.dequantize(self._dtype).float()

    def _check_identity(self, bundle: RefitBundle, current_version: int | None) -> None:
        if bundle.contract_fingerprint != self._fingerprint:
            raise ValueError(
                f"refit.contract_fingerprint={bundle.contract_fingerprint!r}: this engine was built for {self._fingerprint!r}; "
                "give both sides the same precision contract"
            )
        if bundle.version < 0 or (current_version is not None and bundle.version <= current_version):
            raise ValueError(f"refit.version={bundle.version}: must be above the version being served, {current_version}")

    def _check_names(self, bundle: RefitBundle) -> None:
        both = sorted(set(bundle.plain) & set(bundle.quantized))
        if both:
            raise ValueError(f"refit: {_some(both)} given both plain and quantised; give each parameter once")
        if self._model.tie_word_embeddings and "lm_head.weight" in bundle.plain:
            raise ValueError(
                "refit: lm_head.weight is an alias of model.embed_tokens.weight (tie_word_embeddings is on); "
                "give model.embed_tokens.weight only"
            )
        given = {*bundle.plain, *bundle.quantized}
        unknown = sorted(given - set(self._plain) - set(self._packed))
        if unknown:
            raise ValueError(f"refit: unknown parameter {_some(unknown)}; names are Hugging Face's of {self._model.family}")
        missing = sorted({*self._plain, *self._packed} - given)
        if missing:
            raise ValueError(f"refit: missing parameter {_some(missing)}; a refit must be complete")
        for name in sorted(set(bundle.plain) & set(self._packed)):
            raise ValueError(f"refit: {name} is plain; this layer's experts must arrive as NVFP4")
        for name in sorted(set(bundle.quantized) & set(self._plain)):
            raise ValueError(f"refit: {name} is quantised; it must arrive in {self._dtype}")

    def _check_plain(self, plain: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in plain.items():
            _check_tensor(name, tensor, self._plain[name], self._dtype)

    def _check_packed(self, quantized: Mapping[str, QuantizedWeight]) -> None:
        for name, weight in quantized.items():
            rows, columns = self._packed[name]
            _check_tensor(f"{name} codes", weight.codes, (rows, columns // 2), torch.uint8)
            _check_tensor(f"{name} block_scale", weight.block_scale, (rows, columns // BLOCK), torch.float8_e4m3fn)
            _check_tensor(f"{name} global_amax", weight.global_amax, (), torch.float32)
            amax = float(weight.global_amax)
            if not (math.isfinite(amax) and amax >= 0):
                raise ValueError(f"refit: {name} global_amax={amax}: must be finite and not negative")
            if name.endswith("gate_proj.weight"):
                up = quantized[name.replace("gate_proj", "up_proj")]
                if float(up.global_amax) != amax:
                    raise ValueError(
                        f"refit: {name} has global_amax={amax}, its up_proj {float(up.global_amax)}: "
                        "gate and up are one pair with one FP32 scale"
                    )

    def _check_kv_amax(self, kv_amax: Mapping[tuple[int, str], float]) -> None:
        expected = {(layer, site) for layer in self._quantized_layers for site in ("k", "v")}
        wrong = sorted(expected ^ set(kv_amax))
        if wrong:
            raise ValueError(f"refit.kv_amax: {'missing' if wrong[0] in expected else 'unknown'} (layer, site) {_some(wrong)}")
        for key, amax in kv_amax.items():
            if not (math.isfinite(amax) and amax > 0):
                raise ValueError(f"refit.kv_amax{list(key)}={amax}: must be finite and positive; calibrate K and V first")


def expected_shapes(
    model: ModelConfig, quantized_layers: frozenset[int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, int]]]:
    """Name to shape of every parameter a complete refit carries: (plain, NVFP4); a packed shape counts values, not bytes."""
    h, i, d = model.hidden_size, model.moe_intermediate_size, model.head_dim
    q, kv = model.num_attention_heads * d, model.num_key_value_heads * d
    plain: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, h), "model.norm.weight": (h,)}
    if not model.tie_word_embeddings:
        plain["lm_head.weight"] = (model.vocab_size, h)
    packed: dict[str, tuple[int, int]] = {}
    in_layer = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate": (model.num_experts, h),
    }
    for layer in range(model.num_layers):
        plain |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in in_layer.items()}
        experts = {
            f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": (h, i) if name == "down_proj" else (i, h)
            for e in range(model.num_experts)
            for name in PROJECTIONS
        }
        (packed if layer in quantized_layers else plain).update(experts)
    return plain, packed


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"refit: {name} is {tensor.dtype}{list(tensor.shape)}, must be {dtype}{list(shape)}")


def _some(items: list) -> str:
    return f"{items[0]}" + (f" and {len(items) - 1} more" if len(items) > 1 else "")
