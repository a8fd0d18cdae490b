"""Which parameters are tables of tokens or positions, and which of their rows this rank holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .watched import Watched, is_sharded, local

#: How the tables of positions are called.
_POSITION = re.compile(r"(^|[._])(wpe|w?pos(ition)?s?)([._]|$)|position")


def table_of(watched: Watched, index: int) -> str | None:
    """Return which table a parameter is: ``token``, ``position``, ``head`` (a row of logits a token), or None for any other.

    A head that is tied to the embedding is the embedding.
    """
    group, shape = watched.group(index), watched.params[index].shape
    if len(shape) != 2:
        return None
    if group == "embedding":
        return "position" if _POSITION.search(watched.names[index]) else "token"
    return "head" if group == "head" and shape[0] == watched.vocabulary else None


def rows_of(parameter: Tensor) -> tuple[Tensor, int] | None:
    """Return the rows of a table that this rank holds and the number of the first, or None where none of them is whole, or all are elsewhere.

    Told from placements (DTensor), without a collective. Where rows do not lie one behind another on a rank, None too.
    """
    rows = local(parameter)
    if not is_sharded(parameter):
        return (rows, 0) if rows.ndim == 2 and rows.numel() else None
    placements: Sequence[Any] = getattr(parameter, "placements", ())
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None or rows.ndim != 2 or not rows.numel() or rows.shape[1] != parameter.shape[1]:
        return None
    if any(type(one).__name__ not in ("Shard", "Replicate") for one in placements) or mesh.get_coordinate() is None:
        return None
    first, size = 0, parameter.shape[0]
    for dim, one in enumerate(placements):  # as torch.chunk cuts: all parts but the last ones are of one size
        if one.is_shard(0):
            part = -(-size // mesh.size(dim))
            at = mesh.get_coordinate()[dim] * part
            first, size = first + min(at, size), max(0, min(part, size - at))
    return (rows, first) if size == rows.shape[0] else None


def row_norms(rows: Tensor, block: int) -> Tensor:
    """Return the L2 norm of each row, (rows,) float32 or float64. ``block`` elements are worked on at once on a CPU, which copies what it sums."""
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    if rows.device.type != "cpu" or rows.numel() <= block or rows.dtype is dtype:
        found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
        return found
    together = max(1, block // rows.shape[1])
    return torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in torch.split(rows, together)])
