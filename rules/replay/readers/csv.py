"""CSV with one header line: comma, semicolon or tab between the cells, point as the decimal mark.

A blank cell was not logged. A line with too few or too many cells is torn and left out; so is the last cell of a last line
without a line end, since digits may be missing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator

from .reader import Notices, Row, number

_KNOWN = re.compile(rb"step|iter|loss|epoch|grad|lr|norm", re.IGNORECASE)
_BOM = b"\xef\xbb\xbf"
_DECIMAL_COMMA = re.compile(rb"\s*[-+]?\d+,\d+(?:[eE][-+]?\d+)?\s*")


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    lines = [line for line in head if line.strip()]
    if not lines:
        return 0.0
    first = lines[0].removeprefix(_BOM)
    separator = separator_of(first)
    names = cells_of(first, separator)
    if any(_is_number(cell) for cell in names) or first.lstrip()[:1] in (b"{", b"["):
        return 0.0
    known = any(_KNOWN.search(cell) for cell in names)
    if len(names) < 2 and not (known and all(_is_number(line) for line in lines[1:3])):
        return 0.0
    rows = [cells_of(line, separator) for line in lines[1:-1] or lines[1:]]
    fitting = sum(len(row) == len(names) and any(_is_number(cell) for cell in row) for row in rows)
    if rows and fitting < len(rows) / 2:
        return 0.0
    return (0.6 if known else 0.3) if rows or name.lower().removesuffix(".gz").endswith((".csv", ".tsv")) else 0.1


def reader(notices: Notices) -> Csv:
    """Return a reader that begins at a file's first line."""
    return Csv(notices)


class Csv:
    """Reads lines of one CSV file in turn."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._separator = b","
        self._names: list[str] = []
        self._header = b""
        self._line = 0
        self._blank: dict[str, tuple[int, int]] = {}
        self._wrong: dict[str, tuple[int, bytes]] = {}
        self._numeric: set[str] = set()

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of consecutive lines."""
        for line in lines:
            self._line += 1
            text = line.rstrip(b"\r\n")
            if not text.strip():
                continue
            if not self._names:
                self._begin(text)
                continue
            if text == self._header:
                continue  # a writer that was restarted wrote it again
            row = self._row(text, torn=not line.endswith(b"\n"))
            if row is not None:
                yield row

    def end(self) -> None:
        """Say which columns had blank cells or cells that are no numbers."""
        for name, (line, count) in self._blank.items():
            if name in self._numeric:
                says = f"{name} is blank in {count:,} rows, first in line {line}: not logged there."
                self._notices.add("blank", says, signal=name)
        for name, (line, cell) in self._wrong.items():
            text = cell.decode(errors="replace")[:40]
            comma = _DECIMAL_COMMA.fullmatch(cell)
            if name in self._numeric or comma:
                hint = " Numbers need a point as the decimal mark." if comma else ""
                says = f"Line {line}: {name}: {text!r} is no number and was left out.{hint}"
                self._notices.add("unreadable", says, signal=name)

    def _begin(self, text: bytes) -> None:
        self._header = text
        text = text.removeprefix(_BOM)
        self._separator = separator_of(text)
        names = [cell.decode(errors="replace").strip() for cell in cells_of(text, self._separator)]
        for place, name in enumerate(names):
            if name in names[:place]:
                says = f"Two columns are named {name}: the first one is read."
                self._notices.add("duplicate_column", says, signal=name)
                names[place] = ""
        self._names = names

    def _row(self, text: bytes, *, torn: bool) -> Row | None:
        cells = cells_of(text, self._separator) if b'"' in text else text.split(self._separator)
        if torn:
            self._notices.add("torn", f"Line {self._line}, the last, has no line end: its last cell was left out.")
            cells = cells[:-1]
        elif len(cells) != len(self._names):
            says = f"Line {self._line} has {len(cells)} cells, the header {len(self._names)}: it was left out."
            self._notices.add("torn", says)
            return None
        values: dict[str, float] = {}
        for name, cell in zip(self._names, cells, strict=False):
            if cell:
                try:
                    values[name] = float(cell)
                    continue
                except ValueError:
                    pass
                try:
                    found = number(cell)
                except ValueError:
                    self._wrong.setdefault(name, (self._line, cell))
                    continue
                if found is not None:
                    values[name] = found
                    continue
            line, count = self._blank.get(name, (self._line, 0))
            self._blank[name] = (line, count + 1)
        if len(self._numeric) < len(self._names):
            self._numeric.update(values)
        values.pop("", None)
        return Row(values, self._line) if values else None


def separator_of(header: bytes) -> bytes:
    """Return what is between the cells of a header line."""
    return max((b",", b"\t", b";"), key=header.count)


def cells_of(line: bytes, separator: bytes) -> list[bytes]:
    """Return the cells of a line, quotes taken off."""
    line = line.rstrip(b"\r\n")
    if b'"' not in line:
        return line.split(separator)
    text = line.decode("utf-8", "surrogateescape")
    try:
        found = next(csv.reader([text], delimiter=separator.decode()), [])
    except csv.Error:
        return [line]
    return [cell.encode("utf-8", "surrogateescape") for cell in found]


def _is_number(cell: bytes) -> bool:
    try:
        return number(cell) is not None
    except ValueError:
        return False
