"""Launch the NVFP4 kernels. Same results as ``numerics.nvfp4`` and ``numerics.guided``, bit for bit.

Supported: blocks 1x16, M = 448, float32 / bfloat16 / float16, K a multiple of 16, any number of leading axes. What is not
supported raises ValueError; ``numerics.dispatch`` asks ``supports`` first and counts what it has to send elsewhere.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_trace.numerics import nvfp4 as reference
from megatron_trace.numerics.guided import GuidanceRecord
from megatron_trace.numerics.nvfp4 import NVFP4Tensor, ScaleScope

ROW = 8
"""Values one thread owns: a row of eight."""
LARGEST_OWN_ROW = 16384
"""Widest K whose row amax one program finds by itself; wider rows take one reduction more."""
SMALLEST_OWN_ROW = 512
"""Narrowest K for that: below it a program per row would leave most of a warp idle."""


@dataclass(frozen=True)
class Launch:
    """Rows of eight per program, and warps per program."""

    rows: int
    warps: int


LAUNCH: dict[str, Launch] = {
    "guided": Launch(256, 2),
    "nearest": Launch(256, 4),
    "quantize": Launch(256, 1),
    "dequantize": Launch(256, 4),
    "own": Launch(256, 16),  # rows of eight per warp, and most warps, of the program that finds a row's amax itself
    "gather": Launch(512, 2),  # units of four bytes (one where sizes are odd) per program
}
"""Defaults per kernel; ``benchmarks/numerics.py --tune`` prints the best ones of a device."""


@lru_cache(maxsize=1)
def available() -> str | None:
    """None where Triton can be imported, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@lru_cache(maxsize=1)
def _device_code() -> Any:
    from megatron_trace.kernels import nvfp4_kernels

    return nvfp4_kernels


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether Triton runs its interpreter (TRITON_INTERPRET=1 when it was first imported)."""
    import triton

    return not isinstance(_device_code().guided_kernel, triton.runtime.JITFunction)


@lru_cache(maxsize=16)
def _hardware_e4m3(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 9)


def _hardware(x: Tensor) -> bool:
    """Whether the device converts to E4M3 itself (compute capability 8.9 and newer)."""
    return x.device.type == "cuda" and _hardware_e4m3(x.device.index or 0)


def _options(x: Tensor, warps: int) -> dict[str, Any]:
    if x.device.type == "cuda":
        return {"num_warps": warps, "enable_fp_fusion": False}
    if not interpreted():
        raise ValueError(
            f"kernels.nvfp4: tensor is on {x.device}: Triton needs CUDA, or TRITON_INTERPRET=1 for its interpreter"
        )
    return {}


@dataclass(frozen=True)
class _Grid:
    """How a tensor is cut: ``programs`` programs, ``chunks`` per segment of ``segment_rows`` rows of eight sharing one amax.

    ``chunks`` 0: one segment is the whole tensor.
    """

    programs: int
    chunks: int
    segment_rows: int
    amax_rows: int
    gather: bool
    even: bool
    rows: int
    warps: int


def _cut(numel: int, width: int, amax_count: int, launch: Launch) -> _Grid:
    """Segments are rows of K where these are wide and have their own amax; otherwise the whole tensor is one segment."""
    row_eights = width // ROW
    per_row = amax_count > 1
    gather = per_row and width < SMALLEST_OWN_ROW
    segment_rows = row_eights if per_row and not gather else numel // ROW
    rows = launch.rows
    while rows > 32 and (segment_rows % rows and rows > segment_rows // 2):
        rows //= 2
    chunks = -(-segment_rows // rows)
    segments = numel // ROW // segment_rows
    warps = max(1, min(launch.warps, rows // 32))
    return _Grid(
        programs=chunks * segments,
        chunks=chunks if segments > 1 else 0,
        segment_rows=segment_rows,
        amax_rows=row_eights,
        gather=gather,
        even=segment_rows % rows == 0,
        rows=rows,
        warps=warps,
    )


def _flat_amax(amax: Tensor, shape: torch.Size) -> Tensor:
    """float32 [1] for one amax, else one per row of K, contiguous."""
    if amax.numel() == 1:
        return amax.reshape(1).float()
    return amax.float().expand(*shape[:-1], 1).reshape(-1).contiguous()


def _amax_by_torch(x: Tensor, scale_scope: ScaleScope) -> Tensor:
    if scale_scope == "row":
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
    else:
        low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def _quantize(
    x: Tensor, scale_scope: ScaleScope, global_amax: Tensor | None, *, codes: bool, record: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, bits, amax, values); those not asked for are empty."""
    reference.check_input(x)
    reference.check_scope(scale_scope, global_amax)
    x = x.contiguous()
    width, shape, device = x.shape[-1], x.shape, x.device
    empty = torch.empty(0, device=device)
    code_words = torch.empty(x.numel() // ROW if codes else 0, dtype=torch.int32, device=device)
    scales = torch.empty((*shape[:-1], width // 16) if codes else (0,), dtype=torch.uint8, device=device)
    bits = torch.empty((*shape[:-1], width // ROW) if record else (0,), dtype=torch.uint8, device=device)
    out = torch.empty_like(x) if values else empty
    own = global_amax is None and scale_scope == "row" and SMALLEST_OWN_ROW <= width <= LARGEST_OWN_ROW
    if own:
        amax = torch.empty((*shape[:-1], 1), device=device)
        flat = amax
    else:
        if global_amax is None:
            amax = (
                _amax_by_torch(x, scale_scope) if x.numel() else torch.zeros((*shape[:-1], 1) if scale_scope == "row" else ())
            )
        else:
            amax = global_amax
        amax = amax.to(device=device, dtype=torch.float32)
        flat = _flat_amax(amax, shape)
    if x.numel():
        if own:
            rows = 1 << (width // ROW - 1).bit_length()
            even = rows == width // ROW
            warps = max(1, min(LAUNCH["own"].warps, rows // LAUNCH["own"].rows))
            grid = _Grid(x.numel() // width, 1, width // ROW, width // ROW, False, even, rows, warps)
        else:
            grid = _cut(x.numel(), width, flat.numel(), LAUNCH["quantize" if codes else "nearest"])
        words = not values and _in_words(x)
        _device_code().quantize_kernel[(grid.programs,)](
            x.view(torch.int32) if words else x, code_words, scales, bits, flat, out, grid.segment_rows, grid.amax_rows,
            OWN=own, CODES=codes, RECORD=record, VALUES=values, CHUNKS=grid.chunks, GATHER=grid.gather,
            EVEN=grid.even, HARDWARE=_hardware(x), WORDS=words, R=grid.rows, **_options(x, grid.warps),
        )  # fmt: skip
    packed = code_words.view(torch.uint8).view(*shape[:-1], width // 2) if codes else code_words
    return packed, scales.view(torch.float8_e4m3fn), bits, amax, out


def quantize(x: Tensor, *, scale_scope: ScaleScope = "tensor", global_amax: Tensor | None = None) -> NVFP4Tensor:
    """``numerics.nvfp4.quantize`` for 1x16 blocks."""
    codes, scales, _, amax, _ = _quantize(x, scale_scope, global_amax, codes=True, record=False, values=False)
    return NVFP4Tensor(codes=codes, block_scale=scales, global_amax=amax)


def quantize_dequantize(x: Tensor, *, scale_scope: ScaleScope = "tensor", global_amax: Tensor | None = None) -> Tensor:
    """``numerics.nvfp4.quantize_dequantize``: fake-quantise to nearest, no gradient."""
    return _quantize(x, scale_scope, global_amax, codes=False, record=False, values=True)[4]


def quantize_with_dequantized(
    x: Tensor, *, scale_scope: ScaleScope = "tensor", global_amax: Tensor | None = None
) -> tuple[NVFP4Tensor, Tensor]:
    """``numerics.nvfp4.quantize_with_dequantized``."""
    codes, scales, _, amax, out = _quantize(x, scale_scope, global_amax, codes=True, record=False, values=True)
    return NVFP4Tensor(codes=codes, block_scale=scales, global_amax=amax), out


def quantize_and_record(
    x: Tensor, *, scale_scope: ScaleScope = "row", global_amax: Tensor | None = None
) -> tuple[NVFP4Tensor, GuidanceRecord]:
    """``quantize`` and its compact ``make_record`` in one pass over x."""
    codes, scales, bits, amax, _ = _quantize(x, scale_scope, global_amax, codes=True, record=True, values=False)
    return (
        NVFP4Tensor(codes=codes, block_scale=scales, global_amax=amax),
        GuidanceRecord(bits=1, payload=bits, block_scale=scales, global_amax=amax),
    )


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``NVFP4Tensor.dequantize``."""
    if q.e4m3_max != 448:
        raise ValueError(f"kernels.nvfp4: e4m3_max={q.e4m3_max}, the kernels know 448 only")
    out = torch.empty(q.shape, dtype=dtype, device=q.codes.device)
    if out.numel():
        amax = _flat_amax(q.global_amax, q.shape)
        grid = _cut(out.numel(), q.shape[-1], amax.numel(), LAUNCH["dequantize"])
        _device_code().dequantize_kernel[(grid.programs,)](
            _words(q.codes), _bytes(q.block_scale), amax, out, grid.segment_rows, grid.amax_rows,
            CHUNKS=grid.chunks, GATHER=grid.gather, EVEN=grid.even, HARDWARE=_hardware(out), R=grid.rows,
            **_options(out, grid.warps),
        )  # fmt: skip
    return out


def fake_quantize_guided(x: Tensor, record: GuidanceRecord) -> Tensor:
    """Guided rounding of every row by ``record`` (its ``valid`` is not looked at), compact or full; no gradient."""
    reference.check_input(x)
    if record.e4m3_max != 448 or record.bits not in (1, 4):
        raise ValueError(f"kernels.nvfp4: record has bits={record.bits}, e4m3_max={record.e4m3_max}: only 1 or 4, and 448")
    if record.shape != x.shape:
        raise ValueError(f"guidance record is for shape {list(record.shape)}, x has {list(x.shape)}")
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        amax = _flat_amax(record.global_amax, x.shape)
        grid = _cut(x.numel(), x.shape[-1], amax.numel(), LAUNCH["guided"])
        payload = record.payload.contiguous() if record.bits == 1 else _words(record.payload)
        words = _in_words(x) and _in_words(out)
        _device_code().guided_kernel[(grid.programs,)](
            x.view(torch.int32) if words else x, payload, _bytes(record.block_scale), amax,
            out.view(torch.int32) if words else out, grid.segment_rows, grid.amax_rows,
            BITS=record.bits, CHUNKS=grid.chunks, GATHER=grid.gather, EVEN=grid.even, HARDWARE=_hardware(x), WORDS=words,
            R=grid.rows, **_options(x, grid.warps),
        )  # fmt: skip
    return out


def gather_record(
    rows: Tensor, index: Tensor, *, start: int, width: int, bits: int, global_amax: Tensor | None = None
) -> GuidanceRecord:
    """``numerics.guided.gather_record``: one site's column of record rows ``index`` as a GuidanceRecord [T, width]."""
    count, payload_bytes, scale_bytes = index.numel(), width * bits // 8, width // 16
    payload = torch.empty((count, payload_bytes), dtype=torch.uint8, device=rows.device)
    scales = torch.empty((count, scale_bytes), dtype=torch.uint8, device=rows.device)
    amax = torch.empty((count, 4), dtype=torch.uint8, device=rows.device)
    if count:
        rows = rows.contiguous()
        amax_bytes = 4 if global_amax is None else 0
        unit = 4 if (rows.data_ptr() | rows.shape[-1] | start | payload_bytes | scale_bytes) % 4 == 0 else 1
        total = (payload_bytes + scale_bytes + amax_bytes) // unit
        tile = max(LAUNCH["gather"].rows, 1 << (total - 1).bit_length())
        row_count = tile // total
        tensors = [t.view(torch.int32) if unit == 4 else t for t in (rows, payload, scales, amax)]
        _device_code().gather_kernel[(-(-count // row_count),)](
            tensors[0], index.contiguous(), *tensors[1:], count, rows.shape[-1] // unit, start // unit,
            PAYLOAD=payload_bytes // unit, SCALES=scale_bytes // unit, AMAX=amax_bytes // unit, ROWS=row_count, B=tile,
            **_options(rows, LAUNCH["gather"].warps),
        )  # fmt: skip
    return GuidanceRecord(
        bits=bits,
        payload=payload,
        block_scale=scales.view(torch.float8_e4m3fn),
        global_amax=amax.view(torch.float32) if global_amax is None else global_amax,
    )


def _in_words(x: Tensor) -> bool:
    """Whether x can be read as pairs of BF16, sixteen bytes at a time, by the code of ``kernels.ptx``."""
    return x.dtype == torch.bfloat16 and _hardware(x) and x.data_ptr() % 16 == 0


def _words(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.int32)


def _bytes(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.uint8)
