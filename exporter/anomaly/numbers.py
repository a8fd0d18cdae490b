"""A tensor as a row of numbers, on its device: least, largest, sum, sum of squares, and how many elements are finite.

Least to squares are over the finite elements: one NaN says nothing of the others, and how many there are stands beside them. A tensor
is gone through in blocks, so that what is needed beside it stays small however large it is. Nothing here waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwarden.exporter.measure import DEVICE_BLOCK, HOST_BLOCK, flat
from trainwarden.exporter.watched import local

#: Columns of a row. ``WORSE`` counts NaN and +Inf: -Inf alone is what masks are made of.
LOW, HIGH, SUM, SQUARES, FINITE, WORSE, COUNT, ROW = range(8)
#: Types that are looked at.
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: How many tensors of what a module or an operation takes or gives are looked at, and how deep they may lie.
TENSORS, DEPTH = 8, 4


def readable(tensor: Any) -> Tensor | None:
    """Return what this rank holds of a tensor of plain numbers, None of anything else."""
    if not isinstance(tensor, torch.Tensor):
        return None
    x = local(tensor).detach()
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
    if not plain or x.dtype not in TYPES or not x.numel():
        return None
    return x if x.untyped_storage().nbytes() else None  # sharding gives the memory of gathered parameters back


def tensors_in(value: Any, depth: int = DEPTH) -> list[Tensor]:
    """Return the tensors in tuples, lists and mappings, in order; the first :data:`TENSORS` of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[Tensor] = []
    if depth and isinstance(value, Mapping):
        value = tuple(value.values())
    if depth and isinstance(value, tuple | list):
        for item in value[: 8 * TENSORS]:
            found += tensors_in(item, depth - 1)
            if len(found) >= TENSORS:
                break
    return found[:TENSORS]


def wide(device: torch.device) -> torch.dtype:
    """Return the type in which sums are kept."""
    return torch.float32 if device.type == "mps" else torch.float64


def row(x: Tensor) -> Tensor:
    """Return the row of a tensor as :func:`readable` gives it, 1-D."""
    pieces = torch.split(flat(x), HOST_BLOCK if x.device.type == "cpu" else DEVICE_BLOCK)
    found = _row(pieces[0])
    for piece in pieces[1:]:
        found = combined(found, _row(piece))
    return found


def _row(piece: Tensor) -> Tensor:
    kind = wide(piece.device)
    x = piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
    finite = torch.isfinite(x)
    kept = torch.where(finite, x, 0.0).to(kind)
    return torch.stack(
        [
            torch.where(finite, x, math.inf).amin().to(kind),
            torch.where(finite, x, -math.inf).amax().to(kind),
            kept.sum(),
            (kept * kept).sum(),
            finite.sum().to(kind),
            (torch.isnan(x) | (x == math.inf)).sum().to(kind),
            torch.full((), float(x.numel()), dtype=kind, device=x.device),
        ]
    )


def combined(one: Tensor, other: Tensor) -> Tensor:
    """Return the rows (…, 7) of what two sets of rows are of, taken together."""
    low = torch.minimum(one[..., :HIGH], other[..., :HIGH])
    high = torch.maximum(one[..., HIGH:SUM], other[..., HIGH:SUM])
    return torch.cat([low, high, one[..., SUM:] + other[..., SUM:]], dim=-1)


def is_bad(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any element of some tensors of one device is not finite, 0-D. Needs no memory beside them."""
    ends = [end for x in tensors for end in torch.aminmax(x)]
    finite = torch.isfinite(ends[0])
    for end in ends[1:]:
        finite = finite & torch.isfinite(end)
    return ~finite


def is_harm(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return whether any element of some tensors, as they come, is not finite, 0-D; None where there is none to look at.

    -Inf of what takes no gradient is left aside: masks are made of it.
    """
    found: Tensor | None = None
    for x, takes_gradient in ((readable(one), one.requires_grad) for one in tensors):
        if x is not None and (found is None or x.device == found.device):
            low, high = torch.aminmax(x)
            harm = ~torch.isfinite(high) | ~torch.isfinite(low) if takes_gradient else ~(high < math.inf)
            found = harm if found is None else found | harm
    return found


def first(flags: Tensor, most: int) -> Tensor:
    """Return the numbers of the first flags that are set, ascending, up to ``most`` of them; behind the last, their count."""
    count = flags.numel()
    numbers = torch.where(flags, torch.arange(count, device=flags.device), count)
    found: Tensor = torch.topk(numbers, min(most, count), largest=False, sorted=True).values
    return found


def as_read(values: np.ndarray) -> dict[str, float | int | None]:
    """Return a row that has arrived as what a line says: ``min``, ``max``, ``mean``, ``std`` of the finite elements."""
    count, finite = float(values[COUNT]), float(values[FINITE])
    if not finite:
        return {"min": None, "max": None, "mean": None, "std": None, "finite": 0.0, "elements": int(count)}
    mean = float(values[SUM]) / finite
    variance = max(float(values[SQUARES]) / finite - mean * mean, 0.0)
    return {
        "min": float(values[LOW]),
        "max": float(values[HIGH]),
        "mean": mean,
        "std": math.sqrt(variance),
        "finite": finite / count,
        "elements": int(count),
    }
