"""What was seen inside the model in one step, as numbers: the drain thread's side of :mod:`exporter.inside`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .sheet import Reading

#: Under which a row of a compiled graph holds its parts.
SUM, LARGEST, SQUARES, COUNT, ROW = 0, 1, 2, 3, 4
#: Spot of the residual stream where it is a block's output.
RESIDUAL = -1
#: How attention logits are seen, by the names of their entries.
KINDS = ("bound", "sampled", "lse")


@dataclass(slots=True)
class Insight:
    """``largest`` and ``squares`` (sum of squares, elements) are by spot, ``logits`` by kind.

    ``outputs`` are the spots in the order in which they ended their forward, with whether what they gave is finite as far as it
    was looked at; ``gradients`` the same of the gradients of outputs, in the order of the backward pass. Each is
    (pass, spot, finite).
    """

    largest: dict[int, float] = field(default_factory=dict)
    squares: dict[int, tuple[float, float]] = field(default_factory=dict)
    logits: dict[str, float] = field(default_factory=dict)
    outputs: list[tuple[int, int, bool]] = field(default_factory=list)
    gradients: list[tuple[int, int, bool]] = field(default_factory=list)

    @property
    def finite(self) -> bool | None:
        """Whether all outputs are, None where none was looked at."""
        return all(finite for _, _, finite in self.outputs) if self.outputs else None


def insight(reading: Reading) -> Insight:
    """Return what was seen in a step; it is worked out once."""
    known = reading.host.get("inside.insight")
    if isinstance(known, Insight):
        return known
    found = Insight()
    order: dict[tuple[int, int], tuple[int, bool]] = {}
    for what in ("watch", "low", "high"):
        for cells, values in reading.pieces(f"inside.{what}"):
            for (number, place, spot, _), value in zip(cells, map(float, values), strict=True):
                finite = math.isfinite(value)
                order[number, place] = (spot, finite and order.get((number, place), (spot, True))[1])
                if what != "watch":
                    size = abs(value)
                    if not size <= found.largest.get(spot, -math.inf):  # NaN is the largest of all, and stays it
                        found.largest[spot] = size
    for cells, values in reading.pieces("inside.norm"):
        for (_, _, spot, size), value in zip(cells, map(float, values), strict=True):
            sums, count = found.squares.get(spot, (0.0, 0.0))
            found.squares[spot] = (sums + value * value, count + size)
    rows = [
        (spot, [float(value) for value in values[ROW * at : ROW * at + ROW]])
        for spots, values in reading.pieces("inside.rows")  # one piece a device
        for at, spot in enumerate(spots)
    ]
    for at, (spot, row) in enumerate(rows):
        order[0, at - len(rows)] = (spot, math.isfinite(row[SUM]) and not math.isnan(row[LARGEST]))
        if row[COUNT]:
            found.largest[spot] = row[LARGEST]
            found.squares[spot] = (row[SQUARES], row[COUNT])
    found.outputs = [(number, spot, finite) for (number, _), (spot, finite) in sorted(order.items())]
    if rows:  # these know no order but that of the model
        found.outputs.sort(key=lambda one: one[1])
    for cells, values in reading.pieces("inside.grad"):
        found.gradients += [
            (number, spot, math.isfinite(value))
            for (number, _, spot, _), value in sorted(zip(cells, map(float, values), strict=True), key=_place)
        ]
    same = reading.host.get("inside.residual")
    if isinstance(same, int) and same in found.squares:
        found.squares[RESIDUAL] = found.squares[same]
    for kind in KINDS:
        seen = [value for _, values in reading.pieces(f"inside.{kind}") for value in map(float, values)]
        seen = [value for value in seen if value != -math.inf]  # rows that see nothing
        if seen:
            found.logits[kind] = math.nan if any(math.isnan(value) for value in seen) else max(seen)
    reading.host["inside.insight"] = found
    return found


def _place(pair: tuple[tuple[int, int, int, int], float]) -> int:
    return pair[0][1]
