"""``trainer_state.json`` of Hugging Face's Trainer: one JSON document whose ``log_history`` lists what was logged; or such a list alone.

Written whole at each checkpoint, so it is read whole. Of a torn one, the entries before the tear are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from trainwarden.rules.replay.objects import numbers_of
from trainwarden.rules.replay.rows import Notices, Reader, Row

#: The file is replaced, not appended to.
WHOLE = True

_KEY = b'"log_history"'
_LIST = re.compile(rb"\[\s*\{\s*\"")
#: The entry that ``train()`` adds at its end: means over the whole training, no step's.
_SUMMARY = ("train_runtime", "total_flos")


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    text = b"".join(head).lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"{") and _KEY in text:
        return 0.95
    return 0.75 if _LIST.match(text) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader of one file."""
    return TrainerState(notices)


class TrainerState:
    """Reads the whole document."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of the log history."""
        text = b"".join(lines).decode("utf-8-sig", "replace")
        for entry in self._entries(text):
            if any(key in entry for key in _SUMMARY):
                continue
            values = numbers_of(entry)
            if values:
                yield Row(values)

    def end(self) -> None:
        """Nothing is known only at the end."""

    def _entries(self, text: str) -> Iterator[dict[str, Any]]:
        try:
            found = json.loads(text)
            history = (
                found.get("log_history") if isinstance(found, dict) else found if isinstance(found, list) else None
            )
            yield from (entry for entry in history or [] if isinstance(entry, dict))
        except (ValueError, RecursionError):
            self._notices.add("torn", "The file ends in the middle of its JSON: the log entries before are read.")
            yield from _whole_entries(text)


def _whole_entries(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    place = text.find("[", max(0, text.find('"log_history"')))
    while place >= 0:
        place = text.find("{", place + 1)
        if place < 0:
            return
        try:
            entry, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return
        yield entry
        if text[place:].lstrip()[:1] != ",":
            return
