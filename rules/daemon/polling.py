"""Polling: which exporters there are now, and a small pool of threads that pulls each of them in turn.

One poll of a source at a time; one that is behind is polled again at once, one that cannot be reached less often. New
sources are all looked at before the first of them is read, so that the core knows which ranks are catching up.

Where runs lie on this disk, what they wrote while nobody could ask them is read from their journals, before their exporters
are polled: at the start, when a source goes, and now and then while a run has no exporter that answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import structlog

from trainwarden.rules.config import Config
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.sources.exporter import ExporterSource, Outcome
from trainwarden.rules.sources.folder import Target, find_run_folders, find_targets
from trainwarden.rules.sources.journal import Journals, Stream
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions

#: Longest pause between two polls of a source that cannot be reached, in seconds.
LONGEST_PAUSE = 5.0
#: Pauses between two looks into the folder of a run that no exporter serves, in seconds; they double while nothing is new.
FOLDER_PAUSE = 5.0
LONGEST_FOLDER_PAUSE = 300.0


class _Polled:
    """A source with when it may be polled next."""

    def __init__(self, source: ExporterSource) -> None:
        self.source = source
        self.running = False
        self.failures = 0
        self.due = 0.0
        self.outcome: Outcome | None = None
        self.leaving = False


class _Folder:
    """The folder of a run, with when its journals are looked at next."""

    def __init__(self, journals: Journals) -> None:
        self.journals = journals
        self.reading = False
        self.pause = FOLDER_PAUSE
        self.due = 0.0


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
        self._folders: dict[Path, _Folder] = {}
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
            reading = self._read_journals(targets)
            # A source whose run is being read from the disk waits for that: it goes on from there.
            waits = {target.address for target in targets if self._is_read(target)}
            new = self._adopt([target for target in targets if target.address not in waits or self._has(target)])
            first = self._submit_due(besides=new) + reading
            if new:
                wait([self._pool_or_here(polled.source.look) for polled in new])
                first += self._submit_due()
            if not self.first_round.is_set() and not waits:
                threading.Thread(target=self._await_first, args=(first,), daemon=True).start()
        except Exception:
            self._log.exception("looking for targets failed")
        finally:
            with self._lock:
                self._scanning = False

    def _read_journals(self, targets: list[Target]) -> list[Future[None]]:
        """Enqueue the reading of the journals that are due and hold something new."""
        now = time.monotonic()
        served: dict[Path, list[str]] = {}
        for target in targets:
            if target.run_folder is not None:
                served.setdefault(target.run_folder, []).append(target.address)
        submitted = []
        for path, token_file in find_run_folders(self._config.sources, self._config.path(".")).items():
            folder = self._folders.get(path)
            if folder is None:
                journals = Journals(path, token_file, self._positions, self._put, self._metrics)
                folder = self._folders[path] = _Folder(journals)
            if folder.reading or now < folder.due:
                continue
            with self._lock:
                polled = [self._polled.get(address) for address in served.get(path, ())]
            answering = [one for one in polled if one is None or one.outcome != "unreachable"]
            live: frozenset[int] | None = frozenset()
            for one in answering:
                reading = None if one is None else one.source.reading
                live = None if live is None or reading is None else live | {reading[1]}
            starts = folder.journals.unread(live)
            folder.pause = FOLDER_PAUSE if starts else min(2 * folder.pause, LONGEST_FOLDER_PAUSE)
            folder.due = now + folder.pause
            if starts and self._begin(path, folder):
                submitted.append(self._pool.submit(self._read_folder, folder, starts))
        return submitted

    def _begin(self, path: Path, folder: _Folder) -> bool:
        """Say whether a folder may be read now: nobody polls its run at this moment, nor will until it is read."""
        with self._lock:
            polls = any(one.running and one.source.target.run_folder == path for one in self._polled.values())
            folder.reading = not polls and not self._stopping
            if polls:
                folder.due = 0.0
            return folder.reading

    def _read_folder(self, folder: _Folder, starts: list[list[Stream]]) -> None:
        try:
            folder.journals.read(starts)
        except Exception:
            self._log.exception("reading journals failed; this is a fault of its own")
        finally:
            folder.reading = False

    def _is_read(self, target: Target) -> bool:
        folder = None if target.run_folder is None else self._folders.get(target.run_folder)
        return folder is not None and folder.reading

    def _has(self, target: Target) -> bool:
        with self._lock:
            return target.address in self._polled

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
            if self._stopping or polled.running or self._is_read(polled.source.target):
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
        """Have what a run left behind on this disk read at the next look, since its exporter cannot be asked any more."""
        source.close()
        folder = None if source.target.run_folder is None else self._folders.get(source.target.run_folder)
        if folder is not None:
            folder.pause, folder.due = FOLDER_PAUSE, 0.0


_STATES = ("ok", "behind", "unreachable", "denied", "not_started", "unusable", "taken", "unseen")
