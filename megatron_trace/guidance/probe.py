"""What a trainer checks once, at start-up, on the answer to one short request: that the engine records what the run relies on.

Asked for and not delivered must stop a run before its first step, not crash or weaken it later.
"""

from __future__ import annotations

from megatron_trace.guidance.errors import CoverageError, GuidanceError, LayerError
from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment
from megatron_trace.guidance.spec import RecordLayout


def require_records(
    guidance: GuidanceSegment | None,
    routes: RouteSegment | None,
    *,
    layout: RecordLayout | None,
    route_layers: int | None,
    rows: int,
    prompt_rows_recorded: bool = True,
) -> None:
    """GuidanceError unless one trajectory carries what was asked for.

    ``layout``: of the records wanted, None for none. ``route_layers``: layers whose routes are wanted, None for none. ``rows``:
    its tokens but the last. ``prompt_rows_recorded`` False leaves the validity of rows unchecked.
    """
    if layout is not None:
        if guidance is None:
            raise GuidanceError("the engine returned no guidance: switch capture on there, or guidance off in the trainer")
        if guidance.layout != layout:
            raise LayerError(
                f"the engine records layers {guidance.layout.layers} at {guidance.layout.bits} bits "
                f"({guidance.layout.row_bytes} bytes a token), the trainer expects {layout.layers} at {layout.bits} "
                f"({layout.row_bytes} bytes)"
            )
        _require_rows("guidance", guidance, rows, prompt_rows_recorded)
    if route_layers is not None:
        if routes is None:
            raise GuidanceError("the engine returned no routes: switch their capture on, or route replay off in the trainer")
        if routes.experts.shape[1] != route_layers:
            raise LayerError(f"the engine returned routes of {routes.experts.shape[1]} layers, the model has {route_layers}")
        _require_rows("routes", routes, rows, True)


def _require_rows(what: str, segment: GuidanceSegment | RouteSegment, rows: int, all_valid: bool) -> None:
    if len(segment) != rows:
        raise CoverageError(f"the engine returned {len(segment)} rows of {what} for {rows} input tokens")
    if all_valid and not segment.valid.all():
        raise CoverageError(f"the engine returned {what} with {int((~segment.valid).sum())} of {rows} rows marked invalid")
