"""NVFP4: E2M1 codes, one E4M3 scale per 16 values, one FP32 amax per tensor, row or calibrated site.

Bit for bit Transformer Engine's reference (2.20.2, ``custom_recipes/reference_nvfp4.py``, class ``NVFP4QuantizerRef``), all
in FP32 and in this order, with M = ``e4m3_max`` and fl() rounding to FP32::

    S     = min(6 M / g, FLT_MAX), 1 where that is 0          g: the global amax
    scale = e4m3(min(block_amax * (S * fl(1/6)), 448))
    z     = clip(x * min(1 / (scale * (1/S)), FLT_MAX), +-6)
    code  = nearest E2M1 of z, ties to even
    value = (code * scale) * (g * fl(1 / (6 M)))

Axes: K the last dimension, in blocks of 16 (``x[..., 16 b : 16 b + 16]``). A block whose scale rounds to 0 dequantises to 0,
whatever its codes (0, or +-7 when the scale underflowed). A NaN makes its scope's scales NaN and its codes 0; an infinity makes
g infinite, S = 1 and its block scale 448. ``numerics.health`` counts or refuses both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_trace.numerics import dispatch, e2m1, e4m3

BLOCK = 16
"""Values that share one block scale."""
FLT_MAX = torch.finfo(torch.float32).max
_SIXTH = 0.16666667163372040  # fl(1/6)
_DECODE_FACTOR = {448: 0.00037202381645329297, 256: 0.0006510416860692203}  # fl(1/(6 M))

ScaleScope = Literal["tensor", "row", "static"]
BlockShape = Literal["1x16", "16x16"]
FourOverSix = Literal["mae", "mse"]
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NVFP4Tensor:
    """A quantised tensor of logical shape [..., K].

    ``codes`` uint8 [..., K/2], even index in the low nibble; ``block_scale`` float8_e4m3fn [..., K/16] (row-major, not
    swizzled); ``global_amax`` float32, broadcastable to [..., 1] ([] for one per tensor); ``e4m3_max`` the M of the module's
    formulas.
    """

    codes: Tensor
    block_scale: Tensor
    global_amax: Tensor
    e4m3_max: int = 448

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., K]."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def values(self) -> Tensor:
        """float32 E2M1 values [..., K], before any scale."""
        return e2m1.unpack_values(self.codes)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """(code * scale) * (g * fl(1/(6 M))) in FP32, then rounded to ``dtype``."""
        unsupported = "e4m3_max 256" if self.e4m3_max != 448 else None
        path = dispatch.select("dequantize", self.codes, unsupported=unsupported)
        if path == "triton":
            from megatron_trace.kernels import nvfp4 as kernels

            return kernels.dequantize(self, dtype)
        return apply_scales(self.values(), self.block_scale.float(), self.global_amax, self.e4m3_max).to(dtype)


def check_input(x: Tensor, *, name: str = "x") -> None:
    """Raise TypeError for a dtype and ValueError for a last dimension that NVFP4 cannot take."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"nvfp4: {name} is {x.dtype}, must be float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.shape[-1] == 0:
        size = x.shape[-1] if x.ndim else "none"
        raise ValueError(
            f"nvfp4: last dimension of {name} is {size}, must be a positive multiple of {BLOCK}: "
            "choose another width or shard size, or pad the whole tensor before it is sharded"
        )


def block_amax(magnitude: Tensor, block: BlockShape = "1x16") -> Tensor:
    """Largest per block of float32 magnitudes [..., K] -> [..., K/16]; 16x16 repeats one value over the 16 rows of its tile."""
    shape = (*magnitude.shape[:-1], magnitude.shape[-1] // BLOCK)
    rows = magnitude.reshape(-1, magnitude.shape[-1])
    if rows.device.type == "cpu" and rows.numel():
        amax = torch.nn.functional.max_pool1d(rows, BLOCK).view(shape)  # twice as fast as amax over 16
    else:
        amax = magnitude.reshape(*shape, BLOCK).amax(-1)
    if block == "1x16":
        return amax
    if magnitude.ndim < 2 or magnitude.shape[-2] % BLOCK:
        rows_given = magnitude.shape[-2] if magnitude.ndim > 1 else "none"
        raise ValueError(f"nvfp4: block 16x16 needs a row count that is a multiple of 16, got {rows_given}: use block 1x16")
    tiles = amax.view(*shape[:-2], shape[-2] // BLOCK, BLOCK, shape[-1]).amax(-2, keepdim=True)
    return tiles.repeat_interleave(BLOCK, -2).view(shape)


def global_amax_of(x: Tensor, *, scale_scope: ScaleScope) -> Tensor:
    """FP32 amax that ``quantize`` would use: [] for ``tensor``, [..., 1] for ``row``. What ranks MAX-reduce before
    quantising.
    """
    if scale_scope == "row":
        return x.abs().amax(-1, keepdim=True).float()
    if scale_scope == "tensor":
        return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    raise ValueError("nvfp4: scale_scope='static' has no amax of its own: pass the calibrated global_amax")


def encode_scale(global_amax: Tensor, e4m3_max: int = 448) -> Tensor:
    """S of the module's formulas, float32, same shape as ``global_amax``."""
    # tensor / tensor: a Python scalar over a tensor would be reciprocal times scalar, which rounds twice
    s = torch.div(torch.full_like(global_amax, e2m1.MAX * e4m3_max), global_amax).clamp_(max=FLT_MAX)
    return s.masked_fill_(s == 0, 1.0)


def block_scale_from_amax(amax: Tensor, s: Tensor) -> Tensor:
    """E4M3 block scales (float8_e4m3fn) for block amax [..., K/16] under encode scale ``s`` ([] or [..., 1])."""
    return e4m3.cast(amax * (s * _SIXTH))


def inverse_scale(scale_f32: Tensor, s: Tensor) -> Tensor:
    """min(1 / (scale * (1/S)), FLT_MAX), one rounding each: what x is multiplied by."""
    return (scale_f32 * s.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)


def scaled(x_f32: Tensor, scale_f32: Tensor, s: Tensor, *, out: Tensor | None = None) -> Tensor:
    """z = clip(x / (block scale * global scale), +-6), float32 [..., K]: the one place quantiser and bracket get it from.

    ``scale_f32`` [..., K/16] decoded block scales, ``s`` the encode scale ([] or [..., 1]). Adds +0.0, so that x = -0.0 has
    code 0.
    """
    inverse = inverse_scale(scale_f32, s)
    blocks = (*scale_f32.shape, BLOCK)
    z = torch.mul(x_f32.reshape(blocks), inverse.unsqueeze(-1), out=None if out is None else out.view(blocks))
    return clip(z).view(x_f32.shape)


def clip(t: Tensor) -> Tensor:
    """Clip to [-6, 6] in place; -0.0 becomes 0.0, so that an x of -0.0 has code 0."""
    return t.add_(0.0).clamp_(-e2m1.MAX, e2m1.MAX)


def decode_factor(global_amax: Tensor, e4m3_max: int, shape: torch.Size) -> Tensor:
    """g * fl(1/(6 M)), one per row of a tensor of ``shape`` [..., K]: float32 [..., 1], contiguous."""
    return (global_amax * _DECODE_FACTOR[e4m3_max]).expand(*shape[:-1], 1).contiguous()


def apply_scales(q: Tensor, scale_f32: Tensor, global_amax: Tensor, e4m3_max: int) -> Tensor:
    """Dequantise contiguous grid values float32 [..., K] in place: scales float32 [..., K/16], amax [] or [..., 1].

    code * scale is exact, only the second product rounds.
    """
    q.view(*scale_f32.shape, BLOCK).mul_(scale_f32.unsqueeze(-1))
    return q.mul_(global_amax * _DECODE_FACTOR[e4m3_max])


def quantize(
    x: Tensor,
    *,
    scale_scope: ScaleScope = "tensor",
    global_amax: Tensor | None = None,
    block: BlockShape = "1x16",
    four_over_six: FourOverSix | None = None,
    e4m3_max: int = 448,
) -> NVFP4Tensor:
    """Quantise float ``x`` [..., K] to NVFP4, rounding to nearest.

    ``scale_scope`` says what the FP32 amax covers: the whole ``tensor``, each ``row`` (the last dimension), or a calibrated
    ``static`` value. ``global_amax`` (float32, [] or broadcastable to [..., 1]) is required for ``static``; with the other
    two it replaces the amax of ``x``, for example by one that was MAX-reduced over ranks. ``four_over_six`` tries each
    block's amax at 6 and at 4 and keeps the smaller summed error, ties to 6 (Transformer Engine's rule); only it allows
    ``e4m3_max`` 256. Raises TypeError or ValueError naming what does not fit.
    """
    path = _path("quantize", x, block, four_over_six)
    if path == "triton":
        from megatron_trace.kernels import nvfp4 as kernels

        return kernels.quantize(x, scale_scope=scale_scope, global_amax=global_amax)
    q, scale, amax = _round(x, scale_scope, global_amax, block, four_over_six, e4m3_max)
    return NVFP4Tensor(codes=e2m1.pack_values(q), block_scale=scale, global_amax=amax, e4m3_max=e4m3_max)


def quantize_dequantize(
    x: Tensor,
    *,
    scale_scope: ScaleScope = "tensor",
    global_amax: Tensor | None = None,
    block: BlockShape = "1x16",
    four_over_six: FourOverSix | None = None,
    e4m3_max: int = 448,
) -> Tensor:
    """``quantize(x, ...).dequantize(x.dtype)`` without making the codes; no gradient (``guided.fake_quantize`` has one)."""
    path = _path("quantize_dequantize", x, block, four_over_six)
    if path == "triton":
        from megatron_trace.kernels import nvfp4 as kernels

        return kernels.quantize_dequantize(x, scale_scope=scale_scope, global_amax=global_amax)
    if path == "compiled":
        return _quantize_dequantize_compiled(x, scale_scope, global_amax, block, e4m3_max)
    q, scale, amax = _round(x, scale_scope, global_amax, block, four_over_six, e4m3_max)
    return apply_scales(q, scale.float(), amax, e4m3_max).to(x.dtype)


def quantize_with_dequantized(
    x: Tensor,
    *,
    scale_scope: ScaleScope = "tensor",
    global_amax: Tensor | None = None,
    block: BlockShape = "1x16",
    four_over_six: FourOverSix | None = None,
    e4m3_max: int = 448,
) -> tuple[NVFP4Tensor, Tensor]:
    """Both ``quantize(x, ...)`` and its values in ``x.dtype``, from one rounding: what a recording engine needs."""
    path = _path("quantize_with_dequantized", x, block, four_over_six)
    if path == "triton":
        from megatron_trace.kernels import nvfp4 as kernels

        return kernels.quantize_with_dequantized(x, scale_scope=scale_scope, global_amax=global_amax)
    q, scale, amax = _round(x, scale_scope, global_amax, block, four_over_six, e4m3_max)
    tensor = NVFP4Tensor(codes=e2m1.pack_values(q), block_scale=scale, global_amax=amax, e4m3_max=e4m3_max)
    return tensor, apply_scales(q, scale.float(), amax, e4m3_max).to(x.dtype)


def _path(op: str, x: Tensor, block: BlockShape, four_over_six: FourOverSix | None) -> dispatch.Path:
    unsupported = None if block == "1x16" and four_over_six is None else f"block {block}, four_over_six {four_over_six}"
    return dispatch.select(op, x, unsupported=unsupported, compilable=op == "quantize_dequantize" and four_over_six is None)


@torch.no_grad()
def _quantize_dequantize_compiled(
    x: Tensor, scale_scope: ScaleScope, global_amax: Tensor | None, block: BlockShape, e4m3_max: int
) -> Tensor:
    """Scales per block by the eager code, then one fused pass over the values: compiled whole, scales are redone per value."""
    check_input(x)
    check_scope(scale_scope, global_amax)
    _check_options(block, None, e4m3_max)
    amax_b = block_amax(x.abs().float(), block)
    amax_g = _resolve_amax(amax_b, scale_scope, global_amax)
    s = encode_scale(amax_g, e4m3_max)
    scale_f32 = block_scale_from_amax(amax_b, s).float()
    factor = decode_factor(amax_g, e4m3_max, x.shape)
    fused = dispatch.compiled(_round_and_scale)
    width = amax_b.shape[-1]
    blocks = x.reshape(-1, width, BLOCK)
    inverse = inverse_scale(scale_f32, s).view(-1, width)
    return fused(blocks, inverse, scale_f32.view(-1, width), factor.view(-1, 1, 1)).view(x.shape)  # type: ignore[no-any-return]


def _round_and_scale(x: Tensor, inverse: Tensor, scale_f32: Tensor, factor: Tensor) -> Tensor:
    z = clip(x.float() * inverse.unsqueeze(-1))
    return ((e2m1.round_to_nearest_(z) * scale_f32.unsqueeze(-1)) * factor).to(x.dtype)


@torch.no_grad()
def _round(
    x: Tensor,
    scale_scope: ScaleScope,
    global_amax: Tensor | None,
    block: BlockShape,
    four_over_six: FourOverSix | None,
    e4m3_max: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grid values float32 [..., K], block scales float8_e4m3fn [..., K/16], global amax)."""
    check_input(x)
    check_scope(scale_scope, global_amax)
    _check_options(block, four_over_six, e4m3_max)
    x_f32 = x.float()
    buffer = torch.abs(x_f32, out=torch.empty(x.shape, device=x.device))  # contiguous; becomes z, then the result
    amax_b = block_amax(buffer, block)
    amax_g = _resolve_amax(amax_b, scale_scope, global_amax)
    s = encode_scale(amax_g, e4m3_max)
    if four_over_six is not None:
        q, scale = _round_four_over_six(x_f32, amax_b, amax_g, s, block, four_over_six, e4m3_max)
        return q, scale, amax_g
    scale = block_scale_from_amax(amax_b, s)
    z = scaled(x_f32, scale.float(), s, out=buffer)
    return e2m1.round_to_nearest_(z, scratch=scratch_of(x, x_f32)), scale, amax_g


def scratch_of(x: Tensor, x_f32: Tensor) -> Tensor | None:
    """``x_f32`` itself where it is a private contiguous copy of ``x`` that may be overwritten, else None."""
    return x_f32 if x_f32 is not x and x_f32.is_contiguous() else None


def _check_options(block: BlockShape, four_over_six: FourOverSix | None, e4m3_max: int) -> None:
    if block not in ("1x16", "16x16"):
        raise ValueError(f"nvfp4: block={block!r}, must be '1x16' or '16x16'")
    if four_over_six not in (None, "mae", "mse"):
        raise ValueError(f"nvfp4: four_over_six={four_over_six!r}, must be None, 'mae' or 'mse'")
    if e4m3_max not in _DECODE_FACTOR or (e4m3_max != 448 and four_over_six is None):
        raise ValueError(f"nvfp4: e4m3_max={e4m3_max}, must be 448, or 256 together with four_over_six")


def check_scope(scale_scope: ScaleScope, global_amax: Tensor | None) -> None:
    """Raise ValueError for an unknown scope, a static scope without amax, or an amax of another shape than [] or [..., 1]."""
    if scale_scope not in ("tensor", "row", "static"):
        raise ValueError(f"nvfp4: scale_scope={scale_scope!r}, must be 'tensor', 'row' or 'static'")
    if global_amax is None:
        if scale_scope == "static":
            raise ValueError("nvfp4: scale_scope='static' needs global_amax, the calibrated FP32 amax of this site")
    elif global_amax.ndim and global_amax.shape[-1] != 1:
        raise ValueError(f"nvfp4: global_amax has shape {list(global_amax.shape)}, must be [] or [..., 1]")


def _resolve_amax(amax_b: Tensor, scale_scope: ScaleScope, global_amax: Tensor | None) -> Tensor:
    """The FP32 amax of the scope, [] or [..., 1], from the block amax [..., K/16] unless given."""
    if global_amax is not None:
        return global_amax.to(device=amax_b.device, dtype=torch.float32)
    if scale_scope == "row":
        return amax_b.amax(-1, keepdim=True)
    return amax_b.amax() if amax_b.numel() else amax_b.new_zeros(())


def _round_four_over_six(
    x_f32: Tensor, amax_b: Tensor, amax_g: Tensor, s: Tensor, block: BlockShape, error: FourOverSix, e4m3_max: int
) -> tuple[Tensor, Tensor]:
    """Per block the better of amax at 6 and amax at 4 (scale x 1.5); strict < picks 4, so ties go to 6."""
    base = torch.div(amax_b, torch.full_like(amax_b, e2m1.MAX)) * s  # here the reference divides, other than on its main path
    scale_6, scale_4 = e4m3.cast(base), e4m3.cast(base * 1.5)
    q_6 = e2m1.round_to_nearest_(scaled(x_f32, scale_6.float(), s))
    q_4 = e2m1.round_to_nearest_(scaled(x_f32, scale_4.float(), s))
    error_6 = _block_error(x_f32, q_6, scale_6.float(), amax_g, error, e4m3_max)
    error_4 = _block_error(x_f32, q_4, scale_4.float(), amax_g, error, e4m3_max)
    if block == "16x16":
        error_6, error_4 = _tile_error(error_6), _tile_error(error_4)
    pick_4 = error_4 < error_6
    q = torch.where(pick_4.repeat_interleave(BLOCK, -1), q_4, q_6)
    scale = torch.where(pick_4, scale_4.view(torch.uint8), scale_6.view(torch.uint8)).view(torch.float8_e4m3fn)
    return q, scale


def _block_error(x_f32: Tensor, q: Tensor, scale_f32: Tensor, amax_g: Tensor, error: FourOverSix, e4m3_max: int) -> Tensor:
    """Summed error per block [..., K/16], in the input's domain, added in element order like the reference."""
    value = q.view(*scale_f32.shape, BLOCK) * scale_f32.unsqueeze(-1)
    value = value * amax_g.unsqueeze(-1) if amax_g.ndim else value * amax_g
    difference = torch.div(value, torch.full_like(value, e2m1.MAX * e4m3_max)) - x_f32.reshape(value.shape)
    terms = difference * difference if error == "mse" else difference.abs()
    total = torch.zeros_like(scale_f32)
    for i in range(BLOCK):
        total = total + terms[..., i]
    return total


def _tile_error(error: Tensor) -> Tensor:
    """Add the 16 row errors of each tile in the reference's tree order (8+8, 4+4, 2+2, 1+1), repeated over the rows."""
    shape = error.shape
    rows = error.view(*shape[:-2], shape[-2] // BLOCK, BLOCK, shape[-1])
    for half in (8, 4, 2, 1):
        rows = rows[..., :half, :] + rows[..., half : 2 * half, :]
    return rows.repeat_interleave(BLOCK, -2).view(shape)
