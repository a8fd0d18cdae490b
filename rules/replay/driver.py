"""The replay driver: feeds the core with a recording as the daemon would have, without a clock.

Decisions depend on records and events. Only where the records pause are there ticks: there a hang shows, and there live time
would have passed. Each start is seen once as a live, trusted source, so that policy acts on paper; nothing is delivered.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from trainwarden.record import Event, Step
from trainwarden.rules.annotations import annotated
from trainwarden.rules.core.effects import Deliver, Effect, Query, Save
from trainwarden.rules.core.feed import feed, new_state
from trainwarden.rules.core.inputs import Happened, Input, Observation, SourceSeen, Start, Steps, Tick
from trainwarden.rules.core.sightings import Book
from trainwarden.rules.core.sightings import answer as remembered

from .attempts import Placed

#: Records of one stream that are fed at once. Any number gives the same answers.
MOST_RECORDS = 4096
#: With several ranks: few, so that none runs ahead of the others by more than a core waits for.
MOST_RECORDS_OF_RANKS = 16
#: A pause shorter than this, in seconds, or than three usual intervals, brings no ticks.
SHORTEST_PAUSE = 5.0
#: A pause before the usual intervals are known: while a run initialises.
FIRST_PAUSE = 60.0
TICKS_PER_PAUSE = 200


class Outcome(msgspec.Struct):
    """What a recording came to: the last row of each incident, notice and suspect, the curves of the incidents, and what the records were."""

    incidents: dict[str, dict[str, Any]] = {}
    notices: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, Any]] = {}
    suspects: dict[str, dict[str, Any]] = {}
    messages: list[Deliver] = []
    records: int = 0
    first_step: int | None = None
    last_step: int | None = None
    strides: dict[int, int] = {}
    signals: dict[str, None] = {}

    @property
    def stride(self) -> int:
        """How many steps a record covers as a rule."""
        return max(self.strides, key=lambda stride: self.strides[stride], default=1)


class Replay:
    """One core and the lines that are fed to it."""

    def __init__(self, settings: Any, pack: Any, suspects: Book | None = None) -> None:
        self._pack = pack
        self._state = new_state(msgspec.structs.replace(settings, mode="act", receiver=True), pack)
        self._remember(suspects)
        self._pending: dict[tuple[str, int], tuple[Start, int, list[Step]]] = {}
        self._seen: dict[tuple[str, int], tuple[Start, int, int]] = {}
        self._room = 0  # records until they are fed
        self._newest = math.nan
        self._start_id = ""
        self._gaps: deque[float] = deque(maxlen=31)
        self._counts: dict[str, dict[int, int]] = {}  # records of each start by rank
        self.outcome = Outcome()

    def _remember(self, suspects: Book | None) -> None:
        """Go on with what other recordings saw of their data; what this one sees is added to it."""
        if suspects is not None:
            self._state.memory.suspects = suspects

    def run(self, lines: Iterable[Placed]) -> Outcome:
        """Feed all lines and return what came of them."""
        start_id, of_rank, rows = "", -1, None
        for start, rank, item in lines:
            # Nearly always: the next record of the stream that the one before was of, without a pause in between.
            if rows and type(item) is Step and rank == of_rank and start.start_id == start_id and self._room:
                gap = item.time - self._newest
                if 0 < gap <= SHORTEST_PAUSE:
                    self._gaps.append(gap)
                    self._newest = item.time
                    self._room -= 1
                    rows.append(item)
                    continue
            self._take(start, rank, item)
            start_id, of_rank = start.start_id, rank
            rows = self._pending[start_id, rank][2] if (start_id, rank) in self._pending else None
        self._flush()
        return self.outcome

    def _take(self, start: Start, rank: int, item: Step | Event) -> None:
        self._pause(start, item.time)
        key = (start.start_id, rank)
        if key not in self._seen:
            self._flush()
            self._feed(_source(start, rank, item.time, 0))
        self._seen[key] = (start, rank, item.seq)
        if isinstance(item, Event):
            self._flush()
            self._feed(Happened(start, rank, item))
            return
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = (start, rank, [])
            ranks = len(self._pending)
            self._room = (MOST_RECORDS if ranks == 1 else MOST_RECORDS_OF_RANKS * ranks) - self._waiting
        pending[2].append(item)
        self._room -= 1
        if self._room <= 0:
            self._flush()

    @property
    def _waiting(self) -> int:
        """Records that are not fed yet."""
        return sum(len(records) for _, _, records in self._pending.values())

    def _pause(self, start: Start, time: float) -> None:
        """Feed the ticks of a pause before ``time``, if there was one."""
        gap = time - self._newest
        if gap == gap:  # both have a time
            if gap > SHORTEST_PAUSE and gap > 3 * self._usual():
                self._flush()
                self._tick(self._newest, time, alive=start.start_id == self._start_id)
            elif gap > 0:
                self._gaps.append(gap)
        if not time <= self._newest and not math.isnan(time):
            self._newest = time
        self._start_id = start.start_id

    def _usual(self) -> float:
        return statistics.median(self._gaps) if self._gaps else FIRST_PAUSE / 3

    def _tick(self, since: float, until: float, *, alive: bool) -> None:
        """Let time pass. If the same start goes on afterwards its exporter was there all the time, else it was not."""
        spacing = max(1.0, (until - since) / TICKS_PER_PAUSE)
        current = [seen for seen in self._seen.values() if seen[0].start_id == self._start_id]
        # The first one at once: how long nothing came is counted from it.
        ticks = sorted({since + 1.0, *(since + spacing * turn for turn in range(1, TICKS_PER_PAUSE))})
        for at in ticks:
            if at >= until:
                break
            for start, rank, seq in current:
                self._feed(_source(start, rank, at, seq, reachable=alive))
            self._feed(Tick(at))
        if alive:
            for start, rank, _ in current:
                self._feed(_source(start, rank, until, 0))

    def _flush(self) -> None:
        for start, rank, records in self._pending.values():
            self._count(start, rank, records)
            self._seen[start.start_id, rank] = (start, rank, records[-1].seq)
            self._feed(Steps(start, rank, tuple(records)))
        self._pending.clear()
        self._room = 0

    def _feed(self, value: Input) -> None:
        for effect in feed(self._state, value):
            self._apply(annotated(effect, self._pack))

    def _apply(self, effect: Effect) -> None:
        if isinstance(effect, Save):
            outcome = self.outcome
            kept = {"incident": outcome.incidents, "notice": outcome.notices, "curves": outcome.curves}
            kept["suspect"] = outcome.suspects
            if effect.kind in kept:
                kept[effect.kind][effect.key] = effect.row
        elif isinstance(effect, Deliver):
            self.outcome.messages.append(effect)
        elif isinstance(effect, Query):
            nothing = Observation(effect.query_id, self._newest, error="replay has no source of outside evidence")
            self._feed(remembered(effect, self._newest) or nothing)

    def _count(self, start: Start, rank: int, records: Sequence[Step]) -> None:
        outcome = self.outcome
        of_ranks = self._counts.setdefault(start.start_id, {rank: 0})
        # One rank's are the steps of a start: those of the lowest, which need not be the first to be read.
        outcome.records -= of_ranks[min(of_ranks)]
        of_ranks[rank] = of_ranks.get(rank, 0) + len(records)
        outcome.records += of_ranks[min(of_ranks)]
        steps = [record.step for record in records]
        first, last = outcome.first_step, outcome.last_step
        outcome.first_step = min(steps) if first is None else min(first, *steps)
        outcome.last_step = max(steps) if last is None else max(last, *steps)
        for stride, count in Counter([record.stride for record in records]).items():
            outcome.strides[stride] = outcome.strides.get(stride, 0) + count
        layouts = dict.fromkeys([tuple(record.signals) for record in records])
        outcome.signals.update(dict.fromkeys(chain.from_iterable(layouts)))


def _source(start: Start, rank: int, time: float, seq: int, *, reachable: bool = True) -> SourceSeen:
    return SourceSeen(
        start=start,
        rank=rank,
        time=time,
        last_seq=seq,
        caught_up=reachable,
        authenticated=reachable,
        may_act=True,
        reachable=reachable,
    )
