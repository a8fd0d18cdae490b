"""What becomes of each closely watched step once its numbers have arrived: lines in a file, and an event where something was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainwarden.exporter.blocks import Structure
from trainwarden.exporter.notices import Notices

from .findings import Named, bad, find
from .gathering import Layout, rows_of
from .lines import Lines
from .numbers import COUNT, FINITE, as_read

#: Events ``anomaly`` about something found, of one look. The same module, stage and operation is told of once.
MOST = 8
#: Kinds of rows, by what a line calls them, and of what they are.
KINDS = (
    ("before", "parameters"),
    ("output", "modules"),
    ("output_gradient", "modules"),
    ("gradient", "parameters"),
    ("parameter", "parameters"),
)

Tell = Callable[[str, dict[str, Any]], None]


class Reader:
    """Reads the steps of one look. Drain thread alone. ``summary`` are the fields of the event that ends it, kept up to date."""

    def __init__(self, named: Named, structure: Structure | None, lines: Lines, notices: Notices) -> None:
        self._named = named
        spots = [] if structure is None else structure.spots
        self._groups = {spot.name: (spot.group, spot.block) for spot in spots}
        self._blocks = 0 if structure is None else structure.blocks
        self._lines = lines
        self._notices = notices
        self._bad: set[int] = set()
        self._told: set[tuple[str, ...]] = set()
        self.summary: dict[str, Any] = {"looked": 0, "nonfinite": 0, "lines": 0, "left_out": 0}

    def take(self, layout: Layout, values: dict[str, Any], tell: Tell) -> None:
        """Take a step."""
        self._bad.update(bad(layout, values, "before"))
        found = find(layout, values, self._named, self._bad)
        self.summary["looked"] += layout.closed
        if found is not None:
            self.summary["nonfinite"] += layout.closed
            key = tuple(str(found.get(name, "")) for name in ("stage", "module", "op", "at", "parameter"))
            if key not in self._told and len(self._told) < MOST:
                self._told.add(key)
                tell("anomaly", {"state": "found", **found, **self._in(found["module"])})
        self._bad.update(bad(layout, values, "parameter"))
        try:
            self._lines.write(layout.step, self._rows(layout, values), layout.left_out)
        except OSError as error:
            self._notices.fault(f"writing {self._lines.path}", error)
        self.summary["lines"], self.summary["left_out"] = self._lines.written, self._lines.left_out

    def _in(self, module: str) -> dict[str, Any]:
        """Return group and block of a module: its own, or those of what it lies in."""
        name = module
        while name:
            if name in self._groups:
                group, block = self._groups[name]
                within = {"group": group}
                return {**within, "block": block} if 0 <= block < self._blocks else within
            name = name.rpartition(".")[0]
        return {}

    def _rows(self, layout: Layout, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what a step's lines say, the most important first."""
        found: list[tuple[int, dict[str, Any]]] = []
        for what, kind in KINDS:
            names = self._named.modules if kind == "modules" else self._named.parameters
            for number, row in rows_of(layout, values, what):
                name = names[number] or "the model"
                group, _ = self._groups.get(name, ("", 0))
                weight = 0 if row[FINITE] < row[COUNT] else 1 if group == "all" else 2
                found.append((weight, {"what": what, "name": name, **as_read(row)}))
        found.sort(key=lambda one: one[0])
        for _, line in found:
            yield line
