"""Pages as files: one file for one run, a folder with an index for several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainwarden.rules.core.settings import Settings

from .page import Entry, index_page, run_page
from .recorded import Recorded
from .telling import Reads


class PagesError(ValueError):
    """Pages cannot be written where they were asked for. ``usage``: they were asked for in a way that cannot be."""

    def __init__(self, says: str, *, usage: bool = False) -> None:
        super().__init__(says)
        self.usage = usage


class Pages:
    """Pages of the runs of one replay, each written as soon as it is made: the columns of one run alone are in memory.

    ``to`` is a file where there is one run, and None leaves the page to the caller; for several runs it is a folder. A
    folder that is there takes the page of a single run too. ``reads`` tells the signals that an alert reads, ``settings`` what is
    planned.
    """

    def __init__(
        self, to: Path | None, runs: int, *, reads: Reads | None = None, settings: Settings | None = None
    ) -> None:
        """Make the folder, if there is to be one.

        Raises:
            PagesError: several runs without a folder for them, or it cannot be made.
        """
        self._to = to
        self._reads, self._settings = reads, settings or Settings()
        self._single: str | None = None
        self._entries: list[Entry] = []
        self._names: set[str] = {"index.html"}
        self._folder: Path | None = to if to is not None and (runs > 1 or to.is_dir()) else None
        if runs > 1 and to is None:
            raise PagesError(f"{runs} runs are {runs} pages: give a folder for them with -o", usage=True)
        if self._folder is not None:
            if self._folder.is_file() or (runs > 1 and self._folder.suffix == ".html"):
                raise PagesError(
                    f"{to}: {runs} runs are {runs} pages: give a folder for them with -o, not a file", usage=True
                )
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PagesError(f"{to}: the folder cannot be made: {error.strerror}") from None

    def add(self, report: dict[str, Any], recorded: Recorded) -> None:
        """Make the page of one run, and write it if there is a folder.

        Raises:
            PagesError: it cannot be written.
        """
        if self._folder is None:
            self._single, _ = run_page(report, recorded, reads=self._reads, settings=self._settings)
            return
        page, sketch = run_page(report, recorded, index="index.html", reads=self._reads, settings=self._settings)
        name = self._name(report)
        _write(self._folder / name, page)
        self._entries.append(Entry(name, report, sketch))

    def finish(self) -> tuple[str | None, Path | None]:
        """Return the page of a single run with the file that it belongs into, or write the list and return its path.

        Raises:
            PagesError: the list cannot be written.
        """
        if self._folder is None:
            return self._single, self._to
        path = self._folder / "index.html"
        _write(path, index_page(self._entries))
        return None, path

    def _name(self, report: dict[str, Any]) -> str:
        """Return a file name made from the run's name, of safe characters only, that no page before has."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", str(report.get("run") or "run")).strip("-.")[:80] or "run"
        name, count = f"{stem}.html", 1
        while name.lower() in self._names:
            count += 1
            name = f"{stem}-{count}.html"
        self._names.add(name.lower())
        return name


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PagesError(f"{path}: cannot be written: {error.strerror}") from None
