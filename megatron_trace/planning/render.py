"""A plan for people: tables drawn with rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_trace.planning.layout import AXES, Layout
from megatron_trace.planning.plan import GIB, Plan

MOST_RANKS = 16
"""Rows of the rank table before it is cut; ``--all-ranks`` prints every one."""


def show(plan: Plan, console: Console, *, all_ranks: bool = False) -> None:
    """Print ``plan``: head, layout, groups, ranks, memory, traffic, precision, and what is wrong."""
    console.print(Group(*_parts(plan, all_ranks=all_ranks)))


def _parts(plan: Plan, *, all_ranks: bool) -> Iterator[RenderableType]:
    where = plan.layout
    yield Text(f"{plan.name}: {where.world_size} ranks, {plan.parameters_total / 1e9:.3f} B parameters", style="bold")
    yield _sizes(where)
    if plan.stages:
        yield _groups(where)
        yield _ranks(plan, most=where.world_size if all_ranks else MOST_RANKS)
        yield _memory(plan)
    yield _traffic(plan)
    yield _precision(plan)
    for title, lines, style in (("warning", plan.warnings, "yellow"), ("error", plan.errors, "red")):
        for line in lines:
            yield Text.assemble((f"{title}: ", style), line)


def _sizes(where: Layout) -> Table:
    table = Table(title="layout", title_justify="left")
    sizes = where.to_dict()
    for name in sizes:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(str(size) for size in sizes.values()))
    return table


def _groups(where: Layout) -> Table:
    table = Table(title="process groups, in Megatron-core's order", title_justify="left")
    for column in ("axis", "groups", "size", "first", "last"):
        table.add_column(column)
    for axis in AXES:
        groups = where.groups(axis)
        table.add_row(axis.replace("_", " "), str(len(groups)), str(len(groups[0])), _members(groups[0]), _members(groups[-1]))
    return table


def _members(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _ranks(plan: Plan, *, most: int) -> Table:
    where = plan.layout
    shown = list(range(where.world_size))
    if len(shown) > most:
        shown = [*shown[: most - 1], shown[-1]]
    table = Table(title=f"ranks ({len(shown)} of {where.world_size})", title_justify="left")
    for column in ("rank", *AXES, "layers"):
        table.add_column(column.replace("_", " "), justify="right")
    for rank in shown:
        place = where.coordinates(rank)
        layers = plan.stages[place["pipeline"]].layers
        table.add_row(str(rank), *(str(place[axis]) for axis in AXES), _span(layers))
    return table


def _span(layers: tuple[int, ...]) -> str:
    """``0-3, 8-11`` for the layers of two chunks."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _memory(plan: Plan) -> Table:
    kind = "this version's modules" if plan.kernels == "reference" else "fused kernels, estimated"
    table = Table(title=f"memory of one rank in GiB (activations: {kind})", title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("parameters", justify="right")
    names = [name for name, _ in plan.stages[0].memory.parts()]
    for name in (*names[:-1], "device", names[-1]):
        table.add_column(name.replace("_", " "), justify="right")
    for stage in plan.stages:
        values = [value for _, value in stage.memory.parts()]
        cells = [_gib(value) for value in (*values[:-1], stage.memory.device, values[-1])]
        table.add_row(str(stage.stage), f"{stage.parameters:,}", *cells)
    return table


def _gib(count: int) -> str:
    value = count / GIB
    return f"{value:.2f}" if value >= 0.01 or count == 0 else f"{value:.1e}"


def size(count: float) -> str:
    """``count`` bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def duration(seconds: float | None) -> str:
    """``seconds`` in the unit one would say it in."""
    if seconds is None:
        return "not estimated"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _traffic(plan: Plan) -> Table:
    rates = plan.rates
    table = Table(title="per step, computed (upper bounds of bytes, lower bounds of times)", title_justify="left")
    for column in ("what", "figure"):
        table.add_column(column)
    rows = {
        "guidance of one token": f"{plan.guidance_bytes_per_token:,} B",
        "  row scales beside it": f"{plan.guidance_row_scale_bytes_per_token:,} B",
        "full guidance of one token": f"{plan.guidance_bytes_per_token_full:,} B",
        "tokens with a record": f"{rates.tokens_per_step:,}",
        "guidance of a step": size(rates.guidance_wire_bytes_per_step),
        "  through the shared storage": duration(rates.guidance_seconds_storage),
        "full guidance of a step": size(rates.guidance_bytes_per_step_full),
        "  through the shared storage ": duration(rates.guidance_full_seconds_storage),
        "guidance while decoding": "not estimated"
        if rates.guidance_bytes_per_second is None
        else f"{size(rates.guidance_bytes_per_second)}/s",
        "refit of one engine": f"{size(rates.refit_bytes)}, {duration(rates.refit_seconds)}",
        "rollout": duration(rates.rollout_seconds),
        "training": duration(rates.train_seconds),
        "engines": f"{plan.engines}, {size(plan.engine_bytes_per_rank)} on each of their ranks",
        "checkpoints on disk": f"{size(plan.disk_bytes)} ({size(plan.checkpoint_bytes)} each)",
        "ports": f"{plan.ports.rendezvous}-{plan.ports.end - 1}",
    }
    for what, figure in rows.items():
        table.add_row(what, figure)
    return table


def _precision(plan: Plan) -> Table:
    table = Table(title="precision, the same list for engine and trainer", title_justify="left")
    for column in ("tensor", "engine", "trainer", "layers", "guided"):
        table.add_column(column)
    for group in plan.precision:
        table.add_row(group.tensor, group.engine, group.trainer, _span(group.layers), _span(group.guided) or "-")
    return table
