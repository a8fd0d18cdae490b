"""The live driver: the one thread that owns the core's state.

It takes inputs off the queue, feeds the core, keeps the effects, and writes cursors, state and effects in one
transaction: every few seconds, and at once when there is something to deliver. Only then are delivery threads woken.

If the core raises, what it did since the last transaction cannot be trusted. The driver goes back to that transaction
and has the records since read again, without the stream that brought the fault: that one is set aside, said once and
counted, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from trainwarden.rules.core.effects import Deliver, Effect, Query, Save
from trainwarden.rules.core.feed import dump, feed, load, new_state
from trainwarden.rules.core.inputs import Happened, Input, Observation, SourceSeen, Steps, Tick
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions
from trainwarden.rules.store import Commit, Cursor, Journalled, SavedRow, Store, StoreError, advance_of


class Core(NamedTuple):
    """The four functions of the pure core that a driver needs."""

    feed: Callable[[Any, Input], list[Effect]]
    new_state: Callable[[Any, Any], Any]
    dump: Callable[[Any], bytes]
    load: Callable[[bytes, Any, Any], Any]


CORE = Core(feed, new_state, dump, load)


class Live:
    """Owns the state. :meth:`open` first, then :meth:`run` on a thread of its own until the inbox is closed and empty.

    ``destinations(message)`` says where a message goes; ``query(q)`` answers a query; ``wake()`` tells the
    delivery threads that a transaction with messages was committed.
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        positions: Positions,
        settings: Any,
        pack: Any,
        metrics: Metrics,
        *,
        snapshot_interval: float,
        destinations: Callable[[Deliver], tuple[str, ...]],
        wake: Callable[[], None],
        query: Callable[[Query], Observation],
        core: Core = CORE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._positions = positions
        self._settings = settings
        self._pack = pack
        self._metrics = metrics
        self._interval = snapshot_interval
        self._destinations = destinations
        self._wake = wake
        self._query = query
        self._core = core
        self._clock = clock
        self._log = structlog.get_logger("core")
        self._state: Any = None
        self._snapshot = b""
        self._cursors: dict[tuple[str, int], Cursor] = {}
        self._committed: dict[tuple[str, int], Cursor] = {}
        self._marked: dict[tuple[str, int], int] = {}
        self._gates: dict[tuple[str, int], tuple[bool, ...]] = {}
        self._aside: set[tuple[str, int]] = set()
        self._commit = Commit()
        self._last_commit = 0.0
        self._stuck = False
        #: The fault that ended the thread, for the health page.
        self.failure: BaseException | None = None

    @property
    def stuck(self) -> bool:
        """Whether the last transaction could not be written."""
        return self._stuck

    def open(self) -> None:
        """Load the last transaction, and apply what was received and is not in it yet.

        Raises:
            StoreError: the snapshot is of another version, or the database cannot be written.
        """
        found = self._store.snapshot()
        if found is None:
            self._state = self._core.new_state(self._settings, self._pack)
        else:
            try:
                self._state = self._core.load(found, self._settings, self._pack)
            except ValueError as error:
                raise StoreError(f"{self._store.path}: the snapshot in it cannot be used: {error}") from None
        self._snapshot = found or self._core.dump(self._state)
        self._committed = {(cursor.start.start_id, cursor.rank): cursor for cursor in self._store.cursors()}
        self._cursors = dict(self._committed)
        self._marked = {key: cursor.seq for key, cursor in self._cursors.items()}
        self._last_commit = time.monotonic()
        waiting = self._store.waiting_inputs()
        if found is not None:
            self._log.info("going on from the last snapshot", streams=len(self._cursors), waiting_inputs=len(waiting))
        for identity, value in waiting:
            self._take(Received(identity, value))
        self._write()

    def run(self) -> None:
        """Take and feed until the inbox is closed and empty; then write the last transaction."""
        try:
            while True:
                left = self._last_commit + self._interval - time.monotonic()
                item = self._inbox.take(min(left, 0.2) if left > 0 else 0.2)
                if item is not None:
                    self._take(item)
                elif self._inbox.closed:
                    break
                if self._must_write():
                    self._try_write()
            self._write()
        except BaseException as error:
            self.failure = error
            self._log.exception("the core thread ends")
            raise

    def _take(self, item: Read | Received | Tick) -> None:
        began = time.perf_counter()
        try:
            if isinstance(item, Read):
                self._take_read(item)
            elif isinstance(item, Received):
                self._feed(item.value)
                self._journal(item.identity, item.value)
            else:
                self._feed(item)
        except Exception:
            self._set_aside(item)
        self._metrics.feed_seconds.observe(time.perf_counter() - began)

    def _take_read(self, read: Read) -> None:
        key = (read.start.start_id, read.rank)
        at = self._cursors[key].seq if key in self._cursors else 0
        if key in self._aside or read.after != at:
            return  # read before the driver went back: it comes again
        for value in read.inputs:
            self._feed(value)
            if isinstance(value, Steps):
                self._metrics.records.inc(len(value.records))
            elif isinstance(value, Happened):
                self._metrics.events.inc()
            elif isinstance(value, SourceSeen):
                gate = (value.caught_up, value.authenticated, value.may_act, value.reachable)
                if self._gates.get(key) != gate:
                    self._gates[key] = gate
                    self._journal(None, value)
        if read.upto > read.after:
            self._cursors[key] = self._commit.cursors[key] = Cursor(read.start, read.rank, read.upto)

    def _feed(self, value: Input) -> None:
        for effect in self._core.feed(self._state, value):
            if isinstance(effect, Save):
                self._commit.rows[effect.kind, effect.key] = SavedRow(effect.kind, effect.key, effect.row)
            elif isinstance(effect, Deliver):
                self._commit.messages.append((effect, self._destinations(effect)))
            else:
                answer = self._query(effect)
                self._feed(answer)
                self._journal(None, answer)

    def _journal(self, identity: int | None, value: Journalled) -> None:
        self._commit.applied.append((identity, value, advance_of(self._cursors, self._marked)))
        self._marked = {key: cursor.seq for key, cursor in self._cursors.items()}

    def _must_write(self) -> bool:
        """Say whether a transaction is due: at once for messages, after the interval for the rest.

        Ticks alone change the state too; with nothing else to write, a snapshot a minute is enough.
        """
        age = time.monotonic() - self._last_commit
        if self._stuck:
            return age >= min(self._interval, 5.0)
        return bool(self._commit.messages) or age >= (self._interval if self._commit else max(60.0, self._interval))

    def _try_write(self) -> None:
        """Write; a database that cannot be written now (a full disk) is tried again, and nothing is delivered until then."""
        try:
            self._write()
        except StoreError as error:
            if not self._stuck:
                self._log.error("the database cannot be written; nothing is delivered until it can", error=str(error))
            self._stuck = True
            self._metrics.snapshot_failures.inc()
            self._last_commit = time.monotonic()
        else:
            if self._stuck:
                self._log.info("the database can be written again")
            self._stuck = False

    def _write(self) -> None:
        began = time.perf_counter()
        state = self._core.dump(self._state)
        self._store.commit(self._commit, state, self._clock())
        to_deliver = bool(self._commit.messages)
        self._snapshot = state
        self._committed = dict(self._cursors)
        self._commit = Commit()
        self._last_commit = time.monotonic()
        self._metrics.snapshot_seconds.observe(time.perf_counter() - began)
        self._metrics.snapshot_bytes.set(len(state))
        self._metrics.snapshot_time.set(self._clock())
        if to_deliver:
            self._wake()

    def _set_aside(self, item: Read | Received | Tick) -> None:
        self._metrics.core_failures.inc()
        if isinstance(item, Read):
            key = (item.start.start_id, item.rank)
            self._aside.add(key)
            self._log.exception(
                "the core cannot take this stream: it is set aside until the next start",
                run=item.start.run,
                start_id=item.start.start_id,
                rank=item.rank,
            )
        else:
            self._log.exception("the core cannot take this input: it is skipped", input=type(item).__name__)
        self._state = self._core.load(self._snapshot, self._settings, self._pack)
        self._cursors = dict(self._committed)
        lost = [(identity, value) for identity, value, _ in self._commit.applied if identity is not None]
        self._commit = Commit()
        self._marked = {key: cursor.seq for key, cursor in self._cursors.items()}
        self._gates.clear()
        self._positions.rewind(sorted(self._cursors.values(), key=lambda cursor: cursor.turn))
        if isinstance(item, Received):
            self._commit.applied.append((item.identity, item.value, {}))  # it must not come back after a restart
        for identity, value in lost:
            self._take(Received(identity, value))
