"""Where NVFP4 bytes lie: columns, padding, the tensor core's scale layout, and gate and up as one pair.

Ragged widths: ``quantize`` refuses a K that is not a multiple of 16. ``pad_last`` appends zeros to a whole, unsharded tensor,
as Transformer Engine's reference does (zeros change no amax, so the other blocks keep their bytes). A tensor-parallel shard
must never be padded on its own, nor cut inside a block: ``check_shard`` refuses that.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_trace.numerics import e4m3, nvfp4
from megatron_trace.numerics.nvfp4 import BLOCK, NVFP4Tensor, ScaleScope

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Rows and block scales of one tile of the tensor core's scale layout."""


def quantize_columnwise(
    x: Tensor, *, scale_scope: ScaleScope = "tensor", global_amax: Tensor | None = None, block: nvfp4.BlockShape = "1x16"
) -> NVFP4Tensor:
    """Quantise the transpose of the last two axes: blocks run along the rows, as the weight gradient needs them.

    Always from the unquantised values, never from transposed codes. Scope ``row`` is one amax per column of ``x``.
    """
    return nvfp4.quantize(x.transpose(-1, -2).contiguous(), scale_scope=scale_scope, global_amax=global_amax, block=block)


def pad_last(x: Tensor, *, multiple: int = BLOCK) -> Tensor:
    """``x`` with zeros appended until the last dimension is a multiple of ``multiple``; ``x`` itself where it is one
    already.
    """
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def check_shard(width: int, parts: int, *, name: str = "K") -> int:
    """Width of one of ``parts`` equal shards of ``width``; raises ValueError where a shard would cut a block of 16."""
    if parts < 1 or width % parts or (width // parts) % BLOCK:
        legal = [p for p in range(1, width // BLOCK + 1) if width % (p * BLOCK) == 0]
        raise ValueError(f"{name}={width} cannot be cut into {parts} shards of whole blocks of {BLOCK}: use one of {legal}")
    return width // parts


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [M, N] (one byte each) in the 128x4 tile layout of block-scaled matrix instructions.

    Pads with zeros to whole tiles and returns [ceil(M/128)*128, ceil(N/4)*4] bytes of the same dtype, tiles row-major, inside
    a tile the byte of (row, column) at (row % 32) * 16 + (row // 32) * 4 + column. Source: cuBLAS, "1D block scaling factors
    layout".
    """
    raw = scales.view(torch.uint8)
    rows, columns = raw.shape
    padded = torch.nn.functional.pad(raw, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, *, rows: int, columns: int) -> Tensor:
    """Inverse of ``swizzle_scales``: [rows, columns] scales, the padding dropped. Raises ValueError for another padded
    shape.
    """
    expected = (-(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS)
    if tuple(swizzled.shape) != expected:
        raise ValueError(f"swizzled scales are {list(swizzled.shape)}, {rows}x{columns} scales are padded to {list(expected)}")
    raw = swizzled.view(torch.uint8)
    tiles = raw.view(expected[0] // TILE_ROWS, expected[1] // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(expected)[:rows, :columns].contiguous().view(swizzled.dtype)


def pair_amax(gate: Tensor, up: Tensor) -> Tensor:
    """FP32 amax [] of both halves: quantise each with it (scope ``static``) and they share one global scale."""
    return torch.maximum(gate.abs().amax(), up.abs().amax()).float()


def pair(gate: NVFP4Tensor, up: NVFP4Tensor) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """Bring two finished halves to one global amax, the larger: payload untouched, the other half's block scales rescaled.

    For checkpoints whose halves were quantised apart. Equal amaxes are returned as they are. Rescaling rounds E4M3 again, so
    values may move by up to half a scale step; new code quantises with ``pair_amax`` instead. Both amaxes must be single
    ([]).
    """
    if gate.global_amax.numel() != 1 or up.global_amax.numel() != 1 or gate.e4m3_max != up.e4m3_max:
        raise ValueError("gate and up must each have one global amax and the same e4m3_max to be paired")
    amax = torch.maximum(gate.global_amax, up.global_amax)
    return _with_amax(gate, amax), _with_amax(up, amax)


def _with_amax(q: NVFP4Tensor, amax: Tensor) -> NVFP4Tensor:
    if bool(q.global_amax == amax):
        return q
    scale = e4m3.cast(q.block_scale.float() * torch.div(q.global_amax, amax))
    return dataclasses.replace(q, block_scale=scale, global_amax=amax)
