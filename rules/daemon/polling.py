"""Polling: which exporters there are now, and a small pool of threads that pulls each of them in turn.

One poll of a source at a time; one that is behind is polled again at once, one that cannot be reached less often. New
sources are all looked at before the first of them is read, so that the core knows which ranks are catching up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from trainwarden.rules.config import Config
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.sources.exporter import ExporterSource, Outcome
from trainwarden.rules.sources.folder import Target, find_targets
from trainwarden.rules.sources.journal import JournalRest
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions

#: Longest pause between two polls of a source that cannot be reached, in seconds.
LONGEST_PAUSE = 5.0


class _Polled:
    """A source with when it may be polled next."""

    def __init__(self, source: ExporterSource) -> None:
        self.source = source
        self.running = False
        self.failures = 0
        self.due = 0.0
        self.outcome: Outcome | None = None
        self.leaving = False


class Polling:
    """Pulls the sources of a configuration. :meth:`round` is called by a timer and only enqueues."""

    def __init__(self, config: Config, positions: Positions, put: Callable[[Read], bool], metrics: Metrics) -> None:
        self._config = config
        self._positions = positions
        self._put = put
        self._metrics = metrics
        self._log = structlog.get_logger("polling")
        self._pool = ThreadPoolExecutor(config.poll_threads, thread_name_prefix="poll")
        self._lock = threading.Lock()
        self._polled: dict[str, _Polled] = {}
        self._scanning = False
        self._stopping = False
        self._problems: set[str] = set()
        #: Set once every source that there was at the start has been polled.
        self.first_round = threading.Event()
        metrics.watch_by("sources", "Sources by the end of their last poll.", "state", _STATES, self.states)

    def round(self) -> None:
        """Enqueue a look at which targets there are, and the polls that are due."""
        with self._lock:
            if self._scanning or self._stopping:
                return
            self._scanning = True
        self._pool.submit(self._scan)

    def stop(self) -> None:
        """Start no more polls and wait for the running ones; close the inbox before, or they may wait for it."""
        with self._lock:
            self._stopping = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for polled in self._polled.values():
            polled.source.close()

    def states(self) -> dict[str, int]:
        """Return how many sources there are in each condition."""
        with self._lock:
            counts = dict.fromkeys(_STATES, 0)
            for polled in self._polled.values():
                counts[polled.outcome or "unseen"] += 1
        return counts

    def _scan(self) -> None:
        try:
            targets, problems = find_targets(self._config.sources, self._config.path("."))
            for problem in problems:
                if problem not in self._problems:
                    self._log.warning("a target file cannot be used", problem=problem)
            self._problems = set(problems)
            new = self._adopt(targets)
            first = self._submit_due(besides=new)
            if new:
                wait([self._pool_or_here(polled.source.look) for polled in new])
                first += self._submit_due()
            if not self.first_round.is_set():
                threading.Thread(target=self._await_first, args=(first,), daemon=True).start()
        except Exception:
            self._log.exception("looking for targets failed")
        finally:
            with self._lock:
                self._scanning = False

    def _await_first(self, first: list[Future[None]]) -> None:
        wait(first)
        self.first_round.set()

    def _pool_or_here(self, call: Callable[[], None]) -> Future[None]:
        """Run a look on the pool; with a single thread, which is this one, run it here."""
        if self._config.poll_threads > 1:
            return self._pool.submit(call)
        done: Future[None] = Future()
        call()
        done.set_result(None)
        return done

    def _adopt(self, targets: list[Target]) -> list[_Polled]:
        """Take in new targets; those that are gone are polled once more, then left."""
        wanted = {target.address: target for target in targets}
        new = []
        with self._lock:
            for address, polled in list(self._polled.items()):
                polled.leaving = wanted.get(address) != polled.source.target
                if polled.leaving:
                    polled.due = 0.0
                    self._positions.leave(address)  # whoever serves the run now need not wait
            for address, target in wanted.items():
                if address not in self._polled:
                    polled = _Polled(
                        ExporterSource(target, self._config.limits, self._positions, self._put, self._metrics)
                    )
                    self._polled[address] = polled
                    new.append(polled)
        return new

    def _submit_due(self, besides: list[_Polled] | None = None) -> list[Future[None]]:
        now = time.monotonic()
        with self._lock:
            due = [polled for polled in self._polled.values() if not polled.running and polled.due <= now]
        submitted = [self._submit(polled) for polled in due if polled not in (besides or [])]
        return [future for future in submitted if future is not None]

    def _submit(self, polled: _Polled) -> Future[None] | None:
        with self._lock:
            if self._stopping or polled.running:
                return None
            polled.running = True
        return self._pool.submit(self._poll, polled)

    def _poll(self, polled: _Polled) -> None:
        try:
            outcome: Outcome = polled.source.poll(leaving=polled.leaving)
        except Exception:
            self._log.exception("a poll failed; this is a fault of its own", source=polled.source.target.address)
            outcome = "unusable"
        self._metrics.polls.labels(outcome).inc()
        with self._lock:
            polled.running = False
            polled.outcome = outcome
            polled.failures = 0 if outcome in ("ok", "behind") else polled.failures + 1
            interval = float(self._config.poll_interval)
            pause = interval * 2.0 ** min(polled.failures - 1, 10) if polled.failures else 0.0
            polled.due = time.monotonic() + min(pause, max(interval, LONGEST_PAUSE))
            left = polled.leaving and outcome != "behind"
            if left:
                self._polled.pop(polled.source.target.address, None)
        if left:
            self._leave(polled.source)
        elif outcome == "behind":
            self._submit(polled)

    def _leave(self, source: ExporterSource) -> None:
        """Read what a run left behind on this disk, since its exporter cannot be asked any more."""
        source.close()
        if source.target.run_folder is not None and source.reading is not None:
            JournalRest(source.target.run_folder, self._positions, self._put, self._metrics).read(*source.reading)


_STATES = ("ok", "behind", "unreachable", "denied", "not_started", "unusable", "taken", "unseen")
