"""JSON lines: one object a line, as many training scripts and ``wandb`` histories write them.

Nested objects become names with slashes (``train/loss``). Bare ``NaN`` and ``Infinity``, which some writers use, are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from trainwarden.rules.replay.rows import Notices, Reader, Row

_WORDS = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
_DEEPEST = 8


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    lines = [line for line in head[:50] if line.strip()]
    if not lines or not lines[0].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return 0.0
    found = [object_of(line) for line in lines[:-1] or lines]
    good = sum(one is not None and bool(numbers_of(one)) for one in found)
    return 0.8 if good > len(found) / 2 else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return JsonLines(notices)


class JsonLines:
    """Reads objects line by line."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._line = 0

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of consecutive lines."""
        for line in lines:
            self._line += 1
            if not line.strip():
                continue
            found = object_of(line)
            if found is None:
                self._notices.add("torn", f"Line {self._line} is no JSON object: it was left out.")
            else:
                values = numbers_of(found)
                if values:
                    yield Row(values, self._line)

    def end(self) -> None:
        """Nothing is known only at the end."""


def object_of(line: bytes) -> dict[str, Any] | None:
    """Return the object that a line is, or None."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        try:
            found = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def numbers_of(given: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an object by their names, those of inner ones with slashes."""
    values: dict[str, float] = {}
    for name, value in given.items():
        if isinstance(value, int | float):
            try:
                values[name] = float(value)
            except OverflowError:
                continue
        elif isinstance(value, str):
            if value.lower() in _WORDS:
                values[name] = float(value)
        elif isinstance(value, dict):
            _inner(values, name, value, 1)
    return values


def _inner(values: dict[str, float], prefix: str, given: dict[str, Any], depth: int) -> None:
    for name, value in given.items():
        if isinstance(value, dict):
            if depth < _DEEPEST:
                _inner(values, f"{prefix}/{name}", value, depth + 1)
        else:
            for _, number in numbers_of({name: value}).items():
                values[f"{prefix}/{name}"] = number
