"""Per-sequence sums over padded rows or packed tokens, and packing of per-sample rows.

Axes: N any token layout, ``[batch, time]`` (one sequence per row) or ``[tokens]`` (packed, with ``sequence_ids``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_sum(values: Tensor, *, sequence_ids: Tensor | None = None) -> Tensor:
    """Sum of ``values`` over each token's sequence, written back to every token of it (shape and dtype of ``values``).

    Without ``sequence_ids`` the values must be 2-D and a row is a sequence. With them (int64, shape of ``values``), equal ids
    are one sequence wherever they stand; ids need not be contiguous or sorted. Raises ValueError for a layout it cannot tell
    apart.
    """
    if sequence_ids is None:
        if values.dim() != 2:
            raise ValueError(
                f"sequence_ids=None with {values.dim()}-D tensors: packed tokens need ids of shape {tuple(values.shape)}"
            )
        return values.sum(dim=-1, keepdim=True).expand_as(values)
    flat_ids = _check_ids(sequence_ids, values).reshape(-1)
    _, inverse = torch.unique(flat_ids, return_inverse=True)
    totals = torch.zeros(flat_ids.numel(), dtype=values.dtype, device=values.device)
    totals = totals.index_add(0, inverse, values.reshape(-1))
    return totals[inverse].reshape(values.shape)


def count_sequences(mask: Tensor, *, sequence_ids: Tensor | None = None) -> Tensor:
    """Number of sequences, wholly masked ones included (int64 scalar): rows, or distinct ids >= 0 (negative ids are
    padding)."""
    if sequence_ids is None:
        if mask.dim() != 2:
            raise ValueError(f"sequence_ids=None with a {mask.dim()}-D mask: packed tokens need sequence_ids to be counted")
        return torch.tensor(mask.shape[0], device=mask.device)
    ids = _check_ids(sequence_ids, mask)
    return torch.tensor(torch.unique(ids[ids >= 0]).numel(), device=mask.device)


def pack_rows(rows: Sequence[Tensor | None]) -> tuple[Tensor, Tensor] | None:
    """Concatenate one row per sample into (values ``[tokens]``, sequence_ids int64 ``[tokens]``), ids being list positions.

    ``None`` means "not recorded" and must hold for all samples or for none: all ``None`` gives ``None``, a mixture raises. An
    *empty* row is a recorded row of length 0, in first place too: absence is decided by ``is None``, never by truth value.
    """
    missing = [i for i, row in enumerate(rows) if row is None]
    if len(missing) == len(rows):
        return None
    if missing:
        raise ValueError(f"rows[{missing[0]}]=None: {len(missing)} of {len(rows)} samples lack this tensor; record all or none")
    present = [row for row in rows if row is not None]
    lengths = torch.tensor([row.numel() for row in present])
    ids = torch.repeat_interleave(torch.arange(len(present)), lengths).to(present[0].device)
    return torch.cat([row.reshape(-1) for row in present]), ids


def _check_ids(sequence_ids: Tensor, like: Tensor) -> Tensor:
    if sequence_ids.shape != like.shape:
        raise ValueError(f"sequence_ids of shape {tuple(sequence_ids.shape)}: must have the token shape {tuple(like.shape)}")
    if sequence_ids.is_floating_point():
        raise ValueError(f"sequence_ids of dtype {sequence_ids.dtype}: must be an integer type")
    return sequence_ids
