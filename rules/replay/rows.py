"""What a reader of logs makes: rows of numbers, and notices about the log itself.

A reader knows one program's way of writing and nothing else. Which column is the loss, where a new start begins and how many
steps a record covers is decided above it, the same for all formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec

#: Names under which text formats, which have no columns, give what every row has.
STEP, TIME = "step", "time"

#: Numbers as texts that mean "not logged".
BLANK = frozenset({b"", b"-", b"--", b"na", b"n/a", b"none", b"null", b"<na>", b"#n/a"})


#: How libraries of C write what is not finite.
_NOT_FINITE = re.compile(rb"([-+]?)(nan|inf|infinity|1\.#qnan|1\.#snan|1\.#ind|1\.#inf)(?:\([a-z0-9]*\)|0+)?")


class Row(msgspec.Struct):
    """The numbers of one moment by the names that the log gives them; what was not logged is not a key.

    NaN and infinities here are values that were logged as such.
    """

    values: dict[str, float]
    line: int = 0


class Notices:
    """What is to be said of a log itself: the first of each kind and signal, with how many more there were."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], dict[str, Any]] = {}
        self._count: dict[tuple[str, str], int] = {}

    def add(self, kind: str, says: str, *, step: int | None = None, signal: str | None = None) -> None:
        """Say something; ``says`` is a whole sentence."""
        key = (kind, signal or "")
        self._count[key] = self._count.get(key, 0) + 1
        if key not in self._first:
            self._first[key] = {"kind": kind, "signal": signal, "step": step, "says": says}

    def count(self, kind: str, signal: str = "") -> int:
        """Return how often this was said."""
        return self._count.get((kind, signal), 0)

    def rows(self) -> list[dict[str, Any]]:
        """Return the notices as objects of the report."""
        found = []
        for key, row in self._first.items():
            more = self._count[key] - 1
            found.append({**row, "says": row["says"] + (f" And {more:,} more like it." if more else "")})
        return found


class Reader(Protocol):
    """A format that is read line by line. It keeps its place: :meth:`read` is called again with the lines that follow."""

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of consecutive lines. A line without its end is the file's torn last one."""

    def end(self) -> None:
        """The file is over: say what only then is known."""


def lines_within(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines, those apart that only a carriage return parts: a progress bar writes over itself, old systems end lines so."""
    for line in lines:
        if b"\r" in line and b"\r" in (body := line.rstrip(b"\r\n")):
            *before, last = body.split(b"\r")
            yield from (part + b"\n" for part in before)
            yield last + (b"\n" if line.endswith((b"\n", b"\r")) else b"")
        else:
            yield line


def number(text: bytes) -> float | None:
    """Return the number that a text is, with the words for NaN and infinities, or None where it means "not logged".

    Raises:
        ValueError: it is neither.
    """
    try:
        return float(text)
    except ValueError:
        word = text.strip().lower()
        if word in BLANK:
            return None
        found = _NOT_FINITE.fullmatch(word)
        if found is None:
            raise
        return float(found[1] + b"inf") if b"inf" in found[2] else float("nan")
