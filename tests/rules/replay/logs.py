"""Reading a log in tests: its rows through one reader, or its records through all of replay but the rules."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from trainwarden.record import Event, Step
from trainwarden.rules.replay.attempts import Placed
from trainwarden.rules.replay.readers import make_reader, recognise
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.replay.rows import Notices


def rows_of(format: str, data: bytes) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Return rows and notices of a file that must be recognised as ``format``."""
    assert recognise(data, "some.file") == format
    return read_rows(format, data)


def read_rows(format: str, data: bytes) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    notices = Notices()
    reader = make_reader(format, notices)
    found = [row.values for row in reader.read(io.BytesIO(data))]
    reader.end()
    return found, notices.rows()


def placed_of(path: Path, maps: dict[str, str] | None = None) -> tuple[list[Placed], list[dict[str, Any]]]:
    """Return the lines of the one recording of a file, and its notices."""
    (recording,) = find_recordings([str(path)], io.BytesIO(), path.parent, maps=maps)
    found = list(merged(recording))
    return found, recording.notices


def records_of(path: Path, maps: dict[str, str] | None = None) -> list[Step]:
    return [line for _, _, line in placed_of(path, maps)[0] if isinstance(line, Step)]


def events_of(path: Path) -> list[Event]:
    return [line for _, _, line in placed_of(path)[0] if isinstance(line, Event)]
