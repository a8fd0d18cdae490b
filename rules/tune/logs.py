"""Logs as whole starts: one block each, with all ranks of a step in one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainwarden.record import Event, Step
from trainwarden.rules.core.block import Block, Column, from_steps
from trainwarden.rules.core.instrument_screen import screen
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.attempts import Placed

#: Records that are turned into columns at once.
PIECE = 4096


@dataclass(slots=True)
class _Open:
    """One start while it is read. With one rank, records become columns as they come."""

    rows: dict[int, dict[int, Step]] = field(default_factory=dict)
    pieces: list[Block] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    last: int = -1

    def take(self, rank: int, record: Step) -> None:
        self.ranks.add(rank)
        if record.step <= self.last:
            return  # a repeated step is evaluated once, live too
        self.rows.setdefault(record.step, {}).setdefault(rank, record)
        if len(self.ranks) == 1 and len(self.rows) >= PIECE:
            self._cut()

    def _cut(self) -> None:
        if not self.rows:
            return
        order = sorted(self.rows)
        by_rank = [self.rows[step] for step in order]
        lead = [ranks[min(ranks)] for ranks in by_rank]
        self.pieces.append(from_steps(lead, by_rank if len(self.ranks) > 1 else None))
        self.last = order[-1]
        self.rows.clear()

    def block(self) -> Block:
        self._cut()
        return joined(self.pieces)


def starts(lines: Iterable[Placed]) -> Iterator[Block]:
    """Yield the block of each start in a recording as its rules may see it, in order of their first line."""
    opened: dict[str, _Open] = {}
    for start, rank, item in lines:
        one = opened.setdefault(start.start_id, _Open())
        if not isinstance(item, Event):
            one.take(rank, item)
    for one in opened.values():
        block = one.block()
        if len(block):
            yield screen({}, block, Settings().dead_records)[0]


def joined(pieces: list[Block]) -> Block:
    """Return consecutive blocks of one start as one."""
    if len(pieces) == 1:
        return pieces[0]
    rows = [len(piece) for piece in pieces]
    return Block(
        np.concatenate([piece.step for piece in pieces] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([piece.time for piece in pieces] or [np.zeros(0)]),
        np.concatenate([piece.stride for piece in pieces] or [np.zeros(0, dtype=np.int64)]),
        _columns([piece.columns for piece in pieces], rows),
        _columns([piece.ranks for piece in pieces], rows),
        _columns([piece.stats for piece in pieces], rows),
    )


def _columns(pieces: list[dict[Any, Column]], rows: list[int]) -> dict[Any, Column]:
    found = {}
    for key in dict.fromkeys(key for piece in pieces for key in piece):
        parts = [
            piece.get(key) or Column(np.full(length, np.nan), np.zeros(length, dtype=np.bool_))
            for piece, length in zip(pieces, rows, strict=True)
        ]
        found[key] = Column(
            np.concatenate([part.values for part in parts]), np.concatenate([part.present for part in parts])
        )
    return found
