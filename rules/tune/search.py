"""Moving a threshold: what does not depend on it is computed once, what does for each number that is tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.rules.core.alerts import Alert, AlertRule, Record
from trainwarden.rules.core.block import Block
from trainwarden.rules.core.language.compile import Program
from trainwarden.rules.core.language.operator import Operator
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.evaluate import Compiler

from .threshold import Threshold

#: A number that nobody writes, in the place of the threshold, so that its node can be found.
MARK = 1.2345678901234567e-250
#: Beyond the hardest value, a short number may lie so far as a share of that value's distance from the middle.
SHARE = 0.05
#: Rows that are computed at once.
ROWS = 8192


@dataclass(frozen=True, slots=True)
class _Start:
    """One start with what does not depend on the threshold, computed; ``other`` is what is compared with it."""

    block: Block
    known: dict[int, Series]
    other: Series


class Search:
    """One rule over all starts, for any threshold.

    Raises:
        ValueError: what the threshold is compared with cannot be taken apart from it.
    """

    def __init__(self, threshold: Threshold, rule: AlertRule, compiler: Compiler, blocks: Sequence[Block]) -> None:
        self._threshold = threshold
        self._rule = rule
        self._program = compiler.compile(threshold.put(repr(MARK)))
        nodes = self._program.nodes
        (self._mark,) = [
            place
            for place, node in enumerate(nodes)
            if node.name == "number" and dict(node.parameters)["value"] == MARK
        ]
        moved = {self._mark}
        for place, node in enumerate(nodes):
            if any(of in moved for of in node.inputs):
                moved.add(place)
        self._moved = moved
        self._border = sorted({of for place in moved for of in nodes[place].inputs if of not in moved})
        (compared,) = [place for place in moved if self._mark in nodes[place].inputs]
        (self._other,) = [of for of in nodes[compared].inputs if of != self._mark]
        self._starts = [self._prepared(block) for block in blocks]

    def _prepared(self, block: Block) -> _Start:
        operators = _operators(self._program, set(range(len(self._program.nodes))) - self._moved)
        parts: dict[int, list[Series]] = {of: [] for of in self._border}
        for first in range(0, len(block), ROWS):
            results = _feed(self._program, operators, Frame.of(block.rows(first, first + ROWS)), {})
            for of in self._border:
                if not isinstance(results[of], Series):
                    raise ValueError("a window is in between")
                parts[of].append(results[of])
        known = {of: _joined(part) for of, part in parts.items()}
        return _Start(block, known, known[self._other])

    def values(self) -> NDArray[np.float64]:
        """Return what was compared with the threshold, finite and measured, the hardest to exceed first."""
        found = [
            start.other.values[start.other.fresh & start.other.known & np.isfinite(start.other.values)]
            for start in self._starts
        ]
        whole = np.unique(np.concatenate(found)) if found else np.zeros(0)
        return whole[::-1] if self._threshold.rises else whole

    def fires(self, number: float) -> int:
        """Return how often the rule fires with this threshold."""
        total = 0
        for start in self._starts:
            operators = _operators(self._program, self._moved)
            alert = Alert(self._rule)
            for first in range(0, len(start.block), ROWS):
                block = start.block.rows(first, first + ROWS)
                part = slice(first, first + len(block))
                given: dict[int, Any] = {
                    of: Series(one.values[part], one.known[part], one.fresh[part]) for of, one in start.known.items()
                }
                always = np.ones(len(block), dtype=np.bool_)
                given[self._mark] = Series(np.full(len(block), number), always, np.zeros(len(block), dtype=np.bool_))
                results = _feed(self._program, operators, Frame.of(block), given)
                total += firings(alert, block, results[self._program.outputs[0].truth])
        return total

    def threshold_for(self, allowed: int) -> float | None:
        """Return the threshold closest to firing always with which the rule fires at most ``allowed`` times.

        It is sought from the hardest value downwards, since one that always holds fires but once. None: nothing was measured, or no
        threshold harder than the middle of all values fires more often.
        """
        values = self.values()
        if not len(values):
            return None
        middle = len(values) // 2
        fine, bad, step = 0, 0, 1
        while bad == 0 and middle:
            place = min(fine + step, middle)
            if self.fires(float(values[place])) > allowed:
                bad = place
            elif place == middle:
                return None
            else:
                fine, step = place, step * 2
        while bad - fine > 1:
            middle = (fine + bad) // 2
            if self.fires(float(values[middle])) <= allowed:
                fine = middle
            else:
                bad = middle
        return self._settled(values, fine, allowed)

    def _settled(self, values: NDArray[np.float64], place: int, allowed: int) -> float:
        """Return a short number that does as well as the value at ``place``, or a harder one."""
        away = math.inf if self._threshold.rises else -math.inf
        room = max(abs(float(values[0] - values[len(values) // 2])) * SHARE, 1e-300)
        for at in range(place, -1, -1):
            value = float(values[at])
            for digits in (2, 3, 4, 6, 9):
                short = rounded(value, digits, self._threshold.rises)
                if (
                    abs(short - value) < (room if at == 0 else abs(float(values[at - 1]) - value))
                    and self.fires(short) <= allowed
                ):
                    return short
            exact = math.nextafter(value, away)
            if self.fires(exact) <= allowed:
                return exact
        return rounded(
            float(values[0]) + math.copysign(abs(float(values[0])) * 0.01 + 1e-9, away), 3, self._threshold.rises
        )


def rounded(value: float, digits: int, up: bool) -> float:
    """Return the number of so many digits next to ``value``, above it or below."""
    if value == 0:
        return 0.0
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(abs(value))))
    whole = math.ceil(value * scale) if up else math.floor(value * scale)
    return float(f"{whole / scale:.{digits}g}")


def firings(alert: Alert, block: Block, truth: Series) -> int:
    """Feed an alert with its expression over a block and return how often it begins to fire."""
    true, known, fresh = truth.values, truth.known, truth.fresh
    places = np.flatnonzero(true)
    row, count = 0, 0
    while row < len(block):
        if alert.idle:
            index = int(np.searchsorted(places, row))
            begins = int(places[index]) if index < len(places) else len(block)
            if begins > row:
                alert.skip(int(block.step[begins - 1]))
                row = begins
                continue
        record = Record(
            row,
            int(block.step[row]),
            int(block.stride[row]),
            float(block.time[row]),
            bool(true[row]),
            bool(known[row]),
            bool(fresh[row]),
            None,
        )
        change = alert.feed(record)
        count += change is not None and change.state == "firing"
        row += 1
    return count


def _operators(program: Program, wanted: set[int]) -> dict[int, Operator]:
    return {place: operator for place, operator in enumerate(program.operators()) if place in wanted}


def _feed(program: Program, operators: dict[int, Operator], frame: Frame, results: dict[int, Any]) -> dict[int, Any]:
    with np.errstate(all="ignore"):  # infinities and NaN are values of the language
        for place, operator in operators.items():
            if place not in results:
                results[place] = operator.feed(frame, [results[of] for of in program.nodes[place].inputs])
    return results


def _joined(parts: list[Series]) -> Series:
    return Series(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.known for part in parts]),
        np.concatenate([part.fresh for part in parts]),
    )
