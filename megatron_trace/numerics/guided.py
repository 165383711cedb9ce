"""Guided rounding (TRACE, arXiv 2610.07767): round to the neighbouring codeword that the rollout chose, with the rollout's
scale.

For a value x of the training forward, s the recorded scale and z = clip(x / s, +-6) (``nvfp4.scaled``, the quantiser's own z)::

    {q-, q+} = the neighbouring E2M1 values of z, equal where z is on the grid
    full (4 bits a value):    q* = the endpoint nearest to the rollout's value
    compact (1 bit a value):  q* = the endpoint whose mantissa bit is the recorded one
    output = s q*, gradient identity

Mantissa bits alternate along the signed grid, through zero too, so exactly one endpoint of a bracket has a given bit. Full is
never farther from the rollout's value than nearest is; compact is not so bound (z = 2.4, rollout 1.5: nearest 2, full 2,
compact 3). A block whose recorded scale is 0 gives 0; its bits are recorded as 0 and mean nothing. Axes: K the last
dimension, blocks of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_trace.numerics import dispatch, e2m1, nvfp4, rounding
from megatron_trace.numerics.nvfp4 import NVFP4Tensor, ScaleScope


@dataclass(frozen=True)
class GuidanceRecord:
    """What one rollout tensor of logical shape [..., K] was rounded to.

    ``bits`` 1 or 4; ``payload`` uint8 [..., K * bits / 8]: for 1 the mantissa bits, eight to a byte, lowest bit first; for 4
    the codes, even element in the low nibble. ``block_scale`` float8_e4m3fn [..., K/16]. ``global_amax`` float32 [] or
    broadcastable to [..., 1] (one per row where rows come from several weight versions). ``valid`` bool [...], False for rows
    that must be rounded without guidance; None means all rows are valid. ``e4m3_max`` as in ``NVFP4Tensor``.
    """

    bits: int
    payload: Tensor
    block_scale: Tensor
    global_amax: Tensor
    valid: Tensor | None = None
    e4m3_max: int = 448

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., K] of the recorded tensor."""
        return torch.Size((*self.payload.shape[:-1], self.payload.shape[-1] * 8 // self.bits))


@dataclass(frozen=True)
class CodeCounts:
    """Comparison of a training tensor's codes with the rollout's: plain integers.

    ``flips`` codes that differ; ``adjacent`` of those, one grid step apart; ``worse_than_nearest`` values farther from the
    rollout's value than nearest rounding is (0 for full guidance, whatever the data).
    """

    values: int
    flips: int
    adjacent: int
    worse_than_nearest: int


@torch.no_grad()
def quantize_and_record(
    x: Tensor, *, bits: int = 1, scale_scope: ScaleScope = "row", global_amax: Tensor | None = None
) -> tuple[NVFP4Tensor, GuidanceRecord]:
    """``nvfp4.quantize`` and ``make_record`` together; one kernel on CUDA for compact records."""
    unsupported = None if bits == 1 else "full record"
    if dispatch.select("quantize_and_record", x, unsupported=unsupported) == "triton":
        from megatron_trace.kernels import nvfp4 as kernels

        return kernels.quantize_and_record(x, scale_scope=scale_scope, global_amax=global_amax)
    q = nvfp4.quantize(x, scale_scope=scale_scope, global_amax=global_amax)
    return q, make_record(q, bits=bits)


@torch.no_grad()
def make_record(q: NVFP4Tensor, *, bits: int = 1) -> GuidanceRecord:
    """Record of a quantised rollout tensor. ``bits`` 1: compact, 1.5 bit a value with its scales; 4: full, 4.5. Else
    ValueError.
    """
    if bits == 4:
        payload = _zero_dead_blocks(q.codes, q.block_scale)
    elif bits == 1:
        payload = _zero_dead_blocks(pack_bits(q.codes), q.block_scale)
    else:
        raise ValueError(f"guidance bits={bits}: must be 1 (mantissa bit) or 4 (whole code)")
    return GuidanceRecord(bits=bits, payload=payload, block_scale=q.block_scale, global_amax=q.global_amax, e4m3_max=q.e4m3_max)


def pack_bits(codes: Tensor) -> Tensor:
    """Mantissa bits of packed codes uint8 [..., K/2], eight to a byte, lowest first: uint8 [..., K/8]."""
    words = codes.contiguous().view(torch.int32)  # eight codes, bit 0 of each nibble
    words = words & 0x11111111
    words = (words | (words >> 3)) & 0x03030303
    words = (words | (words >> 6)) & 0x000F000F
    return ((words | (words >> 12)) & 0xFF).to(torch.uint8)


def unpack_bits(payload: Tensor) -> Tensor:
    """float32 [..., K] of 0 and 1 from packed bits uint8 [..., K/8]."""
    if torch.compiler.is_compiling():
        lanes = torch.arange(8, dtype=torch.int32, device=payload.device)
        return ((payload.unsqueeze(-1).to(torch.int32) >> lanes) & 1).float().flatten(-2)
    if payload.numel() == 0:
        return payload.new_empty((*payload.shape[:-1], payload.shape[-1] * 8), dtype=torch.float32)
    with torch.inference_mode(False):
        table = _bit_table(payload.device)
    return table.index_select(0, payload.reshape(-1).int()).view(*payload.shape[:-1], payload.shape[-1] * 8)


@lru_cache(maxsize=8)
def _bit_table(device: torch.device) -> Tensor:
    """float32 [256, 8]: the bits of each byte, lowest first."""
    return ((torch.arange(256).unsqueeze(-1) >> torch.arange(8)) & 1).float().to(device)


def _zero_dead_blocks(payload: Tensor, block_scale: Tensor) -> Tensor:
    """Payload with the bits of every block whose scale is 0 cleared."""
    alive = (block_scale.view(torch.uint8) & 0x7F).ne(0)
    per_block = payload.reshape(*block_scale.shape, payload.shape[-1] // block_scale.shape[-1])
    return (per_block * alive.unsqueeze(-1)).reshape(payload.shape)


def fake_quantize(
    x: Tensor,
    *,
    record: GuidanceRecord | None = None,
    scale_scope: ScaleScope = "row",
    global_amax: Tensor | None = None,
) -> Tensor:
    """Quantise and dequantise float ``x`` [..., K] with straight-through gradient (identity for every value, clipped ones too).

    With ``record`` (same logical shape) each valid row is rounded by the record's rule with the record's scales. Rows marked
    invalid, or all rows without a record, are rounded to nearest with their own scale: ``scale_scope`` and ``global_amax`` as
    in ``nvfp4.quantize``. Returns ``x.dtype``. Raises ValueError when the record does not fit ``x``.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, record, scale_scope, global_amax)  # type: ignore[no-any-return, no-untyped-call]
    return _fake_quantize(x, record, scale_scope, global_amax)


def nearest_on_record_scale(x: Tensor, record: GuidanceRecord) -> Tensor:
    """``x`` rounded to nearest with the record's scales (payload and validity unused), straight-through; the middle control."""
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, record, None, None)  # type: ignore[no-any-return, no-untyped-call]
    return _nearest_on_record_scale(x, record)


class _StraightThrough(torch.autograd.Function):
    """Forward: the rounded values. Backward: identity to x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, record: GuidanceRecord | None, scale_scope: ScaleScope | None, global_amax: Tensor | None
    ) -> Tensor:
        if scale_scope is None:
            assert record is not None
            return _nearest_on_record_scale(x, record)
        return _fake_quantize(x, record, scale_scope, global_amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0], None, None, None


@torch.no_grad()
def _fake_quantize(x: Tensor, record: GuidanceRecord | None, scale_scope: ScaleScope, global_amax: Tensor | None) -> Tensor:
    if record is None:
        return nvfp4.quantize_dequantize(x, scale_scope=scale_scope, global_amax=global_amax)
    guided = _guided(x, record)
    valid = record.valid
    if valid is None or (valid.device.type == "cpu" and bool(valid.all())):
        return guided
    nearest = nvfp4.quantize_dequantize(x, scale_scope=scale_scope, global_amax=global_amax)
    return torch.where(valid.unsqueeze(-1), guided, nearest)


def _guided(x: Tensor, record: GuidanceRecord) -> Tensor:
    """Every row by the record, on the path ``dispatch`` picks."""
    _check_record(x, record)
    path = dispatch.select("guided", x, unsupported="e4m3_max 256" if record.e4m3_max != 448 else None, compilable=True)
    if path == "triton":
        from megatron_trace.kernels import nvfp4 as kernels

        return kernels.fake_quantize_guided(x, record)
    if path == "compiled":
        return _guided_compiled(x, record)
    q = _guided_values(x, record)
    return nvfp4.apply_scales(q, record.block_scale.float(), record.global_amax, record.e4m3_max).to(x.dtype)


def _guided_compiled(x: Tensor, record: GuidanceRecord) -> Tensor:
    """Scales per block by the eager code, then one fused pass over the values."""
    scale_f32 = record.block_scale.float()
    rows, width = scale_f32.numel() // scale_f32.shape[-1], scale_f32.shape[-1]
    inverse = nvfp4.inverse_scale(scale_f32, nvfp4.encode_scale(record.global_amax, record.e4m3_max)).view(rows, width)
    fused = dispatch.compiled(_guided_blocks)
    out = fused(
        x.reshape(rows, width, nvfp4.BLOCK),
        record.payload.reshape(rows, width, nvfp4.BLOCK * record.bits // 8),
        inverse,
        scale_f32.view(rows, width),
        nvfp4.decode_factor(record.global_amax, record.e4m3_max, record.shape).view(rows, 1, 1),
        record.bits,
    )
    return out.view(x.shape)  # type: ignore[no-any-return]


def _guided_blocks(x: Tensor, payload: Tensor, inverse: Tensor, scale_f32: Tensor, factor: Tensor, bits: int) -> Tensor:
    z = nvfp4.clip(x.float() * inverse.unsqueeze(-1))
    if bits == 1:
        q = rounding.compact_(z, unpack_bits(payload))
    else:
        q = rounding.full_(z, e2m1.unpack_values(payload))
    return ((q * scale_f32.unsqueeze(-1)) * factor).to(x.dtype)


@torch.no_grad()
def _nearest_on_record_scale(x: Tensor, record: GuidanceRecord) -> Tensor:
    q = e2m1.round_to_nearest_(_scaled_by_record(x, record))
    return nvfp4.apply_scales(q, record.block_scale.float(), record.global_amax, record.e4m3_max).to(x.dtype)


def _check_record(x: Tensor, record: GuidanceRecord) -> None:
    nvfp4.check_input(x)
    if record.bits not in (1, 4):
        raise ValueError(f"guidance record has bits={record.bits}: must be 1 or 4")
    if record.shape != x.shape:
        shapes = f"{list(record.shape)}, x has {list(x.shape)}"
        raise ValueError(f"guidance record is for shape {shapes}: gather the rows of x's tokens")


def _scaled_by_record(x: Tensor, record: GuidanceRecord) -> Tensor:
    """z of ``x`` under the record's scales, a new float32 [..., K]."""
    _check_record(x, record)
    s = nvfp4.encode_scale(record.global_amax, record.e4m3_max)
    x_f32 = x.float()
    return nvfp4.scaled(x_f32, record.block_scale.float(), s, out=nvfp4.scratch_of(x, x_f32))


def _guided_values(x: Tensor, record: GuidanceRecord) -> Tensor:
    """E2M1 values q* (float32 [..., K]) of ``x`` under the record; a zero takes z's sign."""
    z = _scaled_by_record(x, record)
    if record.bits == 1:
        return rounding.compact_(z, unpack_bits(record.payload))
    return rounding.full_(z, e2m1.unpack_values(record.payload))


@torch.no_grad()
def gather_record(
    rows: Tensor, index: Tensor, *, start: int, width: int, bits: int, global_amax: Tensor | None = None
) -> GuidanceRecord:
    """One site's column of record rows, for the tokens ``index``: a GuidanceRecord of shape [T, width].

    ``rows`` uint8 [N, row bytes]; the column lies at byte ``start``: width * bits / 8 of payload, width / 16 scales, and,
    unless ``global_amax`` ([] or [T, 1]) is given, the four bytes of the row's FP32 amax, little-endian. ``index`` int [T].
    """
    if dispatch.select("gather_record", rows, unsupported=None) == "triton":
        from megatron_trace.kernels import nvfp4 as kernels

        return kernels.gather_record(rows, index, start=start, width=width, bits=bits, global_amax=global_amax)
    payload_end = start + width * bits // 8
    scale_end = payload_end + width // nvfp4.BLOCK
    taken = rows[index, start : scale_end + (4 if global_amax is None else 0)]
    payload, scales, tail = taken.split_with_sizes(
        [payload_end - start, scale_end - payload_end, taken.shape[-1] - (scale_end - start)], dim=-1
    )
    return GuidanceRecord(
        bits=bits,
        payload=payload.contiguous(),
        block_scale=scales.contiguous().view(torch.float8_e4m3fn),
        global_amax=tail.contiguous().view(torch.float32) if global_amax is None else global_amax,
    )


@torch.no_grad()
def guided_codes(x: Tensor, record: GuidanceRecord) -> Tensor:
    """Signed ladder indices (int8 [..., K], -7..7) that guided rounding gives ``x``; ``record.valid`` is not looked at."""
    return e2m1.ladder_from_values(_guided_values(x, record))


@torch.no_grad()
def nearest_codes(x: Tensor, record: GuidanceRecord) -> Tensor:
    """Signed ladder indices of ``x`` rounded to nearest with the record's scales."""
    return e2m1.ladder_from_values(e2m1.round_to_nearest_(_scaled_by_record(x, record)))


@torch.no_grad()
def own_scale_codes(x: Tensor, *, scale_scope: ScaleScope = "row", global_amax: Tensor | None = None) -> Tensor:
    """Signed ladder indices of ``x`` rounded to nearest with its own scales: plain QAT."""
    return tensor_codes(nvfp4.quantize(x, scale_scope=scale_scope, global_amax=global_amax))


@torch.no_grad()
def tensor_codes(q: NVFP4Tensor) -> Tensor:
    """Signed ladder indices of a quantised tensor; 0 in blocks whose scale is 0."""
    return e2m1.ladder_from_codes(e2m1.unpack(_zero_dead_blocks(q.codes, q.block_scale)))


@torch.no_grad()
def record_codes(record: GuidanceRecord) -> Tensor:
    """Signed ladder indices the rollout chose; needs a 4-bit record, else ValueError."""
    if record.bits != 4:
        raise ValueError(f"record_codes: record has bits={record.bits}, the rollout's codes are only in a record of bits=4")
    return e2m1.ladder_from_codes(e2m1.unpack(record.payload))


@torch.no_grad()
def count_codes(rollout: Tensor, trained: Tensor, *, nearest: Tensor | None = None, mask: Tensor | None = None) -> CodeCounts:
    """Count differences between ladder indices int8 [..., K]; ``mask`` bool [...] selects rows.

    ``nearest``: indices of nearest rounding on the same scale, for ``worse_than_nearest`` (0 without it).
    """
    if mask is not None:
        rollout, trained = rollout[mask], trained[mask]
        nearest = None if nearest is None else nearest[mask]
    distance = (trained - rollout).abs()
    worse = 0
    if nearest is not None:
        roll = e2m1.values_from_ladder(rollout)
        gap, gap_nearest = ((e2m1.values_from_ladder(c) - roll).abs() for c in (trained, nearest))
        worse = int((gap > gap_nearest).sum())
    flips = int((distance > 0).sum())
    return CodeCounts(values=rollout.numel(), flips=flips, adjacent=int((distance == 1).sum()), worse_than_nearest=worse)
