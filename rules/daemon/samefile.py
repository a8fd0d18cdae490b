"""Whether the database still lies where it was opened: SQLite writes on into a file that was deleted, and says nothing."""

from __future__ import annotations

from pathlib import Path

from trainwarden.rules.store import StoreError


class SameFile:
    """A file as it is now, by device and inode."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = _identity(path)

    def check(self) -> None:
        """Look whether the file is still the same.

        Raises:
            StoreError: it was deleted, moved away or replaced.
        """
        if self._identity is None or _identity(self._path) != self._identity:
            raise StoreError(
                f"{self._path}: was deleted, moved or replaced under the running daemon; move it back, or restart the"
                " daemon to begin with what lies there"
            )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
