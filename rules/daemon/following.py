"""Following: one thread that looks at the log files that were named, and at what globs match by now, every so often."""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from trainwarden.rules.sources.follow import FollowedFile
from trainwarden.rules.sources.lines import Counts, Read
from trainwarden.rules.sources.positions import Positions

#: Longest time between two looks, in seconds: a file is cheap to look at.
LONGEST_INTERVAL = 1.0


class Follow(msgspec.Struct, frozen=True):
    """What is followed: files and globs, their format, and signals by the names of their columns."""

    names: list[str] = []
    format: str = "auto"
    maps: dict[str, str] = {}


class Following:
    """Reads followed files from :meth:`start` to :meth:`stop`."""

    def __init__(
        self, follow: Follow, positions: Positions, put: Callable[[Read], bool], counts: Counts, interval: float
    ) -> None:
        self._follow = follow
        self._positions = positions
        self._put = put
        self._counts = counts
        self._interval = min(interval, LONGEST_INTERVAL)
        self._log = structlog.get_logger("following")
        self._files: dict[Path, FollowedFile] = {}
        self._folders: set[Path] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def start(self) -> None:
        """Begin, if there is anything to follow."""
        if self._follow.names:
            self._thread.start()

    def stop(self) -> None:
        """End; close the inbox before, or the thread may wait for it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for file in self._files.values():
            file.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for path in self._paths():
                if path not in self._files:
                    self._log.info("following", file=str(path))
                    self._files[path] = FollowedFile(
                        path,
                        self._positions,
                        self._put,
                        self._counts,
                        format=self._follow.format,
                        maps=self._follow.maps,
                    )
            for path, file in self._files.items():
                try:
                    if not file.poll():
                        return
                except Exception:
                    self._log.exception("following failed; this is a fault of its own", file=str(path))
            self._stopped.wait(self._interval)

    def _paths(self) -> list[Path]:
        """Return the files there are to follow now."""
        found: dict[Path, None] = {}
        for name in self._follow.names:
            matched = [Path(name)] if Path(name).exists() else [Path(one) for one in sorted(glob.glob(name))]  # noqa: PTH207
            if not matched and not glob.has_magic(name):
                matched = [Path(name)]  # it may come yet
            for path in matched:
                if not path.is_dir():
                    found[path.absolute()] = None
                elif path not in self._folders:
                    self._folders.add(path)
                    self._log.warning("a folder cannot be followed: name its files, or a glob", folder=str(path))
        return list(found)
