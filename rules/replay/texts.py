"""What readers of text logs share: lines without colours, numbers, and the time that a line begins with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime

from .rows import STEP, TIME, Notices, Row, lines_within

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_TIME = re.compile(rb"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
#: A number as programs print it; thousands may be set off by commas.
NUMBER = rb"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"


def plain(line: bytes) -> bytes:
    """Return a line without its colours and its end."""
    return (_ANSI.sub(b"", line) if b"\x1b" in line else line).rstrip(b"\r\n")


def value_of(text: bytes) -> float | None:
    """Return the number that a text is, or None."""
    try:
        return float(text.replace(b",", b""))
    except ValueError:
        return None


def time_of(line: bytes) -> float | None:
    """Return the first date and time in a line as Unix seconds, taken as UTC: only differences count."""
    found = _TIME.search(line)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    fraction = found[7]
    return moment.timestamp() + (float(b"0." + fraction) if fraction else 0.0)


def share_of(head: Iterable[bytes], is_line: Callable[[bytes], object]) -> int:
    """Return how many of the first lines are of a kind; counting stops at ten."""
    count = 0
    for line in head:
        if is_line(plain(line)):
            count += 1
            if count == 10:
                break
    return count


class TextLog:
    """Reads a text log line by line. ``parse`` gives the numbers of a line by name, or None for a line of no interest.

    A last line without a line end may lack digits: it is left out.
    """

    def __init__(self, notices: Notices, parse: Callable[[bytes], Mapping[str, float] | None]) -> None:
        self._notices = notices
        self._parse = parse
        self._line = 0

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of consecutive lines."""
        for line in lines_within(lines):
            self._line += 1
            text = plain(line)
            values = self._parse(text)
            if values is None:
                continue
            if not line.endswith((b"\n", b"\r")):
                self._notices.add("torn", f"Line {self._line}, the last, has no line end: it was left out.")
                continue
            time = time_of(text)
            found = dict(values)
            if time is not None:
                found.setdefault(TIME, time)
            yield Row(found, self._line)

    def end(self) -> None:
        """Nothing is known only at the end."""


__all__ = ["NUMBER", "STEP", "TIME", "TextLog", "plain", "share_of", "time_of", "value_of"]
