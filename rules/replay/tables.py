"""Tables as text: one header line, then cells between commas, semicolons or tabs; point as the decimal mark.

A blank cell was not logged. A line with too few or too many cells is torn and left out; so is the last cell of a last line
without a line end, since digits may be missing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator

from .columns import told_by
from .rows import Notices, Row, lines_within, number

_BOM = b"\xef\xbb\xbf"
_DECIMAL_COMMA = re.compile(rb"\s*[-+]?\d+,\d+(?:[eE][-+]?\d+)?\s*")


class Table:
    """Reads the lines of one table in turn.

    ``rename`` gives each column the name that its values go by, or an empty one to leave it out. ``sparse`` says that blank cells
    are this format's way and nothing to speak of.
    """

    def __init__(
        self, notices: Notices, rename: Callable[[list[str]], list[str]] = lambda names: names, *, sparse: bool = False
    ) -> None:
        self._notices = notices
        self._rename = rename
        self._sparse = sparse
        self._separator = b","
        self._width = 0
        self._remark = b""
        self._names: set[bytes] = set()
        self._columns: list[tuple[int, str]] = []
        self._header = b""
        self._line = 0
        self._blank: dict[str, tuple[int, int]] = {}
        self._wrong: dict[str, tuple[int, bytes]] = {}
        self._numeric: set[str] = set()

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of consecutive lines."""
        for line in lines_within(lines):
            self._line += 1
            text = line.rstrip(b"\r\n")
            if not text.strip():
                continue
            if not self._width:
                text = text.removeprefix(_BOM)
                if text.lstrip().startswith(b"#"):
                    self._remark = text.lstrip().lstrip(b"# \t")
                elif self._remark and any(map(_is_number, cells_of(text, separator_of(text)))):
                    self._begin(self._remark)  # the names stood in a remark
                    row = self._row(text, torn=not line.endswith(b"\n"))
                    if row is not None:
                        yield row
                else:
                    self._begin(text)
            elif text != self._header and not self._begins_anew(
                text
            ):  # else a writer that was restarted wrote it again
                row = self._row(text, torn=not line.endswith(b"\n"))
                if row is not None:
                    yield row

    def end(self) -> None:
        """Say which columns had blank cells or cells that are no numbers."""
        for name, (line, count) in self._blank.items():
            if name in self._numeric and not self._sparse:
                says = f"{name} is blank in {count:,} rows, first in line {line}: not logged there."
                self._notices.add("blank", says, signal=name)
        for name, (line, cell) in self._wrong.items():
            text = cell.decode(errors="replace")[:40]
            comma = _DECIMAL_COMMA.fullmatch(cell)
            if name in self._numeric or comma:
                hint = " Numbers need a point as the decimal mark." if comma else ""
                says = f"Line {line}: {name}: {text!r} is no number and was left out.{hint}"
                self._notices.add("unreadable", says, signal=name)

    def _begins_anew(self, text: bytes) -> bool:
        """Take a header with other columns, as a writer that was changed writes it in the middle of its file."""
        if text[-1:].isdigit():
            return False
        cells = cells_of(text, self._separator)
        if not set(cells) & self._names or any(map(_is_number, cells)):
            return False
        says = f"Line {self._line} is a header of its own: from there on its {len(cells)} columns count."
        self._notices.add("columns", says)
        self._columns = []
        self._begin(text)
        return True

    def _begin(self, text: bytes) -> None:
        self._header = text
        self._separator = separator_of(text)
        names = names_of(text)
        self._names = {cell for cell in cells_of(text, self._separator) if cell.strip()}
        self._width = len(names)
        for place, name in enumerate(self._rename(names)):
            if not name:
                continue
            if any(name == other for _, other in self._columns):
                says = f"Two columns are named {name}: the first one is read."
                self._notices.add("duplicate_column", says, signal=name)
            else:
                self._columns.append((place, name))

    def _row(self, text: bytes, *, torn: bool) -> Row | None:
        cells = cells_of(text, self._separator) if b'"' in text else text.split(self._separator)
        if torn:
            self._notices.add("torn", f"Line {self._line}, the last, has no line end: its last cell was left out.")
            cells[-1] = b""
        elif len(cells) != self._width:
            says = f"Line {self._line} has {len(cells)} cells, the header {self._width}: it was left out."
            self._notices.add("torn", says)
            return None
        values: dict[str, float] = {}
        for place, name in self._columns:
            if place >= len(cells):
                break
            cell = cells[place]
            if cell:
                try:
                    values[name] = float(cell)
                    continue
                except ValueError:
                    pass
                try:
                    found = number(cell)
                except ValueError:
                    found = told_by(name, cell)
                    if found is None:
                        self._wrong.setdefault(name, (self._line, cell))
                        continue
                if found is not None:
                    values[name] = found
                    continue
            if not torn:
                line, count = self._blank.get(name, (self._line, 0))
                self._blank[name] = (line, count + 1)
        if len(self._numeric) < len(self._columns):
            self._numeric.update(values)
        return Row(values, self._line) if values else None


def separator_of(header: bytes) -> bytes:
    """Return what is between the cells of a header line."""
    return max((b",", b"\t", b";", b"|"), key=header.count)


def names_of(header: bytes) -> list[str]:
    """Return the names of a header line."""
    header = header.removeprefix(_BOM)
    return [cell.decode(errors="replace").strip() for cell in cells_of(header, separator_of(header))]


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


def looks_like_table(head: list[bytes]) -> list[str] | None:
    """Return the names of the columns if these first lines are a header with rows of numbers, else None."""
    lines = [line for line in head[:50] if line.strip()]
    while len(lines) > 1 and lines[0].removeprefix(_BOM).lstrip().startswith(b"#"):
        following = lines[1].lstrip()
        if any(map(_is_number, cells_of(following, separator_of(following)))):
            lines[0] = lines[0].removeprefix(_BOM).lstrip().lstrip(b"# \t")
            break
        lines.pop(0)
    if not lines or lines[0].lstrip()[:1] in (b"{", b"["):
        return None
    first = lines[0].removeprefix(_BOM)
    separator = separator_of(first)
    names = cells_of(first, separator)
    if any(_is_number(cell) for cell in names) or b"\0" in first:
        return None
    rows = [cells_of(line, separator) for line in lines[1:] if line.endswith(b"\n")] or [
        cells_of(line, separator) for line in lines[1:] if len(cells_of(line, separator)) == len(names)
    ]
    fitting = sum(len(row) == len(names) and any(_is_number(cell) for cell in row) for row in rows)
    return names_of(first) if fitting >= len(rows) / 2 else None


def _is_number(cell: bytes) -> bool:
    try:
        return number(cell) is not None
    except ValueError:
        return False
