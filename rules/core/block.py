"""A columnar block: consecutive steps of one start, one numpy column per signal.

Operators of the rule language work on whole blocks. Any way of cutting a stream of records into blocks gives the same
answers: a block carries no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwarden.record import RankStats, Step, Value
from trainwarden.signals import BY_NAME

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]

#: A column's key: the signal's name and its label values in the order of the signal's labels, e.g.
#: ``("grad_norm", "embedding")`` or ``("moment_rms", "exp_avg_sq", "all")``; ``("loss",)`` for one without labels.
Key: TypeAlias = tuple[str, ...]

_POSITION: Key = ("sample_position",)
#: The weights of the normalisation layers, which no parallelism splits, and the signal by which ranks compare them (case D01).
NORM_WEIGHTS: Key = ("weight_rms", "norm")
REPLICATED = "ln_weight_norm"


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one signal: ``values[i]`` counts where ``present[i]``; NaN there is a measured NaN."""

    values: Floats  # (n,)
    present: Bools  # (n,)


@dataclass(frozen=True, slots=True)
class Block:
    """``n`` consecutive merged records of one start.

    ``ranks`` holds per-rank columns: ``(name, rank)``. ``stats`` holds what the records say of all ranks together:
    ``(name, part)`` for each part of :class:`RankStats`. ``parent`` is what a resumed start is compared with, for
    as long as it is.
    """

    step: Ints  # (n,)
    time: Floats  # (n,)
    stride: Ints  # (n,)
    columns: dict[Key, Column]
    ranks: dict[tuple[str, int], Column]
    stats: dict[tuple[str, str], Column] = field(default_factory=dict)
    parent: Parent | None = None

    def __len__(self) -> int:
        return len(self.step)

    def rows(self, first: int, end: int) -> Block:
        """Return the block of rows ``[first, end)`` (views, no copies)."""
        part = slice(first, end)
        return Block(
            self.step[part],
            self.time[part],
            self.stride[part],
            {key: Column(column.values[part], column.present[part]) for key, column in self.columns.items()},
            {key: Column(column.values[part], column.present[part]) for key, column in self.ranks.items()},
            {key: Column(column.values[part], column.present[part]) for key, column in self.stats.items()},
            self.parent,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The line that a start resumed from: its records up to step ``resumed_from``, and behind it those that were abandoned.

    ``last`` is the step up to which anything can be asked of it.
    """

    block: Block
    resumed_from: int
    last: int


def flatten(name: str, value: Value) -> Iterator[tuple[Key, float]]:
    """Yield the numbers of one signal with their keys; a bare number of a grouped signal counts as ``all``."""
    if isinstance(value, dict):
        for label, item in value.items():
            for key, number in flatten(label, item):
                yield (name, *key), number
    else:
        yield (name,), value


def from_steps(steps: Sequence[Step], by_rank: Sequence[dict[int, Step]] | None = None) -> Block:
    """Build a block from merged records; ``by_rank[i]`` holds the ranks' own records of step i where there are several.

    A grouped signal that was logged as a bare number gets the key ``(name, "all")`` if it is in the table.
    """
    columns: dict[Key, Column] = {}
    for key, column in _columns([step.signals for step in steps]):
        known = BY_NAME.get(key[0])
        missing = (1 + len(known.labels) - len(key)) if known else 0
        _add(columns, key + ("all",) * max(missing, 0), column)
    _place(columns, steps)
    ranks: dict[tuple[str, int], Column] = {}
    if by_rank is not None:
        for rank in dict.fromkeys(chain.from_iterable(by_rank)):
            nothing: dict[str, Value] = {}
            own = [_own(each[rank]) if rank in each else nothing for each in by_rank]
            for key, column in _columns(own):
                if len(key) == 1 or key[1:] == ("all",):
                    ranks[key[0], rank] = column
                elif key[0] == "source_share" and len(key) == 2:  # what a rank read may differ from what the others did
                    ranks[f"source_share.{key[1]}", rank] = column
                elif key == NORM_WEIGHTS:
                    ranks.setdefault((REPLICATED, rank), column)
        for rank, column in _overlap(by_rank):
            ranks["sample_overlap", rank] = column
    return Block(
        np.array([step.step for step in steps], dtype=np.int64),
        np.array([step.time for step in steps], dtype=np.float64),
        np.array([step.stride for step in steps], dtype=np.int64),
        columns,
        ranks,
        _stats(steps) if any(step.ranks for step in steps) else {},
    )


def _overlap(by_rank: Sequence[dict[int, Step]]) -> Iterator[tuple[int, Column]]:
    """Yield, for each rank, how many of its samples another rank read in the same step; nothing where no two ever did.

    Ranks that read all the same come in groups where a model is split over them: groups of one size are by design.
    """
    found: dict[int, dict[int, float]] = {}
    for row, each in enumerate(by_rank):
        spans = sorted((first, end, rank) for rank, step in each.items() for first, end in step.samples)
        if not any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
            continue
        groups = Counter(tuple(step.samples) for step in each.values() if step.samples)
        if len(set(groups.values())) == 1 and min(groups.values()) > 1:
            continue
        shared: dict[int, float] = {}
        for place, (first, end, rank) in enumerate(spans):
            for other_first, other_end, other in spans[place + 1 :]:
                if other_first >= end:
                    break
                if other != rank:
                    both = min(end, other_end) - max(first, other_first)
                    shared[rank] = shared.get(rank, 0.0) + both
                    shared[other] = shared.get(other, 0.0) + both
        if shared:
            found[row] = shared
    if found:
        told = np.array([any(step.samples for step in each.values()) for each in by_rank], dtype=np.bool_)
        for rank in dict.fromkeys(chain.from_iterable(by_rank)):
            values = [found.get(row, {}).get(rank, 0.0) for row in range(len(by_rank))]
            yield rank, Column(np.array(values), told)


def _place(columns: dict[Key, Column], steps: Sequence[Step]) -> None:
    """Complete ``sample_position`` by the ends of the ranges that the steps consumed, where a record does not tell it."""
    told = columns.get(_POSITION)
    if (told is not None and told.present.all()) or not any(step.samples for step in steps):
        return
    if set(map(len, [step.samples for step in steps])) == {1}:
        ends = np.array([step.samples[0][1] for step in steps], dtype=np.float64)
        column = Column(ends, np.ones(len(steps), dtype=np.bool_))
    else:
        column = _column([max([end for _, end in step.samples]) if step.samples else None for step in steps])
    if told is not None:
        column = Column(np.where(told.present, told.values, column.values), told.present | column.present)
    columns[_POSITION] = column


def _columns(rows: Sequence[Mapping[str, Value]]) -> Iterator[tuple[Key, Column]]:
    """Yield the columns of rows of signals, by the order of their first appearance; one column at a time, not one number."""
    table = _table(rows)
    if table is not None:
        present = np.ones(len(rows), dtype=np.bool_)
        for name, values_of_all in zip(rows[0], table, strict=True):
            yield (name,), Column(values_of_all, present)
        return
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values: list[Any] = [row.get(name) for row in rows]
        try:
            column = _column(values)
        except TypeError:  # grouped, at some rows at least
            groups = [value if isinstance(value, dict) else {} for value in values]
            bare = [None if isinstance(value, dict) else value for value in values]
            if any(value is not None for value in bare):
                yield (name,), _column(bare)
            for key, column in _columns(groups):
                yield (name, *key), column
        else:
            yield (name,), column


def _table(rows: Sequence[Mapping[str, Value]]) -> Floats | None:
    """Return (signals, n) numbers where each row has the signals of the first, all of them bare; else None."""
    names = tuple(rows[0]) if rows else ()
    if len(names) < 2 or set(map(len, rows)) != {len(names)}:
        return None
    try:
        found: Floats = np.array(list(map(itemgetter(*names), rows)), dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        return None
    return np.ascontiguousarray(found.T)


def _column(values: Sequence[Any]) -> Column:
    numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    if np.isnan(numbers).any():
        return Column(numbers, np.array([value is not None for value in values], dtype=np.bool_))
    return Column(numbers, np.ones(len(values), dtype=np.bool_))


def _add(columns: dict[Key, Column], key: Key, column: Column) -> None:
    """Add a column; a signal that is grouped at some rows and bare at others is one column."""
    before = columns.get(key)
    if before is not None:
        values = np.where(column.present, column.values, before.values)
        column = Column(values, column.present | before.present)
    columns[key] = column


def _stats(steps: Sequence[Step]) -> dict[tuple[str, str], Column]:
    stats: dict[tuple[str, str], Column] = {}
    for name in dict.fromkeys(chain.from_iterable([step.ranks for step in steps])):
        found = [step.ranks.get(name) for step in steps]
        stats[name, "min"] = _column([None if one is None else one.min for one in found])
        stats[name, "max"] = _column([None if one is None else one.max for one in found])
        stats[name, "argmax"] = _column([None if one is None else one.argmax for one in found])
        stats[name, "sum"] = _column([None if one is None else one.sum for one in found])
        stats[name, "n"] = _column([None if one is None else one.n for one in found])
    return stats


def _own(step: Step) -> Mapping[str, Value]:
    """Return what a rank's record says of this rank alone: a ``loss`` that the ranks combined is not its own."""
    if "loss" not in step.ranks:
        return step.signals
    return {name: value for name, value in step.signals.items() if name != "loss"}


__all__ = ["Block", "Bools", "Column", "Floats", "Ints", "Key", "RankStats", "flatten", "from_steps"]
