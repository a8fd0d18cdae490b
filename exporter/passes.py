"""One forward pass of the model as it is looked at: the numbers that it put down, and whether it belongs to the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: Of one number: the pass, its place in the order of the pass, the spot, and the elements that it is about.
Cell = tuple[int, int, int, int]
Bucket = tuple[str, torch.device, torch.dtype]
Pack = tuple[Bucket, tuple[Cell, ...], Tensor]


@dataclass(slots=True, eq=False)
class Pass:
    """One forward. ``wanted``: gradients are made in it. ``counts``: it belongs to a step, as far as is known."""

    number: int
    wanted: bool
    counts: bool
    opener: nn.Module | None = None
    order: int = 0
    last: tuple[int, Tensor] | None = None
    seen: set[int] = field(default_factory=set)
    open: dict[Bucket, tuple[list[Cell], list[Tensor]]] = field(default_factory=dict)
    packed: list[Pack] = field(default_factory=list)
    #: What :mod:`exporter.routers` keeps of the pass, by router.
    routed: dict[Any, Any] = field(default_factory=dict)

    def put(self, what: str, number: int, value: Tensor, size: int = 0) -> None:
        """Keep a 0-D tensor."""
        cells, values = self.open.setdefault((what, value.device, value.dtype), ([], []))
        cells.append((self.number, self.order, number, size))
        values.append(value)

    def commit(self, gradient: Tensor) -> None:
        """A gradient goes back through the pass: it belongs to the step."""
        self.counts = True

    def pack(self) -> None:
        """Put the numbers together, so that a pass keeps few tensors."""
        self.last = None
        for bucket, (cells, values) in self.open.items():
            self.packed.append((bucket, tuple(cells), torch.stack(values)))
        self.open = {}


def folded(packs: list[Pack]) -> list[Pack]:
    """Put passes of one form together: largest of the largest, root of the sum of squares, sum of sums."""
    alike: dict[tuple[Bucket, tuple[tuple[int, int], ...]], list[Pack]] = {}
    for pack in packs:
        alike.setdefault((pack[0], tuple((order, number) for _, order, number, _ in pack[1])), []).append(pack)
    found = []
    for (bucket, _), members in alike.items():
        values = torch.stack([values for _, _, values in members])
        if bucket[0] == "norm":
            one = torch.linalg.vector_norm(values, dim=0)
        elif bucket[0] == "watch":
            one = values.sum(0)
        else:
            one = values.amin(0) if bucket[0] == "low" else values.amax(0)
        sizes = [sum(cells[at][3] for _, cells, _ in members) for at in range(len(members[0][1]))]
        first = members[0][1]
        found.append((bucket, tuple((*cell[:3], size) for cell, size in zip(first, sizes, strict=True)), one))
    return found
