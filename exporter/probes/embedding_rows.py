"""Damaged rows of the tables of tokens: a row that is not finite, far longer than the others, or suddenly gone.

One dirty shard can do that to a single token, and no norm over the whole table shows it. All of it is made on the device; a pass over the
table is dear, so that it is looked at in every tenth step that is due alone: every hundredth at the usual cadence.

Rows of tokens that never were in the data are no damage. They keep what they began with, or shrink all alike under weight decay, and are often
most of a vocabulary: the median is over the rows that have been trained, as the optimizer's second moment tells, and short rows count only if
they lost most of their length since the last look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwarden.exporter.measure import HOST_BLOCK
from trainwarden.exporter.probes.probe import Probe, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.tables import row_norms, rows_of, table_of
from trainwarden.exporter.watched import Watched, local
from trainwarden.record import Value

#: Steps that are due, of which the first is looked at.
EVERY = 10
#: A row this many times longer than the median of trained ones is damaged; one under such a share of it that has lost so much of its length
#: since the last look is, too. Trained rows of public models lie within a factor of a few (Land and Bartolo, arXiv 2405.05417: only what
#: was hardly trained stands apart, and is short).
LONG, SHORT, LOST = 10.0, 0.01, 0.1
#: Rows that are named at once, and in one start.
NAMED, SAID = 8, 4096
#: Features by which a row's second moment is looked at: a gradient that was never there left none of them.
FEATURES = 8
#: The numbers of a table, in the order in which they are put down.
NUMBERS = ("rows", "nonfinite", "long", "lost", "max", "median")
SIGNALS = {
    "nonfinite": "embedding_rows_nonfinite",
    "long": "embedding_rows_long",
    "lost": "embedding_rows_lost",
    "max": "embedding_row_max",
}


@dataclass(slots=True)
class _Found:
    """What a look found in a table. ``worst`` and ``lost`` are rows with their norms, the worst first."""

    numbers: dict[str, float]
    worst: list[tuple[int, float]] = field(default_factory=list)
    lost: list[tuple[int, float]] = field(default_factory=list)


class EmbeddingRows(Probe):
    """Signals ``embedding_rows_nonfinite``, ``embedding_rows_long``, ``embedding_rows_lost``, ``embedding_row_max``, ``embedding_row_ratio`` and
    ``embedding_row_argmax`` by table (``token``, ``head``), of this rank's rows, and the event ``embedding_rows`` where a row is newly damaged.

    Of a table that is split over its columns no row is whole: it is left out. What no optimizer updates cannot be damaged by it.
    """

    name = "embedding_rows"
    costly = True

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._due = 0
        #: Norms at the last look by parameter, on the device.
        self._last: dict[int, Tensor] = {}
        self._said: set[tuple[str, int]] = set()
        self._looked: set[str] = set()

    def after(self, update: Update) -> None:
        """Take the norms of the rows of each table of tokens."""
        look = update.sheet.host.get("rows.look")
        if look is None:
            look = update.sheet.host["rows.look"] = self._due % EVERY == 0
            self._due += 1
        if not look:
            return
        for at, index in enumerate(update.indices):
            table = table_of(self._watched, index)
            held = rows_of(update.params[at]) if table in ("token", "head") else None
            if held is not None:
                self._look(update, index, table, held[0].detach(), held[1], update.params[at])

    def _look(self, update: Update, index: int, table: str | None, rows: Tensor, first: int, whole: Tensor) -> None:
        norms = row_norms(rows, HOST_BLOCK)
        last = self._last.get(index)
        self._last[index] = norms
        finite = norms.isfinite()
        trained = _trained(update.optimizer.state.get(whole, {}), rows)
        usual = finite if trained is None else finite & trained
        median = _median(norms, usual)
        length = torch.where(finite, norms, math.inf)
        gone = torch.zeros_like(finite)
        if last is not None and last.shape == norms.shape:
            gone = finite & (norms < SHORT * median) & (norms < LOST * last)
        numbers = (
            usual.sum(),
            (~finite).sum(),
            (finite & (norms > LONG * median)).sum(),
            gone.sum(),
            torch.where(finite, norms, 0.0).amax(),
            median,
        )
        meta = (table, first)
        named = min(NAMED, rows.shape[0])
        worst = length.topk(named)
        shortest = torch.where(gone, norms, math.inf).neg().topk(named)
        update.sheet.add("rows.numbers", torch.stack([one.to(norms.dtype) for one in numbers]), meta)
        update.sheet.add("rows.worst", worst.indices, meta)
        update.sheet.add("rows.worst.norm", worst.values, meta)
        update.sheet.add("rows.lost", shortest.indices, meta)
        update.sheet.add("rows.lost.norm", -shortest.values, meta)

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the numbers of each table. What is newly damaged goes before the record, as an event."""
        found: dict[str, dict[str, Value]] = {}
        for table, look in _looks(reading):
            numbers = look.numbers
            for number, signal in SIGNALS.items():
                found.setdefault(signal, {})[table] = numbers[number]
            finite = [row for row, norm in look.worst if math.isfinite(norm)]
            if finite:
                found.setdefault("embedding_row_argmax", {})[table] = float(finite[0])
            if numbers["median"] > 0 and math.isfinite(numbers["median"]):
                found.setdefault("embedding_row_ratio", {})[table] = numbers["max"] / numbers["median"]
            self._tell(reading, table, look)
        return dict(found)

    def _tell(self, reading: Reading, table: str, look: _Found) -> None:
        limit = LONG * look.numbers["median"]
        # A row that is long from the first look on was so before: a model that was loaded, or a table that is made so.
        seen = table in self._looked
        self._looked.add(table)
        kinds = {
            "nonfinite": [row for row, norm in look.worst if not math.isfinite(norm)],
            "long": [row for row, norm in look.worst if limit < norm < math.inf],
            "lost": [row for row, norm in look.lost if math.isfinite(norm)],
        }
        new = {
            kind: [row for row in rows if (table, row) not in self._said]
            for kind, rows in kinds.items()
            if look.numbers[kind] > 0
        }
        if len(self._said) < SAID:
            self._said.update((table, row) for rows in new.values() for row in rows)
        told = [kind for kind, rows in new.items() if rows and (seen or kind != "long")]
        if told:
            norms = dict([*look.lost, *look.worst])
            ids = [row for kind in told for row in new[kind]]
            fields: dict[str, Any] = {
                "table": table,
                **{kind: int(look.numbers[kind]) for kind in kinds},
                "ids": ids,
                "norms": [norms[row] for row in ids],
                "median": look.numbers["median"],
            }
            reading.host.setdefault("events", []).append(("embedding_rows", fields))


def _trained(state: Any, rows: Tensor) -> Tensor | None:
    """Return which rows ever had a gradient, (rows,), by a few features of the second moment; None where there is none like them."""
    moment = state.get("exp_avg_sq") if isinstance(state, dict) else None
    moment = local(moment) if isinstance(moment, torch.Tensor) else None
    if moment is None or moment.shape != rows.shape:
        return None
    return (moment[:, :FEATURES] != 0).any(dim=1)


def _median(norms: Tensor, usual: Tensor) -> Tensor:
    """Return the lower median of some norms, 0-D; infinite where there are none. torch's own reads its place on the host."""
    ordered = torch.where(usual, norms, math.inf).sort().values
    middle = ((usual.sum() - 1) // 2).clamp(min=0)
    return ordered.gather(0, middle.reshape(1)).reshape(())


def _looks(reading: Reading) -> Iterator[tuple[str, _Found]]:
    """Yield what was found by table; of several of one kind the first."""
    parts: dict[str, dict[str, Any]] = {}
    for name in ("rows.numbers", "rows.worst", "rows.worst.norm", "rows.lost", "rows.lost.norm"):
        for (table, first), values in reading.pieces(name):
            parts.setdefault(table, {"first": first}).setdefault(name, values)
    for table, part in parts.items():
        numbers = dict(zip(NUMBERS, map(float, part["rows.numbers"]), strict=True))
        if not numbers["rows"] and not numbers["nonfinite"]:
            continue  # nothing in it was trained yet
        rows = [
            [
                (part["first"] + int(row), float(norm))
                for row, norm in zip(part[name], part[f"{name}.norm"], strict=True)
            ]
            for name in ("rows.worst", "rows.lost")
        ]
        yield table, _Found(numbers, *rows)
