"""Where the trainer rounds: one function per site, told what to do by the current guidance frame.

Axis legend: T tokens of the micro-batch in sequence-first order, K values per token at the site.
"""

from __future__ import annotations

import torch

from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.guidance.spec import ROW_SCALED_SITES
from megatron_trace.modeling.site_probe import probe
from megatron_trace.numerics import guided
from megatron_trace.numerics.nvfp4 import ScaleScope


class UncalibratedError(RuntimeError):
    """K or V was to be quantised before its static amax was known."""


def round_site(x_TK: torch.Tensor, *, layer: int, site: str, static_amax: float | None = None) -> torch.Tensor:
    """Round ``x_TK`` (BF16 or FP32) as the current frame says; straight-through gradient, same dtype and shape.

    ``static_amax`` is the trainer's own FP32 amax of a statically scaled site, used for rows without a record.
    Raises UncalibratedError when such a site has none.
    """
    frame = frames.current()
    if not frame.rounding.quantizes_activations:
        return x_TK
    scope: ScaleScope = "row" if site in ROW_SCALED_SITES else "static"
    own_amax = None if scope == "row" else _own_amax(x_TK, layer, site, static_amax)
    record = frame.record(layer, site) if frame.rounding.uses_record else None
    if record is None:
        rounded_TK = guided.fake_quantize(x_TK, scale_scope=scope, global_amax=own_amax)
    elif frame.rounding is Rounding.GUIDED:
        rounded_TK = guided.fake_quantize(x_TK, record=record, scale_scope=scope, global_amax=own_amax)
        if frame.measure_flips:
            probe.flips(frame, layer, site, x_TK, record)
    else:
        own_TK = guided.fake_quantize(x_TK, scale_scope=scope, global_amax=own_amax)
        valid_T1 = record.valid.unsqueeze(-1) if record.valid is not None else torch.tensor(True)
        rounded_TK = torch.where(valid_T1, guided.nearest_on_record_scale(x_TK, record), own_TK)
    probe.coverage(frame, site, record is not None)
    probe.values(frame, layer, site, x_TK)
    return rounded_TK


def _own_amax(x_TK: torch.Tensor, layer: int, site: str, static_amax: float | None) -> torch.Tensor:
    if static_amax is None:
        raise UncalibratedError(f"{site} of layer {layer} has no static amax: run one calibrating forward before quantising it")
    return torch.tensor(static_amax, dtype=torch.float32, device=x_TK.device)


def round_fc2_input(x_RK: torch.Tensor) -> torch.Tensor:
    """Round the unscaled expert activation [rows, I] to nearest, one scale per row, where activations are quantised."""
    if not frames.current().rounding.quantizes_activations:
        return x_RK
    return guided.fake_quantize(x_RK, scale_scope="row")


def token_amax(x_TK: torch.Tensor, frame: GuidanceFrame) -> float:
    """Largest magnitude over the frame's real tokens (padding would make it depend on the micro-batch split)."""
    values_TK = x_TK.detach() if frame.is_token is None else x_TK.detach()[frame.is_token]
    return float(values_TK.abs().amax()) if values_TK.numel() else 0.0
