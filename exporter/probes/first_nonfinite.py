"""Which module was the first that was not finite, in which step, on the way forward or back: the event ``nonfinite``.

Forward, modules are known in the order in which they ended; each step looks at them, in full or by one feature of each token
(:mod:`exporter.inside`). Back, a gradient of an output that is not finite was made by what ran right after that module; where no
gradient of an output was looked at, the parameters tell: of those whose gradient is not finite, the one that comes last in the
model was reached first. An event is written once an episode, which is over after some steps without any such value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.exporter.blocks import Spot, Structure
from trainwarden.exporter.groups import clean
from trainwarden.exporter.insight import Insight, insight
from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched
from trainwarden.record import Value

#: Steps without a non-finite value that end an episode.
CALM = 10


class FirstNonfinite(Probe):
    """Writes the event ``nonfinite`` with ``module``, ``stage`` (forward, loss or backward), ``group`` and ``block``."""

    name = "first_nonfinite"

    def __init__(self, structure: Structure, watched: Watched) -> None:
        self._spots = structure.spots
        self._blocks = structure.blocks
        self._watched = watched
        self._within = {spot.name: spot.block for spot in structure.spots if spot.group == "all"}
        self._calm = CALM

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return no signal. An event goes before the record of its step."""
        seen = insight(reading)
        found = self._first(seen, reading)
        if found is None:
            self._calm += 1
        else:
            if self._calm >= CALM:
                reading.host.setdefault("events", []).append(("nonfinite", found))
            self._calm = 0
        return {}

    def _first(self, seen: Insight, reading: Reading) -> dict[str, Any] | None:
        passes = 1 + max((number for number, _, _ in seen.outputs), default=0)
        for number, spot, finite in seen.outputs:
            if not finite:
                return self._told(self._spots[spot], "forward", number, passes)
        loss = reading.number("loss")
        if loss is not None and not math.isfinite(loss):
            return {"module": "loss", "stage": "loss"} if seen.outputs else None
        if reading.skipped:  # a loss scale that was too large: the scaler sees to it
            return None
        order = [spot for number, spot, _ in seen.outputs if number == 0]
        for number, spot, finite in seen.gradients:
            if not finite:
                after = self._after(spot, order)
                if after is None:
                    return {"module": "loss", "stage": "backward"}
                return self._told(after, "backward", number, passes)
        return self._of_parameters(reading, order)

    def _told(self, spot: Spot, stage: str, number: int, passes: int) -> dict[str, Any]:
        found: dict[str, Any] = {"module": spot.name, "stage": stage, "group": spot.group}
        if 0 <= spot.block < self._blocks:
            found["block"] = spot.block
        if passes > 1:
            found["micro_batch"] = number
        return found

    def _after(self, spot: int, order: Sequence[int]) -> Spot | None:
        """Return what took the output of a module: the next one that ended; embeddings are summed before they are taken."""
        if spot not in order:
            return None
        rest = [self._spots[other] for other in order[order.index(spot) + 1 :]]
        if self._spots[spot].group == "embedding":
            rest = [other for other in rest if other.group != "embedding"]
        return rest[0] if rest else None

    def _of_parameters(self, reading: Reading, order: Sequence[int]) -> dict[str, Any] | None:
        bad = [
            int(index)
            for meta, values in reading.pieces("grad_norms")
            for index, value in zip(meta[0], values, strict=True)
            if not np.isfinite(value)
        ]
        if not bad:
            return None
        ended = {self._spots[spot].name: at for at, spot in enumerate(order)}
        last = max(bad, key=lambda index: (*self._place(index, ended), index))
        name = clean(self._watched.names[last])
        found: dict[str, Any] = {
            "module": name.rpartition(".")[0] or name,
            "stage": "backward",
            "group": self._watched.group(last),
            "parameter": name,
        }
        block, _ = self._place(last, ended)
        if 0 <= block < self._blocks:
            found["block"] = block
        return found

    def _place(self, index: int, ended: dict[str, int]) -> tuple[int, int]:
        """Return where a parameter is used: its block (-1 before all of them, their number behind), and when its part ended."""
        name = clean(self._watched.names[index])
        part: int | None = None
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self._within:
                return self._within[name], -1 if part is None else part
            part = ended.get(name) if part is None else part
        outside = -1 if self._watched.group(index) == "embedding" else self._blocks
        return outside, -1 if part is None else part
