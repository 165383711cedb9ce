"""A slow second implementation of the quantised model, as an oracle: one whole sequence, no pages, no batching, Python loops.

It shares nothing with the engine but ``numerics`` and the weights, and keeps what it rounded: ``sites[(layer, site)]`` is the
NVFP4Tensor of all positions, ``raw`` the values before rounding, ``routes[layer]`` the experts of each position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from megatron_trace.config.model import ModelConfig
from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import NVFP4Tensor
from megatron_trace.rollout.protocol import RefitBundle


@dataclass
class Reference:
    """Forward of ``bundle`` in ``dtype``; quantised where the bundle is."""

    model: ModelConfig
    bundle: RefitBundle
    dtype: torch.dtype
    sites: dict[tuple[int, str], NVFP4Tensor] = field(default_factory=dict)
    raw: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    routes: dict[int, torch.Tensor] = field(default_factory=dict)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """FP32 logits [n, V] of all positions."""
        h = self._plain("model.embed_tokens")[torch.tensor(tokens)]
        for layer in range(self.model.num_layers):
            h = h + self._attention(self._norm(h, f"model.layers.{layer}.input_layernorm"), layer)
            h = h + self._moe(self._norm(h, f"model.layers.{layer}.post_attention_layernorm"), layer)
        head = "model.embed_tokens" if self.model.tie_word_embeddings else "lm_head"
        return self._norm(h, "model.norm").float() @ self._plain(head).float().T

    def _plain(self, name: str) -> torch.Tensor:
        return self.bundle.plain[f"{name}.weight"]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._plain(name), self.model.rms_norm_eps)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.float() @ weight.float().T).to(self.dtype)

    def _round(self, x: torch.Tensor, layer: int, site: str) -> torch.Tensor:
        static = None if site == "fc1_in" else torch.tensor(self.bundle.kv_amax[layer, site], dtype=torch.float32)
        q = nvfp4.quantize(x, scale_scope="row" if static is None else "static", global_amax=static)
        self.sites[layer, site], self.raw[layer, site] = q, x
        return q.dequantize(self.dtype)

    def _attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        m, n, prefix = self.model, len(x), f"model.layers.{layer}.self_attn."
        q, k, v = (self._product(x, self._plain(f"{prefix}{name}_proj")).view(n, -1, m.head_dim) for name in "qkv")
        q, k = self._rope(self._norm(q, f"{prefix}q_norm")), self._rope(self._norm(k, f"{prefix}k_norm"))
        if self.bundle.quantized:
            k, v = (self._round(t.reshape(n, -1), layer, site).view(t.shape) for t, site in ((k, "k"), (v, "v")))
        out = torch.empty_like(q)
        for head in range(m.num_attention_heads):
            kv_head = head * m.num_key_value_heads // m.num_attention_heads
            for i in range(n):
                scores = (k[: i + 1, kv_head].float() @ q[i, head].float() / math.sqrt(m.head_dim)).to(self.dtype)
                probs = scores.float().softmax(0).to(self.dtype)
                out[i, head] = (probs.float() @ v[: i + 1, kv_head].float()).to(self.dtype)
        return self._product(out.view(n, -1), self._plain(f"{prefix}o_proj"))

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequency = self.model.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(len(x), dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos + -b * sin, b * cos + a * sin), -1)

    def _moe(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        logits = x.float() @ self._plain(f"model.layers.{layer}.mlp.gate").float().T
        probs = logits.softmax(-1)
        if self.bundle.quantized:
            x = self._round(x, layer, "fc1_in")
        chosen = []
        out = torch.zeros(x.shape)
        for t, row in enumerate(probs.tolist()):
            experts = sorted(range(len(row)), key=lambda e: (-row[e], e))[: self.model.num_experts_per_tok]
            chosen.append(experts)
            for e in sorted(experts):
                weight = torch.tensor(row[e] / sum(row[j] for j in experts))
                out[t] += (self._expert(x[t : t + 1], layer, e)[0].float() * weight).to(self.dtype).float()
        self.routes[layer] = torch.tensor(chosen)
        return out.to(self.dtype)

    def _expert(self, x: torch.Tensor, layer: int, expert: int) -> torch.Tensor:
        gate, up, down = (self._expert_weight(layer, expert, name) for name in ("gate", "up", "down"))
        act = F.silu(self._product(x, gate)) * self._product(x, up)
        if self.bundle.quantized:
            act = nvfp4.quantize(act, scale_scope="row").dequantize(self.dtype)
        return self._product(act, down)

    def _expert_weight(self, layer: int, expert: int, name: str) -> torch.Tensor:
        key = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        if f"{key}.weight" not in self.bundle.quantized:
            return self._plain(key)
        w = self.bundle.quantized[f"{key}.weight"]
        packed = NVFP4Tensor(codes=w.codes, block_scale=w.block_scale, global_amax=w.global_amax)
        return packed.dequantize(self.dtype)
