"""Follows a run from outside while it trains: new lines of its journals, and what the daemon and the receiver answer.

The story on the screen is told from these alone. Nothing here talks to the training process.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwarden.record import Event, Header, RecordError, Step, decode_line
from trainwarden.runfolder import RunFolder

_PATIENCE = 2.0  # seconds for an answer on loopback


class Journals:
    """All journal lines of a run's rank 0, each handed out once, across attempts. A torn last line waits for its end."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._attempts: dict[Path, int] = {}

    def new(self) -> Iterator[tuple[int, Step | Event]]:
        """Yield the lines written since the last call, with their attempt."""
        for path in self._folder.journal_files(rank=0):
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = at + whole
            for text in data[:whole].splitlines():
                try:
                    line = decode_line(text)
                except RecordError:
                    continue
                if isinstance(line, Header):
                    self._attempts[path] = line.attempt
                else:
                    yield self._attempts.get(path, 0), line


def ask(url: str) -> Any | None:
    """Return the JSON that a server on this machine answers, or None where it does not answer or says no."""
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
            return json.load(answer)
    except (OSError, ValueError, urllib.error.URLError):
        return None


def is_up(address: str) -> bool:
    """Say whether a server's ``/-/ready`` answers 200."""
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=_PATIENCE) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


class Daemon:
    """The daemon's incidents."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/incidents"

    def incidents(self) -> list[dict[str, Any]] | None:
        """Return all incidents, oldest first, or None where the daemon does not answer."""
        answer = ask(self._url)
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
            return None
        return sorted(answer["data"], key=lambda row: (row.get("attempt", 0), row.get("opened_step") or 0))


class Receiver:
    """What the receiver says about requests."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/requests"

    def status(self, request_id: str) -> dict[str, Any] | None:
        """Return the state of one request, or None where the receiver does not know it or does not answer."""
        answer = ask(f"{self._url}/{request_id}")
        return answer if isinstance(answer, dict) else None
