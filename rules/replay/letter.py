"""Replay to the letter: records together with what a daemon was told besides, so that what people and receivers did happens again.

The daemon journals whatever is not a record: commands, receipts, observations, and the gates that a poll changed, each with how far
the streams had been read by then (``rules/store.py``). Here they are fed at the same places, under the daemon's own settings: an
approved plan is requested under the same id, and what the receiver said of it is heard.

Live, every poll may open a gate; only polls that changed one are journalled. So wherever a decision may wait for one, the newest gates
are shown again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from trainwarden.rules.core.effects import Effect, Save
from trainwarden.rules.core.feed import new_state
from trainwarden.rules.core.inputs import Command, Input, Observation, Receipt, SourceSeen, Tick
from trainwarden.rules.core.sightings import Book

from .attempts import Placed
from .driver import Outcome, Replay

#: What a daemon journals, with how far the streams were read since the one before: ``"start_id/rank" -> seq``.
Told: TypeAlias = tuple["Command | Receipt | Observation | SourceSeen", Mapping[str, int]]

#: Records that are fed at once: few, for a decision is delivered behind them at the earliest.
MOST_RECORDS = 64


def of_run(told: Iterable[Told], run_uid: str, streams: Collection[str]) -> Iterator[Told]:
    """Yield the inputs that may concern one run, whose streams these are: a daemon's journal is that of all its runs."""
    read: dict[str, int] = {}
    for value, advance in told:
        read.update((stream, seq) for stream, seq in advance.items() if stream in streams)
        if not isinstance(value, SourceSeen) or value.start.run_uid == run_uid:
            yield value, read
            read = {}


def in_place(lines: Iterable[Placed], told: Iterable[Told]) -> Iterator[Placed | Told]:
    """Yield lines and inputs in the order in which the daemon took them. Lines of a stream keep their order."""
    source = iter(lines)
    held: deque[Placed] = deque()
    upto: dict[str, int] = {}
    read: dict[str, int] = {}
    for value, advance in told:
        upto.update(advance)
        missing = {stream for stream, seq in advance.items() if read.get(stream, 0) < seq}
        for _ in range(len(held)):
            yield from _due(held.popleft(), upto, read, held)
        while any(read.get(stream, 0) < upto[stream] for stream in missing):
            line = next(source, None)
            if line is None:
                break  # the journal holds less than the daemon had read
            yield from _due(line, upto, read, held)
        yield value, advance
    yield from held
    yield from source


def _due(line: Placed, upto: Mapping[str, int], read: dict[str, int], held: deque[Placed]) -> Iterator[Placed]:
    start, rank, item = line
    stream = f"{start.start_id}/{rank}"
    if item.seq <= upto.get(stream, 0):
        read[stream] = item.seq
        yield line
    else:
        held.append(line)


class Letter(Replay):
    """One core, the lines and the inputs that a daemon had. ``settings`` are the daemon's, mode and receiver included."""

    def __init__(self, settings: Any, pack: Any, told: Iterable[Told], suspects: Book | None = None) -> None:
        super().__init__(settings, pack)
        self._state = new_state(settings, pack)
        self._remember(suspects)
        self._told = told
        self._gates: dict[tuple[str, int], SourceSeen] = {}
        self._waiting_plans: set[str] = set()
        self._given = False

    def run(self, lines: Iterable[Placed]) -> Outcome:
        """Feed all lines and inputs and return what came of them."""
        for one in in_place(lines, self._told):
            if len(one) == 3:
                self._take(*one)
                if self._waiting >= MOST_RECORDS or self._waiting_plans:
                    self._flush()
                if self._waiting_plans:
                    self._show_gates(self._newest)
            else:
                self._hear(one[0])
        self._flush()
        return self.outcome

    def _hear(self, value: Command | Receipt | Observation | SourceSeen) -> None:
        self._flush()
        if isinstance(value, SourceSeen):
            self._gates[value.start.start_id, value.rank] = value
        elif isinstance(value, Receipt):
            self._show_gates(value.time)  # what it answers was delivered before
            self._feed(Tick(value.time))
        self._given = True
        self._feed(value)
        self._given = False

    def _show_gates(self, time: float) -> None:
        for gate in list(self._gates.values()):
            if gate.start.start_id == self._start_id:
                self._given = True
                self._feed(msgspec.structs.replace(gate, time=max(time, gate.time)))
                self._given = False

    def _feed(self, value: Input) -> None:
        if not self._given and isinstance(value, SourceSeen):
            gate = self._gates.get((value.start.start_id, value.rank))
            if gate is None:
                return  # the daemon had not looked yet, or its look was not kept
            value = msgspec.structs.replace(gate, time=value.time)
        elif not self._given and isinstance(value, Observation):
            return
        super()._feed(value)

    def _apply(self, effect: Effect) -> None:
        super()._apply(effect)
        if isinstance(effect, Save) and effect.kind == "incident":
            row = effect.row
            waits = row["plan"] is not None and row["webhook_id"] is None and row["closed_step"] is None
            (self._waiting_plans.add if waits else self._waiting_plans.discard)(effect.key)
