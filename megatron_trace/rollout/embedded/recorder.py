"""What a forward pass leaves behind for the trainer, stored by KV slot, so that a shared prefix shares its records too.

Axis legend: N tokens of one forward pass, L layers, k experts per token.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance import syndrome
from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.numerics import guided
from megatron_trace.numerics.nvfp4 import NVFP4Tensor

NOT_RECORDED = -1


class Recorder:
    """Rows by slot: guidance uint8 [slots, row_bytes] of the active layout, routes [slots, L, k], version int32 [slots].

    One forward assembles its rows in a scratch buffer (``begin``, ``site``, ``route``) and writes them once (``commit``).
    ``static_amax`` {version: {(layer, "k" | "v"): FP32}} of every weight version that rows may be of: what a row means, and
    what its K and V are read back with.
    """

    def __init__(self, *, model: ModelConfig, num_slots: int, device: torch.device) -> None:
        self._model = model
        self._num_slots = num_slots
        self._device = device
        self.static_amax: dict[int, dict[tuple[int, str], float]] = {}
        self._spec: GuidanceSpec | None = None
        self._with_routes = False
        self._layout = RecordLayout(bits=1, columns=())
        self._versions = torch.full((num_slots,), NOT_RECORDED, dtype=torch.int32, device=device)
        self._rows: torch.Tensor | None = None
        self._routes: torch.Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._scratch_rows: torch.Tensor | None = None
        self._scratch_routes: torch.Tensor | None = None

    def configure(self, spec: GuidanceSpec | None, *, routes: bool) -> bool:
        """Record by ``spec`` (None: no guidance) from now on. True when older rows are gone: flush the prefix cache then."""
        layout = RecordLayout(bits=1, columns=()) if spec is None else RecordLayout.build(spec, self._model)
        changed = layout != self._layout or routes != self._with_routes
        self._spec = spec
        if not changed:
            return False
        self._layout, self._with_routes = layout, routes
        self._versions.fill_(NOT_RECORDED)
        self._rows = torch.zeros(self._num_slots, layout.row_bytes, dtype=torch.uint8, device=self._device) if spec else None
        shape = (self._num_slots, self._model.num_layers, self._model.num_experts_per_tok)
        # int16 holds the bits of uint16, whose scatter torch lacks.
        dtype = torch.uint8 if self._model.num_experts <= 256 else torch.int16
        self._routes = torch.zeros(shape, dtype=dtype, device=self._device) if routes else None
        return True

    def serve(self, version: int, kv_amax: dict[tuple[int, str], float], *, keep_rows: bool) -> None:
        """Forwards are of ``version`` from now on; rows of older versions stay, or are forgotten."""
        if not keep_rows:
            self._versions.fill_(NOT_RECORDED)
        held = set(self._versions.unique().tolist())
        self.static_amax = {v: amax for v, amax in self.static_amax.items() if v in held} | {version: kv_amax}

    def amax_index(self, slots_N: torch.Tensor) -> torch.Tensor | None:
        """For each slot the index into ``amax_of`` of its row's version, int64 [N]; None while all rows are of one version."""
        if len(self.static_amax) < 2:
            return None
        known = torch.tensor(sorted(self.static_amax), dtype=torch.int32, device=self._device)
        return torch.searchsorted(known, self._versions[slots_N]).clamp_(max=len(known) - 1)  # unwritten: masked by the reader

    def amax_of(self, layer: int) -> torch.Tensor:
        """FP32 amax of K and V per version [versions, 2, 1], ascending."""
        table = [[[amax[layer, "k"]], [amax[layer, "v"]]] for _, amax in sorted(self.static_amax.items())]
        return torch.tensor(table, dtype=torch.float32, device=self._device)

    def begin(self, slots_N: torch.Tensor, version: int) -> None:
        """Start the rows of one forward of ``version`` that writes ``slots_N``."""
        self._slots = slots_N
        self._versions[slots_N] = version
        num_tokens = len(slots_N)
        self._scratch_rows = None if self._rows is None else self._rows.new_empty(num_tokens, self._layout.row_bytes)
        self._scratch_routes = None if self._routes is None else self._routes.new_empty(num_tokens, *self._routes.shape[1:])

    def site(self, layer: int, site: str, quantized: NVFP4Tensor, raw: torch.Tensor, *, part: int | None = None) -> None:
        """Put codes, block scales, row amax and raw values of one site where the layout wants them; else nothing happens.

        ``quantized`` and ``raw``, the values before rounding, are [N, K], or [N, parts, K] of which ``part`` is meant.
        """
        column = self._layout.column(layer, site)
        if column is None or self._scratch_rows is None:
            return
        if part is not None:
            codes, scale = quantized.codes[:, part].contiguous(), quantized.block_scale[:, part].contiguous()
            quantized = NVFP4Tensor(codes=codes, block_scale=scale, global_amax=quantized.global_amax[part])
            raw = raw[:, part]
        if self._layout.bits == "syndrome":
            parts = [syndrome.encode(quantized, column)]
        else:
            record = guided.make_record(quantized, bits=self._layout.bits)
            parts = [record.payload, record.block_scale.view(torch.uint8)]
            if column.amax_bytes:
                parts.append(quantized.global_amax.reshape(-1, 1).view(torch.uint8))
        if column.raw_bytes:
            parts.append(raw.to(torch.bfloat16).contiguous().view(torch.uint8))
        self._scratch_rows[:, column.start : column.stop] = torch.cat(parts, dim=-1)

    def route(self, layer: int, experts_Nk: torch.Tensor) -> None:
        """Put the routed experts of one layer, most likely first."""
        if self._scratch_routes is not None:
            self._scratch_routes[:, layer] = experts_Nk.to(self._scratch_routes.dtype)

    def commit(self) -> None:
        """Write the rows of this forward to the slots of its tokens."""
        if self._rows is not None:
            self._rows[self._slots] = self._scratch_rows
        if self._routes is not None:
            self._routes[self._slots] = self._scratch_routes

    def copy(self, source_N: torch.Tensor, target_N: torch.Tensor) -> None:
        """Give ``target_N`` the records of ``source_N`` (a fork of a sequence)."""
        for rows in (self._rows, self._routes, self._versions):
            if rows is not None:
                rows[target_N] = rows[source_N]

    def guidance(
        self, slots_N: torch.Tensor, *, sample_id: int, prompt_length: int, contract_fingerprint: str
    ) -> GuidanceSegment | None:
        """The recorded rows of one sequence, positions in order, each with its own version; None when none are recorded.

        A row is valid when it was recorded and is no prompt row that the spec leaves out.
        """
        if self._rows is None or self._spec is None:
            return None
        versions = self._versions[slots_N].cpu().numpy()
        valid = versions != NOT_RECORDED
        if not self._spec.prompt_tokens:
            valid[:prompt_length] = False
        static = [(c.layer, c.site) for c in self._layout if not c.amax_bytes]
        return GuidanceSegment(
            sample_id=sample_id,
            layout=self._layout,
            rows=self._rows[slots_N].cpu().numpy(),
            valid=valid,
            versions=versions,
            contract_fingerprint=contract_fingerprint,
            static_amax={v: {key: self.static_amax[v][key] for key in static} for v in set(versions[valid].tolist())},
        )

    def routes(self, slots_N: torch.Tensor, *, sample_id: int) -> RouteSegment | None:
        """The routed experts of one sequence, positions in order; None when routes are not recorded."""
        if self._routes is None:
            return None
        versions = self._versions[slots_N].cpu().numpy()
        experts: np.ndarray = self._routes[slots_N].cpu().numpy()
        experts = experts.view(np.uint16) if experts.dtype == np.int16 else experts
        return RouteSegment(sample_id=sample_id, experts=experts, valid=versions != NOT_RECORDED, versions=versions)
