"""Where the trainer rounds: one function per site, told what to do by the current guidance frame.

Axis legend: T tokens of the micro-batch in sequence-first order, K values per token at the site.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_trace.guidance import frames
from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.spec import BLOCK, ROW_SCALED_SITES
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import e2m1, guided, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord
from megatron_trace.numerics.nvfp4 import NVFP4Tensor, ScaleScope


class UncalibratedError(RuntimeError):
    """K or V was to be quantised before its static amax was known."""


def round_site(x_TK: torch.Tensor, *, layer: int, site: str, static_amax: float | None = None) -> torch.Tensor:
    """Round ``x_TK`` (BF16 or FP32) as the current frame says; straight-through gradient, same dtype and shape.

    ``static_amax`` is the trainer's own FP32 amax of a statically scaled site, used for rows without a record.
    Raises UncalibratedError when such a site has none.
    """
    frame = frames.current().at(site)
    if not frame.rounding.quantizes_activations:
        return x_TK
    scope: ScaleScope = "row" if site in ROW_SCALED_SITES else "static"
    own_amax = None if scope == "row" else _own_amax(x_TK, layer, site, static_amax)
    record = frame.record(layer, site, x_TK) if frame.rounding.uses_record else None
    counted = not frames.in_backward()
    if record is not None and record.shape != x_TK.shape:
        raise GuidanceError(
            f"record of {site} in layer {layer} is {list(record.shape)}, the micro-batch has {list(x_TK.shape)} values there"
        )
    if record is None:
        rounded_TK = guided.fake_quantize(x_TK, scale_scope=scope, global_amax=own_amax)
    else:
        rounded_TK = _rounded(x_TK, record, frame.rounding, scope=scope, own_amax=own_amax)
        if counted and frame.measure_flips and frame.rounding is Rounding.GUIDED:
            probe.flips(frame, layer, site, x_TK, record)
    if counted:  # a recomputation repeats the forward and counts nothing
        probe.coverage(frame, site, record is not None)
        probe.values(frame, layer, site, x_TK)
    return rounded_TK


def note_site(x_TK: torch.Tensor, *, layer: int, site: str) -> None:
    """Count a site whose values are rounded elsewhere (where they arrive), as ``round_site`` would have."""
    frame = frames.current().at(site)
    record = frame.record(layer, site, x_TK) if frame.rounding.uses_record else None
    if frames.in_backward():
        return
    if record is not None and frame.measure_flips and frame.rounding is Rounding.GUIDED:
        probe.flips(frame, layer, site, x_TK, record)
    probe.coverage(frame, site, record is not None)
    probe.values(frame, layer, site, x_TK)


def record_rows(x_TK: torch.Tensor, *, layer: int, site: str) -> torch.Tensor | None:
    """The record of a row-scaled ``site`` as bytes uint8 [T, n] that can travel with the tokens; None without a record.

    payload, block scales, FP32 amax, validity; read by ``round_by_rows``.
    """
    frame = frames.current().at(site)
    record = frame.record(layer, site, x_TK) if frame.rounding.uses_record else None
    if record is None:
        return None
    valid_T = torch.ones(len(x_TK), dtype=torch.bool) if record.valid is None else record.valid
    amax_T1 = record.global_amax.expand(len(x_TK), 1).contiguous()
    parts = (record.payload, record.block_scale.view(torch.uint8), amax_T1.view(torch.uint8), valid_T[:, None].to(torch.uint8))
    return torch.cat(parts, dim=1)


def round_by_rows(x_RK: torch.Tensor, rows: torch.Tensor | None, *, bits: int) -> torch.Tensor:
    """``round_site`` of ``x_RK`` by records that came as bytes [R, n]: the same numbers, since every row has its own scale."""
    if rows is None:
        return guided.fake_quantize(x_RK, scale_scope="row")
    width = x_RK.shape[-1]
    payload, scale, amax, valid = rows.split([width * bits // 8, width // BLOCK, 4, 1], dim=1)
    record = GuidanceRecord(
        bits=bits,
        payload=payload.contiguous(),
        block_scale=scale.contiguous().view(torch.float8_e4m3fn),
        global_amax=amax.contiguous().view(torch.float32),
        valid=valid[:, 0].bool(),
    )
    return _rounded(x_RK, record, frames.current().rounding, scope="row", own_amax=None)


def packed_site(x_TK: torch.Tensor, *, layer: int, site: str) -> torch.Tensor:
    """What ``round_site`` rounds a row-scaled ``site`` to, as bytes uint8 [T, K/2 + K/16 + 4]: codes, scales, FP32 amax."""
    frame = frames.current().at(site)
    x_TK = x_TK.detach()
    own = nvfp4.quantize(x_TK, scale_scope="row")
    packed = _bytes_of(own.codes, own.block_scale, own.global_amax)
    record = frame.record(layer, site, x_TK) if frame.rounding.uses_record else None
    if record is None:
        return packed
    nearest = frame.rounding is Rounding.NEAREST_ON_ROLLOUT_SCALE
    ladder = guided.nearest_codes(x_TK, record) if nearest else guided.guided_codes(x_TK, record)
    codes = e2m1.pack_values(e2m1.values_from_ladder(ladder))
    by_record = _bytes_of(codes, record.block_scale, record.global_amax.expand(len(x_TK), 1))
    return by_record if record.valid is None else torch.where(record.valid[:, None], by_record, packed)


def unpacked_values(rows: torch.Tensor, *, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Values [R, width] of rows that ``packed_site`` made."""
    codes, scale, amax = (part.contiguous() for part in rows.split([width // 2, width // BLOCK, 4], dim=1))
    packed = NVFP4Tensor(codes=codes, block_scale=scale.view(torch.float8_e4m3fn), global_amax=amax.view(torch.float32))
    return packed.dequantize(dtype)


def _bytes_of(codes: torch.Tensor, block_scale: torch.Tensor, amax_T1: torch.Tensor) -> torch.Tensor:
    return torch.cat((codes, block_scale.view(torch.uint8), amax_T1.contiguous().view(torch.uint8)), dim=1)


def _rounded(
    x_TK: torch.Tensor, record: GuidanceRecord, rounding: Rounding, *, scope: ScaleScope, own_amax: torch.Tensor | None
) -> torch.Tensor:
    if rounding is Rounding.GUIDED:
        return guided.fake_quantize(x_TK, record=record, scale_scope=scope, global_amax=own_amax)
    own_TK = guided.fake_quantize(x_TK, scale_scope=scope, global_amax=own_amax)
    valid_T1 = record.valid.unsqueeze(-1) if record.valid is not None else torch.tensor(True)
    return torch.where(valid_T1, guided.nearest_on_record_scale(x_TK, record), own_TK)


def _own_amax(x_TK: torch.Tensor, layer: int, site: str, static_amax: float | None) -> torch.Tensor:
    if static_amax is None:
        raise UncalibratedError(f"{site} of layer {layer} has no static amax: run one calibrating forward before quantising it")
    return torch.tensor(static_amax, dtype=torch.float32, device=x_TK.device)


def round_fc2_input(x_RK: torch.Tensor, *, shards: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Round the unscaled expert activation [rows, I] to nearest, one scale per row, where activations are quantised.

    ``shards``: ranks that hold other columns of the same rows; the row scale then covers the whole row (MAX over them). None:
    the row is whole, or each shard has a scale of its own. Collective over ``shards``.
    """
    if not frames.current().rounding.quantizes_activations:
        return x_RK
    if shards is None or shards.size() == 1:
        return guided.fake_quantize(x_RK, scale_scope="row")
    amax_R1 = nvfp4.global_amax_of(x_RK.detach(), scale_scope="row").contiguous()
    dist.all_reduce(amax_R1, op=dist.ReduceOp.MAX, group=shards)
    return guided.fake_quantize(x_RK, scale_scope="row", global_amax=amax_R1)


def token_amax(x_TK: torch.Tensor, frame: GuidanceFrame) -> float:
    """Largest magnitude over the frame's real tokens (padding would make it depend on the micro-batch split)."""
    values_TK = x_TK.detach() if frame.is_token is None else x_TK.detach()[frame.is_token]
    return float(values_TK.abs().amax()) if values_TK.numel() else 0.0
