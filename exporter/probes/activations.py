"""How large what the model's modules give back is: by kind of module, by block, and in the residual stream before the last norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

from trainwarden.exporter.blocks import Spot
from trainwarden.exporter.insight import RESIDUAL, Insight, insight
from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value
from trainwarden.signals import GROUPS

#: Blocks of which each has its own numbers in a record; of a deeper model only the groups are told.
BLOCKS = 256


class Activations(Probe):
    """Signals ``activation_rms``, ``activation_absmax`` by group, ``block_rms``, ``block_absmax`` by block, ``residual_rms``.

    Over all elements of all micro-batches of the step. Group ``all`` are the blocks alone: what other groups give is part of it.
    """

    name = "activations"

    def __init__(self, spots: Iterable[Spot]) -> None:
        self._spots = list(spots)
        self._members = {
            group: [spot.number for spot in self._spots if spot.group == group] for group in (*GROUPS, "residual")
        }
        blocks = [spot for spot in self._spots if spot.group == "all"]
        self._blocks = {spot.label: spot.number for spot in blocks} if len(blocks) <= BLOCKS else {}

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the sizes, where this step read them."""
        seen = insight(reading)
        found: dict[str, Value] = {}
        sizes: dict[str, Value] = {}
        largest: dict[str, Value] = {}
        for group in GROUPS:
            rms = _rms(seen, self._members[group])
            if rms is not None:
                sizes[group] = rms
            among = [seen.largest[number] for number in self._members[group] if number in seen.largest]
            if among:
                largest[group] = math.nan if any(math.isnan(value) for value in among) else max(among)
        if sizes:
            found["activation_rms"] = sizes
        if largest:
            found["activation_absmax"] = largest
        each = {label: _rms(seen, [number]) for label, number in self._blocks.items()}
        by_block: dict[str, Value] = {label: rms for label, rms in each.items() if rms is not None}
        if by_block:
            found["block_rms"] = by_block
            found["block_absmax"] = {
                label: seen.largest[number] for label, number in self._blocks.items() if number in seen.largest
            }
        residual = _rms(seen, [RESIDUAL, *self._members["residual"]])
        if residual is not None:
            found["residual_rms"] = residual
        return found


def _rms(seen: Insight, numbers: Iterable[int]) -> float | None:
    squares = [seen.squares[number] for number in numbers if number in seen.squares]
    count = sum(count for _, count in squares)
    if not count:
        return None
    total = sum(square for square, _ in squares)
    return math.sqrt(total / count) if total >= 0 else math.nan
