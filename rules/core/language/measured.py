"""Signals as the language sees them: measured, not due, stale or never seen, row by row.

A value that is absent from a record is *not due* while the last one is young enough: it stands in, without weight. It is
*stale* once it is older than ``max(20 steps, twice the signal's cadence)``, and unknown from then on. The cadence is
learned from the gaps between measurements, so nobody has to configure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Block, Bools, Column, Key

from .operator import Operator
from .packing import pack_float, unpack_float
from .series import Frame, Series, Vector

#: A last value stands in for at least this many steps.
STALE_AFTER = 20
#: Members of one vector that are followed; a run with more ranks reports their extremes itself.
MOST_MEMBERS = 4096

#: Signals of which a rank's own value before any reduction, ``rank_…``, is preferred to what it logged. A ``rank_grad_norm`` is
#: another quantity than the norm of the gradient that all ranks share.
OWN_FIRST = frozenset({"loss"})

# A burst of measurements at every step must not make a slow signal stale right after it: the cadence is forgotten slowly.
_FORGET = 0.99

_EXTREMES = ("min", "max", "argmax")

#: Signals of the gradient and of the update made from it. A step that the GradScaler skipped makes no update, and what
#: a log repeats for it is the value of an earlier step: not due.
OF_THE_UPDATE = frozenset(
    {
        "clip_ratio",
        "clipped_steps",
        "grad_norm",
        "grad_zero_ratio",
        "moment_rms",
        "rank_grad_norm",
        "update_applied_ratio",
        "update_ratio",
    }
)


class Presence:
    """Whether one column's value is measured, not due or unknown at each row. State: five numbers."""

    __slots__ = ("cadence", "gap", "last", "last_step")

    def __init__(self) -> None:
        self.last = np.nan
        self.last_step: int | None = None
        self.gap: int | None = None
        self.cadence = 0.0

    def read(self, frame: Frame, column: Column | None, hidden: Bools | None = None) -> Series:
        """Return the column over the block; rows where ``hidden`` is set count as not due."""
        rows = frame.rows
        if column is None:
            return self._carry(frame)
        present = column.present if hidden is None else column.present & ~hidden
        present = frame.all(present)
        if present is frame.everywhere:
            self._all_measured(frame)
            self.last = float(column.values[-1])
            return Series(column.values, present, present)
        if not present.any():
            return self._carry(frame)
        values = np.full(rows, np.nan)
        known = np.zeros(rows, dtype=np.bool_)
        given = column.values.tolist()
        for row, (step, here) in enumerate(zip(frame.steps, present.tolist(), strict=True)):
            if here:
                self._measured(step)
                self.last = given[row]
            if here or self._young(step):
                values[row] = self.last
                known[row] = True
        return Series(values, known, present)

    def dump(self) -> list[Any]:
        """Return the state as a list."""
        return [pack_float(self.last), self.last_step, self.gap, self.cadence]

    def load(self, state: Any) -> None:
        """Take up a dumped state."""
        last, self.last_step, self.gap, self.cadence = state
        self.last = unpack_float(last)

    def _carry(self, frame: Frame) -> Series:
        if self.last_step is None:
            return Series(np.full(frame.rows, np.nan), frame.nowhere, frame.nowhere)
        limit = self._limit()
        if frame.steps[0] - self.last_step > limit:
            return Series(np.full(frame.rows, np.nan), frame.nowhere, frame.nowhere)
        known = frame.all(frame.step - self.last_step <= limit)
        return Series(np.where(known, self.last, np.nan), known, frame.nowhere)

    def _measured(self, step: int) -> None:
        if self.last_step is not None:
            gap = step - self.last_step
            # The smaller of two neighbouring gaps: one long outage is no cadence.
            usual = gap if self.gap is None else min(gap, self.gap)
            self.cadence = max(float(usual), _FORGET * self.cadence)
            self.gap = gap
        self.last_step = step

    def _all_measured(self, frame: Frame) -> None:
        """Take every row of the block as a measurement."""
        steps = frame.steps
        for place, step in enumerate(steps):
            self._measured(step)
            if self.gap == self.cadence == 1 and steps[-1] - step == len(steps) - 1 - place:
                self.last_step = steps[-1]  # the rest follows step by step and changes nothing else
                return

    def _young(self, step: int) -> bool:
        return self.last_step is not None and step - self.last_step <= self._limit()

    def _limit(self) -> float:
        return max(float(STALE_AFTER), 2 * self.cadence)


class Signal(Operator):
    """A selector: one number a step.

    Warm-up: the first measurement. State: five numbers. Cost: O(1) a record. Where the record has no such column but
    ``parts`` is set, the sum of the signal's other columns stands in for ``all``.
    """

    __slots__ = ("_key", "_parts", "_presence")

    def __init__(self, key: Key, parts: bool) -> None:
        self._key = key
        self._parts = parts
        self._presence = Presence()

    def awake(self, block: Block) -> bool:
        """Say whether the signal is in the block or was seen before."""
        if self._presence.last_step is not None or self._key in block.columns:
            return True
        name = self._key[0]
        return self._parts and any(key[0] == name for key in block.columns)

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the signal over the block."""
        column = frame.block.columns.get(self._key)
        if self._parts:
            column = _total(frame.block, self._key, column)
        return self._presence.read(frame, column, _hidden(frame, self._key[0]))

    def dump(self) -> Any:
        """Return the last value and what is known of the cadence."""
        return self._presence.dump()

    def load(self, state: Any) -> None:
        """Take up a dumped state."""
        self._presence.load(state)


class Members(Operator):
    """``signal by label``: a number for each rank or label value that was ever seen.

    Warm-up: the first measurement of each member. State: five numbers a member, at most 4,096 members. Cost: O(members)
    a record. By rank, a rank's own value before any reduction (``rank_loss``) is preferred to what it logged as ``loss``;
    the extremes over all ranks that a record holds count as two more members.
    """

    __slots__ = ("_axis", "_extremes", "_key", "_order", "_presences")

    def __init__(self, key: Key, axis: int, order: tuple[str, ...]) -> None:
        self._key = key
        self._axis = axis  # 0 for ranks, else the place of the label in the key
        self._order = order
        self._presences: dict[str, Presence] = {}
        self._extremes = {name: Presence() for name in _EXTREMES} if axis == 0 else {}

    def awake(self, block: Block) -> bool:
        """Say whether there is a member, in the block or from before."""
        if self._presences or any(one.last_step is not None for one in self._extremes.values()):
            return True
        if self._axis:
            return bool(self._by_label(block))
        return bool(self._by_rank(block)) or any(self._extreme(block, part) is not None for part in _EXTREMES)

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Vector:
        """Return all members over the block."""
        if self._axis == 0 and not self._seen(frame.block):
            return Vector((), ())
        columns = self._by_rank(frame.block) if self._axis == 0 else self._by_label(frame.block)
        for member in columns:
            if member not in self._presences and len(self._presences) < MOST_MEMBERS:
                self._presences[member] = Presence()
        hidden = _hidden(frame, self._key[0])
        names = sorted(self._presences, key=self._number)
        members = tuple(self._presences[name].read(frame, columns.get(name), hidden) for name in names)
        numbers = tuple(self._number(name) for name in names)
        if self._axis:
            return Vector(numbers, members)
        low, high, largest = (
            presence.read(frame, self._extreme(frame.block, part), hidden) for part, presence in self._extremes.items()
        )
        return Vector((*numbers, np.nan, np.nan), (*members, low, high), largest)

    def dump(self) -> Any:
        """Return the state of each member."""
        return {name: presence.dump() for name, presence in (*self._presences.items(), *self._extremes.items())}

    def load(self, state: Any) -> None:
        """Take up a dumped state."""
        for name, own in state.items():
            into = self._extremes if name in self._extremes else self._presences
            into.setdefault(name, Presence()).load(own)

    def _seen(self, block: Block) -> bool:
        """Say whether there was anything of several ranks up to now: nearly all runs that are watched have one."""
        return bool(block.ranks or block.stats or self._presences or self._extremes["max"].last_step is not None)

    def _names(self) -> tuple[str, ...]:
        name = self._key[0]
        return (f"rank_{name}", name) if name in OWN_FIRST else (name,)

    def _extreme(self, block: Block, part: str) -> Column | None:
        found = None
        for name in self._names():
            found = _either(found, block.stats.get((name, part)))
        return found

    def _by_rank(self, block: Block) -> dict[str, Column]:
        found: dict[str, Column] = {}
        for name in self._names():
            for (signal, rank), column in block.ranks.items():
                if signal == name:
                    found[str(rank)] = _either(found.get(str(rank)), column) or column
        return found

    def _by_label(self, block: Block) -> dict[str, Column]:
        found = {}
        for key, column in block.columns.items():
            if len(key) != len(self._key) or key[self._axis] == "all":
                continue
            if (*key[: self._axis], "", *key[self._axis + 1 :]) == self._key:
                found[key[self._axis]] = column
        return found

    def _number(self, name: str) -> float:
        if name in self._order:
            return float(self._order.index(name))
        return float(name) if name.isdecimal() else float(len(self._order))


def _either(first: Column | None, second: Column | None) -> Column | None:
    """Return the first column, completed by the second where it is absent."""
    if first is None or second is None:
        return first or second
    values = np.where(first.present, first.values, second.values)
    return Column(values, first.present | second.present)


def _hidden(frame: Frame, name: str) -> Bools | None:
    """Return the rows whose update was skipped, for a signal of the update."""
    if name not in OF_THE_UPDATE:
        return None
    skipped = frame.block.columns.get(("skipped",))
    if skipped is None or not skipped.present.any():
        return None
    hidden: Bools = skipped.present & (skipped.values >= frame.block.stride)
    return hidden


def _total(block: Block, key: Key, column: Column | None) -> Column | None:
    """Return the column of ``all``, completed by the sum of the others where it is absent."""
    if column is not None and column.present.all():
        return column
    values = np.zeros(len(block))
    present = np.zeros(len(block), dtype=np.bool_)
    for other, part in block.columns.items():
        if len(other) == len(key) and other[0] == key[0] and other != key:
            values = values + np.where(part.present, part.values, 0.0)
            present = present | part.present
    if column is not None:
        values, present = np.where(column.present, column.values, values), present | column.present
    return Column(values, present)
