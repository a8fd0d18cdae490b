"""Running a program block by block: every node that remembers something, and of the others those that are asked for.

Most blocks are quiet, and most of a rule need not be computed to know that it does not hold: one side of an ``and`` that is known
to be false everywhere settles it, and a node none of whose signals was ever seen is unknown. What is left out has no
state, so nothing here changes a result, whatever is left out and when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from msgspec import structs

from trainwarden.rules.core.block import Block, Bools

from .compile import Node, Program
from .operator import Operator, Type
from .operators.logic import Comparison
from .series import Frame, Series


class _Way(Enum):
    """How a node comes to its result: it is fed, it sleeps, or less may do."""

    FEED = 0
    NO_NUMBER = 1
    NO_TRUTH = 2
    AND = 3
    DEAR = 4


_ASLEEP = (_Way.NO_NUMBER, _Way.NO_TRUTH)
#: What is the same for each block of so many rows is kept from one to the next: live, most blocks are alike.
FEW = 64
_NOTHING = Block(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64), {}, {})
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
        self._like: Frame | None = None  # the frame that the blank is of
        self._blank: list[Any] = []
        self._leaves = [place for place, node in enumerate(program.nodes) if _is_leaf(node)]
        self._awake: set[int] = set()
        self._columns: set[Any] = set()
        self._ranks: set[Any] = set()
        self._stats: set[Any] = set()
        self._parent = False
        self._ways: list[_Way] = []  # how each node comes to its result; none before the first block
        self._eager: list[int] = []
        self._conjuncts: dict[int, list[int]] = {}
        self._sources: dict[int, tuple[int, ...]] = {}

    def begin(self, block: Block) -> Frame:
        """Take a block in: whatever remembers something is fed with it."""
        if (
            not self._ways
            or not block.columns.keys() <= self._columns
            or not block.ranks.keys() <= self._ranks
            or not block.stats.keys() <= self._stats
            or (block.parent is not None) != self._parent
        ):
            self._plan(block)
        self._frame = frame = Frame.of(block, self._like)
        if self._like is None or self._like.rows != frame.rows:
            self._like, self._blank = frame, self._told(frame)
        self._results = self._blank.copy()
        for number in self._eager:
            if self._results[number] is None:
                self.result(number)
        return frame

    def end(self) -> None:
        """Let go of the block and its results."""
        self._results = []
        if self._frame.rows > FEW:
            self._like, self._blank = None, []
        elif self._like is self._frame:
            self._like = structs.replace(self._frame, block=_NOTHING, step=_NOTHING.step, steps=[], strides=[])
        del self._frame

    def result(self, number: int) -> Any:
        """Return a node's result for the block."""
        results = self._results
        found = results[number]
        if found is not None:
            return found
        way = self._ways[number]
        if way is _Way.AND:
            found = self._conjunction(number)
        elif way is _Way.DEAR and self._never(number):
            found = Series(self._frame.nowhere, self._frame.everywhere, self._fresh(number))
        else:
            given = []
            for of in self._nodes[number].inputs:
                one = results[of]
                given.append(self.result(of) if one is None else one)
            found = self._operators[number].feed(self._frame, given)
        results[number] = found
        return found

    def _told(self, frame: Frame) -> list[Any]:
        """Return the results that are the same for each block of as many rows: of what sleeps, and of literals."""
        no_number = Series(np.full(frame.rows, np.nan), frame.nowhere, frame.nowhere)
        no_truth = Series(frame.nowhere, frame.nowhere, frame.nowhere)
        found: list[Any] = [None] * len(self._nodes)
        for number, (way, node) in enumerate(zip(self._ways, self._nodes, strict=True)):
            if way in _ASLEEP:
                found[number] = no_number if way is _Way.NO_NUMBER else no_truth
            elif node.name == "number":
                found[number] = self._operators[number].feed(frame, [])
        return found

    def _conjunction(self, number: int) -> Series:
        """Return an ``and``: where one of its parts is known to be false everywhere, all but the freshness is known."""
        frame = self._frame
        for part in self._conjuncts[number]:
            one: Series = self.result(part)
            if one.known is frame.everywhere and not frame.any(one.values):
                return Series(frame.nowhere, frame.everywhere, self._fresh(number))
        left, right = (self.result(of) for of in self._nodes[number].inputs)
        result: Series = self._operators[number].feed(frame, [left, right])
        return result

    def _never(self, number: int) -> bool:
        """Say whether the bounds of both sides of a comparison settle that it holds nowhere."""
        operator = self._operators[number]
        assert isinstance(operator, Comparison)
        left, right = (self._bounds(of) for of in self._nodes[number].inputs)
        return left is not None and right is not None and operator.never(left, right)

    def _bounds(self, number: int) -> tuple[float, float] | None:
        """Return two numbers between which a node lies at every row, all of them known; None if that is not known cheaply."""
        if self._ways[number] in _ASLEEP:
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
        sources = self._sources.get(number)
        if sources is None:
            sources = self._sources[number] = tuple(sorted(self._sources_of(number)))
        frame = self._frame
        fresh = frame.nowhere
        for of in sources:
            fresh = frame.either(fresh, self.result(of).fresh)
            if fresh is frame.everywhere:
                break
        return fresh

    def _sources_of(self, number: int) -> set[int]:
        """Return the nodes that are not lazy and that a node hangs on, but for those that sleep."""
        if self._ways[number] in _ASLEEP:
            return set()
        if not self._operators[number].lazy:
            return {number}
        return {source for of in self._nodes[number].inputs for source in self._sources_of(of)}

    def _plan(self, block: Block) -> None:
        """Find what sleeps, now that these columns were seen; what remembers something; and in what order to look at the parts of each ``and``."""
        self._columns |= block.columns.keys()
        self._ranks |= block.ranks.keys()
        self._stats |= block.stats.keys()
        self._parent = block.parent is not None
        operators = self._operators
        awake = self._awake
        awake.update(place for place in self._leaves if operators[place].awake(block))  # and stays so
        asleep: list[bool] = []
        costs: list[int] = []
        self._ways, self._eager, self._conjuncts, self._sources = [], [], {}, {}
        self._like, self._blank = None, []
        for place, (node, operator) in enumerate(zip(self._nodes, operators, strict=True)):
            alone = operator.of_parent and not self._parent
            asleep.append(
                alone or (place not in awake if _is_leaf(node) else _sleeps(node, operator, self._nodes, asleep))
            )
            way = _Way.FEED
            if asleep[place] and node.type in (Type.NUMBER, Type.BOOLEAN):
                way = _Way.NO_NUMBER if node.type is Type.NUMBER else _Way.NO_TRUTH
            elif node.name == "and":
                way = _Way.AND
            if asleep[place] or not operator.lazy:
                costs.append(0)
            else:
                costs.append(operator.cost + sum(costs[of] for of in node.inputs))
            if not asleep[place] and not operator.lazy and not node.clock:
                self._eager.append(place)
            if way is _Way.AND:
                parts = [part for of in node.inputs for part in self._conjuncts.get(of, [of])]
                self._conjuncts[place] = sorted(parts, key=costs.__getitem__)
            elif way is _Way.FEED and isinstance(operator, Comparison) and costs[place] >= DEAR:
                way = _Way.DEAR
            self._ways.append(way)


def _is_leaf(node: Node) -> bool:
    return node.reads and not node.inputs and not node.clock


def _sleeps(node: Node, operator: Operator, nodes: Sequence[Node], asleep: Sequence[bool]) -> bool:
    if not operator.sleeps or not node.reads or node.clock:
        return False
    # A truth that reads nothing may settle an `and` or an `or`; a number that reads nothing settles no comparison.
    return all(asleep[of] or (not nodes[of].reads and nodes[of].type is Type.NUMBER) for of in node.inputs)
