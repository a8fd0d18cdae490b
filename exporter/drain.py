"""The drain thread: takes closed steps and events in order, waits for their values, and has them recorded.

The training thread appends items to a deque, which takes no lock and wakes nobody: to be woken, this thread would have to take
the processor or the interpreter from the one that trains. It looks by itself, every few milliseconds, and steps aside between
two items. That values have arrived is read off plain host memory; no CUDA call is made. The thread is a daemon: it never
keeps a training process alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwarden.record import Event

from .across import Layout
from .held import HOLD_SECONDS, Held
from .notices import Notices
from .recorder import Recorder
from .sheet import Reading
from .side import SideGroup
from .staging import Staged

#: Shortest and longest time between two looks for new items; in between, an eighth of the time from item to item.
POLL_SECONDS = (0.005, 0.1)
#: Seconds between two looks for values that are still on their way.
WORD_SECONDS = 0.002
#: Longest time that a record waits for those behind it before it goes to the disk.
FLUSH_SECONDS = 0.05
#: What is left of the time for closing to write the last lines.
LAST_SECONDS = 0.5
#: Closed steps that may wait for the drain thread; beyond, steps are dropped and counted.
PENDING = 2048


@dataclass(slots=True)
class ClosedStep:
    """A step that the training thread is done with. ``staged`` is None where its values were refused."""

    reading: Reading
    staged: Staged | None
    time: float
    phase: str


@dataclass(slots=True)
class Fetch:
    """Values beside the steps; ``take`` is given them by name once they are there, and not called if they never are."""

    staged: Staged
    take: Callable[[dict[str, np.ndarray]], None]


@dataclass(slots=True)
class Happened:
    """An event. ``late`` are fields that an earlier :class:`Fetch` filled in."""

    event: Event
    late: dict[str, Any] | None = None


@dataclass(slots=True)
class Call:
    """Something else to do on the drain thread, in its turn."""

    function: Any


Item = ClosedStep | Fetch | Happened | Call


class Drain(threading.Thread):
    """One per exporter. ``submit`` is safe from any thread and from a signal handler."""

    def __init__(
        self, recorder: Recorder, notices: Notices, side: SideGroup | None = None, layout: Layout | None = None
    ) -> None:
        super().__init__(name="trainwarden-drain", daemon=True)
        self._side, self._layout = side, layout
        self._held = Held(side)
        self._queue: deque[Item] = deque()
        self._finish = threading.Event()
        self._recorder = recorder
        self._notices = notices
        self._deadline: float | None = None
        self._done = threading.Event()
        #: Called every so often, to look for what is asked of the run.
        self.look: Callable[[], None] = lambda: None
        #: Steps that could not be recorded.
        self.dropped = 0

    @property
    def lag(self) -> int:
        """Items that wait."""
        return len(self._queue) + len(self._held)

    def submit(self, item: Item) -> None:
        """Queue an item; a step is dropped where too many wait already. Never blocks."""
        if isinstance(item, ClosedStep) and len(self._queue) >= PENDING:
            self.dropped += 1
            self._notices.say("dropped steps", f"more than {PENDING} steps wait to be recorded: steps are left out")
            return
        self._queue.append(item)

    def finish(self, seconds: float) -> bool:
        """Have everything queued so far recorded, then end. Returns whether that was done within ``seconds``."""
        self._deadline = time.monotonic() + seconds
        self._finish.set()
        return self._done.wait(seconds)

    def run(self) -> None:
        """Work until :meth:`finish`."""
        self._notices.deferred = True
        try:
            pause, worked = POLL_SECONDS[0], time.monotonic()
            while not self._finish.wait(pause):
                if self._queue:
                    now = time.monotonic()
                    pause, worked = min(max((now - worked) / 8, POLL_SECONDS[0]), POLL_SECONDS[1]), now
                self._work()
                self._guarded(self.look)
            self._work()
            self._guarded(self._wait_for_ranks)
            self._guarded(self._recorder.close)
        finally:
            self._notices.deferred = False
            self._guarded(self._notices.write)
            self._done.set()

    def _work(self) -> None:
        """Handle all items that wait."""
        flushed = time.monotonic()
        while self._queue:
            self._guarded(self._handle, self._queue.popleft())
            if time.monotonic() - flushed > FLUSH_SECONDS:
                self._guarded(self._recorder.flush)
                flushed = time.monotonic()
            time.sleep(0)  # let the training thread have the interpreter
        self._record_held()
        self._guarded(self._recorder.flush)
        self._guarded(self._notices.write)

    def _record_held(self, until: float | None = None) -> None:
        """Record what has waited for the other ranks for long enough."""
        while (record := self._held.next(until)) is not None:
            self._guarded(record)
            time.sleep(0)

    def _wait_for_ranks(self) -> None:
        """At the end: have the last steps combined, a bounded time long."""
        if self._side is not None:
            self._side.hurry()
        now = time.monotonic()
        until = now + HOLD_SECONDS if self._deadline is None else min(now + HOLD_SECONDS, self._deadline - LAST_SECONDS)
        while self._held:
            self._record_held(until)
            time.sleep(WORD_SECONDS)

    def _guarded(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self._notices.fault("drain thread", error)

    def _handle(self, item: Item) -> None:
        if isinstance(item, Call):
            self._held.put(lambda joined: item.function())
            return
        if isinstance(item, Happened):
            item.event.fields.update(item.late or {})
            self._held.put(lambda joined: self._recorder.event(item.event))
            return
        arrived = self._arrived(item.staged)
        if isinstance(item, Fetch):
            values, complete = item.staged.read() if arrived else ({}, False)
            if complete:
                item.take({name: np.concatenate([array for _, array in found]) for name, found in values.items()})
            return
        reading = item.reading
        if item.staged is not None and arrived:
            reading.values, reading.complete = item.staged.read()
        else:
            reading.complete = False
        seen = self._recorder.read(reading)
        if self._side is not None and self._layout is not None:
            self._side.offer(reading.step, self._layout.own({**seen.compared, **seen.signals}, seen.shares))
        self._held.put(
            lambda joined: self._recorder.step(reading, item.time, item.phase, seen, joined), step=reading.step
        )

    def _arrived(self, staged: Staged | None) -> bool:
        """Wait until the values are there; give up at the deadline of :meth:`finish`."""
        if staged is None:
            return False
        while not staged.ready():
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.dropped += 1
                return False
            self._notices.write()
            time.sleep(WORD_SECONDS)
        return True
