"""The live driver: the one thread that owns the core's state.

It takes inputs off the queue, feeds the core, keeps the effects, and writes cursors, state and effects in one
transaction: every few seconds, and at once when there is something to deliver. Only then are delivery threads woken.
Of thousands of runs not all are written each time: those with effects are, and of those that merely went on the ones
whose turn it is. A run that was not written keeps its old cursors too: after a crash its records since are read again.

If the core raises, what it did since the last transaction cannot be trusted. The driver goes back to that transaction
and has the records since read again, without the stream that brought the fault: that one is set aside, said once and
counted, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import structlog

from trainwarden.rules.annotations import annotated
from trainwarden.rules.core.effects import Deliver, Effect, Query, Save
from trainwarden.rules.core.feed import dump, feed, load, new_state
from trainwarden.rules.core.inputs import Happened, Input, Observation, SourceSeen, Steps, Tick
from trainwarden.rules.core.sightings import answer as remembered
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.daemon.information import Information
from trainwarden.rules.daemon.samefile import SameFile
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions
from trainwarden.rules.store import Commit, Cursor, Journalled, SavedRow, Store, StoreError, advance_of


class Core(NamedTuple):
    """The four functions of the pure core that a driver needs."""

    feed: Callable[[Any, Input], list[Effect]]
    new_state: Callable[[Any, Any], Any]
    dump: Callable[[Any, Iterable[str]], dict[str, bytes]]
    load: Callable[[Mapping[str, bytes], Any, Any], Any]


CORE = Core(feed, new_state, dump, load)

#: Runs without effects that a transaction writes: so many at least, and more within these bytes a second.
LEAST_RUNS = 8
BYTES_PER_SECOND = 2 * 1024 * 1024


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
        self._information = Information()
        self._file = SameFile(store.path)
        self._state: Any = None
        self._cursors: dict[tuple[str, int], Cursor] = {}
        self._committed: dict[tuple[str, int], Cursor] = {}
        self._marked: dict[tuple[str, int], int] = {}
        self._gates: dict[tuple[str, int], tuple[bool, ...]] = {}
        self._aside: set[tuple[str, int]] = set()
        #: Cursors that moved since their run was last written, by run; the run that waits longest comes first.
        self._moved: dict[str, dict[tuple[str, int], Cursor]] = {}
        self._urgent: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._commit = Commit()
        self._last_commit = 0.0
        self._stuck = False
        #: Whether the last transaction, at the end, could not be written.
        self.unwritten = False
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
        if not found:
            self._state = self._core.new_state(self._settings, self._pack)
        else:
            try:
                self._state = self._core.load(found, self._settings, self._pack)
            except ValueError as error:
                raise StoreError(f"{self._store.path}: the snapshot in it cannot be used: {error}") from None
        self._sizes = {name: len(part) for name, part in found.items()}
        self._committed = {(cursor.start.start_id, cursor.rank): cursor for cursor in self._store.cursors()}
        self._cursors = dict(self._committed)
        self._marked = {key: cursor.seq for key, cursor in self._cursors.items()}
        self._last_commit = time.monotonic()
        waiting = self._store.waiting_inputs()
        if found:
            self._log.info("going on from the last snapshot", streams=len(self._cursors), waiting_inputs=len(waiting))
        for identity, value in waiting:
            self._take(Received(identity, value))
        self._write(every=True)

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
            self._write_last()
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
        if key in self._aside:
            return
        if read.after != at:
            self._positions.correct(read.start, read.rank, at)
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
                    self._urgent.add(read.start.run_uid)
                    self._journal(None, value)
        if read.upto > read.after:
            self._cursors[key] = Cursor(read.start, read.rank, read.upto)
            self._moved.setdefault(read.start.run_uid, {})[key] = self._cursors[key]

    def _feed(self, value: Input) -> None:
        for plain in self._core.feed(self._state, value):
            effect = annotated(plain, self._pack)
            if isinstance(effect, Save):
                self._commit.rows[effect.kind, effect.key] = SavedRow(effect.kind, effect.key, effect.row)
                self._urgent.add(effect.row.get("run_uid", ""))
                if effect.kind == "incident":
                    self._information.see(effect.row)
            elif isinstance(effect, Deliver):
                self._commit.messages.append((effect, self._destinations(effect)))
                self._urgent.add(effect.run_uid)
            else:
                if isinstance(value, Steps | Happened | SourceSeen):
                    self._urgent.add(value.start.run_uid)
                answer = remembered(effect, self._clock())
                if answer is None:
                    answer = self._query(effect)
                else:
                    self._urgent.add(effect.arguments["run_uid"])
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
        anything = self._commit or self._moved
        return bool(self._commit.messages) or age >= (self._interval if anything else max(60.0, self._interval))

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

    def _write_last(self) -> None:
        try:
            self._write(every=True)
        except StoreError as error:
            self.unwritten = True
            self._log.error(
                "the last transaction cannot be written; the next start reads again what came since the one before",
                error=str(error),
            )

    def _write(self, *, every: bool = False) -> None:
        began = time.perf_counter()
        runs = self._urgent | set(self._moved) if every else self._turn()
        parts = self._core.dump(self._state, runs)
        moved = [self._moved.get(run_uid, {}) for run_uid in runs]
        self._commit.cursors = {key: cursor for one in moved for key, cursor in one.items()}
        self._file.check()
        self._store.commit(self._commit, parts, self._clock())
        to_deliver = bool(self._commit.messages)
        self._committed.update(self._commit.cursors)
        for run_uid in runs:
            self._moved.pop(run_uid, None)
        self._sizes.update((name, len(part)) for name, part in parts.items())
        self._urgent.clear()
        self._commit = Commit()
        self._last_commit = time.monotonic()
        self._metrics.snapshot_seconds.observe(time.perf_counter() - began)
        self._metrics.snapshot_bytes.set(sum(self._sizes.values()))
        self._metrics.snapshot_time.set(self._clock())
        if to_deliver:
            self._wake()

    def _turn(self) -> set[str]:
        """Return the runs to be written now: those with effects, and the ones that wait longest within what may be written."""
        runs = set(self._urgent)
        left = BYTES_PER_SECOND * (time.monotonic() - self._last_commit)
        for count, run_uid in enumerate(self._moved):
            left -= self._sizes.get(run_uid, 0)
            if count >= LEAST_RUNS and left < 0:
                break
            runs.add(run_uid)
        return runs

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
        self._state = self._core.load(self._store.snapshot(), self._settings, self._pack)
        self._cursors = dict(self._committed)
        self._moved.clear()
        self._urgent.clear()
        lost = [(identity, value) for identity, value, _ in self._commit.applied if identity is not None]
        self._commit = Commit()
        self._marked = {key: cursor.seq for key, cursor in self._cursors.items()}
        self._gates.clear()
        self._positions.rewind(sorted(self._cursors.values(), key=lambda cursor: cursor.turn))
        if isinstance(item, Received):
            self._commit.applied.append((item.identity, item.value, {}))  # it must not come back after a restart
        for identity, value in lost:
            self._take(Received(identity, value))
