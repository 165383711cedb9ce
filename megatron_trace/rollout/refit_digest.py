"""One hash for "the bytes a refit carried", computed by the trainer over its bundle and by the engine over what it stores.

Equal digests mean equal bytes, dtypes, shapes and names; anything else is a failed refit (DESIGN.md 3.7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from megatron_trace.rollout.protocol import RefitBundle


def flatten_bundle(bundle: RefitBundle) -> dict[str, torch.Tensor]:
    """Every tensor of ``bundle`` under one name each.

    A quantised weight ``W`` becomes ``W#codes`` (uint8), ``W#block_scale`` (float8_e4m3fn) and ``W#global_amax`` (float32 []);
    a static amax becomes ``kv_amax#<layer>#<k|v>`` (float32 []).
    """
    flat: dict[str, torch.Tensor] = dict(bundle.plain)
    for name, weight in bundle.quantized.items():
        flat[f"{name}#codes"] = weight.codes
        flat[f"{name}#block_scale"] = weight.block_scale
        flat[f"{name}#global_amax"] = weight.global_amax
    for (layer, site), amax in bundle.kv_amax.items():
        flat[f"kv_amax#{layer}#{site}"] = torch.tensor(amax, dtype=torch.float32)
    return flat


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE2b-160 (40 hex digits) over (name, dtype, shape, raw little-endian bytes) of ``tensors`` in order of their names."""
    state = hashlib.blake2b(digest_size=20)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def digest_bundle(bundle: RefitBundle) -> str:
    """The digest an engine must acknowledge after loading ``bundle``."""
    return digest_tensors(flatten_bundle(bundle))
