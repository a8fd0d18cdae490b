"""Running a program block by block: every node that remembers something, and of the others those that are asked for.

Most blocks are quiet, and most of a rule need not be computed to know that it does not hold: one side of an ``and`` that is known
to be false everywhere settles it, and a node none of whose signals was ever seen is unknown. What is left out has no
state, so nothing here changes a result, whatever is left out and when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Block, Bools

from .compile import Node, Program
from .operator import Operator, Type
from .operators.logic import Comparison
from .series import Frame, Series

#: Comparisons of what costs this much are tried by bounds first.
DEAR = 15


class Running:
    """The operators of a program over the blocks of one start. :meth:`begin` takes a block, then :meth:`result` answers.

    Nodes of the clock are told nothing by a record and stay out of it. Numpy's floating-point warnings are the caller's to switch off.
    """

    def __init__(self, program: Program, operators: Sequence[Operator]) -> None:
        self._nodes = program.nodes
        self._operators = operators
        self._results: list[Any] = []
        self._leaves = [place for place, node in enumerate(program.nodes) if _is_leaf(node)]
        self._columns: set[Any] = set()
        self._ranks: set[Any] = set()
        self._stats: set[Any] = set()
        self._parent = False
        self._asleep: list[bool] | None = None  # unknown until the first block, and after a load
        self._eager: list[int] = []
        self._conjuncts: dict[int, list[int]] = {}
        self._dear: set[int] = set()

    def begin(self, block: Block) -> Frame:
        """Take a block in: whatever remembers something is fed with it."""
        if (
            self._asleep is None
            or not block.columns.keys() <= self._columns
            or not block.ranks.keys() <= self._ranks
            or not block.stats.keys() <= self._stats
            or (block.parent is not None) != self._parent
        ):
            self._plan(block)
        self._frame = frame = Frame.of(block)
        self._unknown = np.full(frame.rows, np.nan)
        self._results = [None] * len(self._nodes)
        for number in self._eager:
            if self._results[number] is None:
                self.result(number)
        return frame

    def asleep(self, number: int) -> bool:
        """Say whether a node is unknown at every row because nothing that it reads was ever seen."""
        return self._asleep is not None and self._asleep[number]

    def result(self, number: int) -> Any:
        """Return a node's result for the block."""
        found = self._results[number]
        if found is not None:
            return found
        node = self._nodes[number]
        assert self._asleep is not None
        if self._asleep[number] and node.type in (Type.NUMBER, Type.BOOLEAN):
            frame = self._frame
            values: Any = self._unknown if node.type is Type.NUMBER else frame.nowhere
            found = Series(values, frame.nowhere, frame.nowhere)
        elif number in self._conjuncts:
            found = self._conjunction(number)
        elif number in self._dear and self._never(number, node):
            found = Series(self._frame.nowhere, self._frame.everywhere, self._fresh(number))
        else:
            found = self._operators[number].feed(self._frame, [self.result(of) for of in node.inputs])
        self._results[number] = found
        return found

    def _conjunction(self, number: int) -> Series:
        """Return an ``and``: where one of its parts is known to be false everywhere, all but the freshness is known."""
        frame = self._frame
        for part in self._conjuncts[number]:
            one: Series = self.result(part)
            if one.known is frame.everywhere and not np.count_nonzero(one.values):
                return Series(frame.nowhere, frame.everywhere, self._fresh(number))
        left, right = (self.result(of) for of in self._nodes[number].inputs)
        result: Series = self._operators[number].feed(frame, [left, right])
        return result

    def _never(self, number: int, node: Node) -> bool:
        """Say whether the bounds of both sides of a comparison settle that it holds nowhere."""
        operator = self._operators[number]
        assert isinstance(operator, Comparison)
        left, right = (self._bounds(of) for of in node.inputs)
        return left is not None and right is not None and operator.never(left, right)

    def _bounds(self, number: int) -> tuple[float, float] | None:
        """Return two numbers between which a node lies at every row, all of them known; None if that is not known cheaply."""
        assert self._asleep is not None
        if self._asleep[number]:
            return None
        node, operator = self._nodes[number], self._operators[number]
        if self._results[number] is None and operator.lazy:
            given: list[Any] = []
            for of in node.inputs:
                window = self._nodes[of].type is Type.WINDOW
                found = self.result(of) if window else self._bounds(of) if self._nodes[of].type is Type.NUMBER else None
                if found is None:
                    return None
                given.append(found)
            return operator.bounds(self._frame, given)
        series: Series = self.result(number)
        if series.known is not self._frame.everywhere:
            return None
        low, high = float(series.values.min()), float(series.values.max())
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    def _fresh(self, number: int) -> Bools:
        """Return where a node is fresh, without computing what is lazy: it is so where one of its inputs is."""
        found = self._results[number]
        assert self._asleep is not None
        if found is None and self._operators[number].lazy and not self._asleep[number]:
            fresh = self._frame.nowhere
            for of in self._nodes[number].inputs:
                fresh = self._frame.either(fresh, self._fresh(of))
            return fresh
        if found is None:
            found = self.result(number)
        result: Bools = found.fresh
        return result

    def _plan(self, block: Block) -> None:
        """Find what sleeps, now that these columns were seen; what remembers something; and in what order to look at the parts of each ``and``."""
        self._columns |= block.columns.keys()
        self._ranks |= block.ranks.keys()
        self._stats |= block.stats.keys()
        self._parent = block.parent is not None
        operators = self._operators
        awake = {place for place in self._leaves if operators[place].awake(block)}
        asleep: list[bool] = []
        costs: list[int] = []
        self._eager, self._conjuncts, self._dear = [], {}, set()
        for place, (node, operator) in enumerate(zip(self._nodes, operators, strict=True)):
            alone = operator.of_parent and not self._parent
            asleep.append(
                alone or (place not in awake if _is_leaf(node) else _sleeps(node, operator, self._nodes, asleep))
            )
            if asleep[place] or not operator.lazy:
                costs.append(0)
            else:
                costs.append(operator.cost + sum(costs[of] for of in node.inputs))
            if not asleep[place] and not operator.lazy and not node.clock:
                self._eager.append(place)
            if node.name == "and":
                parts = [part for of in node.inputs for part in self._conjuncts.get(of, [of])]
                self._conjuncts[place] = sorted(parts, key=costs.__getitem__)
            elif isinstance(operator, Comparison) and costs[place] >= DEAR:
                self._dear.add(place)
        self._asleep = asleep


def _is_leaf(node: Node) -> bool:
    return node.reads and not node.inputs and not node.clock


def _sleeps(node: Node, operator: Operator, nodes: Sequence[Node], asleep: Sequence[bool]) -> bool:
    if not operator.sleeps or not node.reads or node.clock:
        return False
    # A truth that reads nothing may settle an `and` or an `or`; a number that reads nothing settles no comparison.
    return all(asleep[of] or (not nodes[of].reads and nodes[of].type is Type.NUMBER) for of in node.inputs)
