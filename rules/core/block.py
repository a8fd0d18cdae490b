"""A columnar block: consecutive steps of one start, one numpy column per signal.

Operators of the rule language work on whole blocks. Any way of cutting a stream of records into blocks gives the same
answers: a block carries no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one signal: ``values[i]`` counts where ``present[i]``; NaN there is a measured NaN."""

    values: Floats  # (n,)
    present: Bools  # (n,)


@dataclass(frozen=True, slots=True)
class Block:
    """``n`` consecutive merged records of one start.

    ``ranks`` holds per-rank columns: ``(name, rank)``. ``stats`` holds what the records say of all ranks together:
    ``(name, "min")``, ``(name, "max")`` and ``(name, "argmax")``.
    """

    step: Ints  # (n,)
    time: Floats  # (n,)
    stride: Ints  # (n,)
    columns: dict[Key, Column]
    ranks: dict[tuple[str, int], Column]
    stats: dict[tuple[str, str], Column] = field(default_factory=dict)

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
        )


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

    n = len(steps)
    columns: dict[Key, Column] = {}
    ranks: dict[tuple[str, int], Column] = {}
    stats: dict[tuple[str, str], Column] = {}

    def put(into: dict[Any, Column], key: Any, row: int, number: float) -> None:
        column = into.get(key)
        if column is None:
            column = into[key] = Column(np.full(n, np.nan), np.zeros(n, dtype=np.bool_))
        column.values[row] = number
        column.present[row] = True

    for row, step in enumerate(steps):
        for name, value in step.signals.items():
            known = BY_NAME.get(name)
            for key, number in flatten(name, value):
                missing = (1 + len(known.labels) - len(key)) if known else 0
                put(columns, key + ("all",) * max(missing, 0), row, number)
        for name, over_ranks in step.ranks.items():
            put(stats, (name, "min"), row, over_ranks.min)
            put(stats, (name, "max"), row, over_ranks.max)
            put(stats, (name, "argmax"), row, float(over_ranks.argmax))
        if by_rank is not None:
            for rank, own in by_rank[row].items():
                for name, value in own.signals.items():
                    if not isinstance(value, dict):
                        put(ranks, (name, rank), row, value)
    return Block(
        np.array([step.step for step in steps], dtype=np.int64),
        np.array([step.time for step in steps], dtype=np.float64),
        np.array([step.stride for step in steps], dtype=np.int64),
        columns,
        ranks,
        stats,
    )


__all__ = ["Block", "Bools", "Column", "Floats", "Ints", "Key", "RankStats", "flatten", "from_steps"]
