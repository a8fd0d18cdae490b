"""When a crashed trainer may be started again: back-off, limit, and what counts as progress. Reads journals, starts nothing."""

from __future__ import annotations

import msgspec

from trainwarden.record import Event, RecordError, decode_line, purpose_of
from trainwarden.runfolder import RunFolder

#: Pauses before restart 1, 2, 3 … in seconds: doubling from one second to one minute.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
#: An attempt that ran this long made progress, whether or not it reports checkpoints, in seconds.
LONG_RUN = 600.0


def pause_before(restart: int) -> float:
    """Return the seconds to wait before the ``restart``-th restart in a row (from 1)."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (restart - 1))


def made_progress(run: RunFolder, attempt: int, seconds: float) -> bool:
    """Say whether an attempt got further: it completed a checkpoint, or ran for ten minutes."""
    return seconds >= LONG_RUN or completed_checkpoint(run, attempt)


def completed_checkpoint(run: RunFolder, attempt: int) -> bool:
    """Say whether a journal of the attempt reports a complete checkpoint."""
    for path in sorted((run.path / f"attempt-{attempt}").glob("*/rank-*/*.ndjson")):
        try:
            with path.open("rb") as file:
                for line in file:
                    if b'"checkpoint"' in line and _complete(line):
                        return True
        except OSError:
            continue
    return False


def _complete(line: bytes) -> bool:
    try:
        event = decode_line(line)
    except (RecordError, msgspec.DecodeError):
        return False  # a torn last line
    if not isinstance(event, Event) or event.kind != "checkpoint" or event.fields.get("quarantined") is True:
        return False  # a damaged state, kept for whoever looks into it, is no progress
    if purpose_of(event) == "forensic":
        return False
    return event.fields.get("complete") is True
