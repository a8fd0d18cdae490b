"""Files as they are named on a command line: paths, globs, standard input, gzip; with a say in how far reading has come."""

from __future__ import annotations

import codecs
import glob
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .packed import MAGIC, unpacked

_PIECE = 1024 * 1024
#: Marks before texts of two bytes a character (some shells write them); that of UTF-8 is only taken off.
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_LONGEST_MARK = 3


class ReplayError(ValueError):
    """A recording that cannot be read. The message names file, line and field and says what to do."""


def ignore(read: int) -> None:
    """Take note of bytes read: nobody watches."""


class _Counted(io.RawIOBase):
    """A file that tells how many of its bytes were read."""

    def __init__(self, file: IO[bytes], told: Callable[[int], None]) -> None:
        self._file = file
        self._told = told

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._told(len(data))
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, unpacked and in UTF-8; of a damaged gzip what can be unpacked.

    Raises:
        ReplayError: the file cannot be read, or is a gzip of which nothing can be.
    """
    faults: list[str] = []
    data = b""
    for piece in _pieces(path, ignore, faults.append):
        data += piece or b""
        if len(data) >= size:
            break
    if faults and not data:
        raise ReplayError(f"{path}: the gzip is damaged ({faults[0]}): nothing of it could be read")
    return data[:size]


def read_lines(
    path: Path, told: Callable[[int], None] = ignore, damaged: Callable[[str], None] = lambda what: None
) -> Iterator[bytes]:
    """Yield a file's lines with their ends, in UTF-8. ``damaged`` is called with what is wrong with a gzip that is: all that can be
    unpacked is read. A line that breaks off at damage is left out where others follow it.

    Raises:
        ReplayError: the file cannot be read.
    """
    rest = broken = b""
    for piece in _pieces(path, told, damaged):
        if piece is None:
            rest, broken = b"", rest
            continue
        broken = b""
        end = piece.rfind(b"\n") + 1
        if not end:
            rest += piece
            continue
        yield from io.BytesIO(rest + piece[:end])
        rest = piece[end:]
    if rest or broken:
        yield rest or broken


def is_packed(path: Path) -> bool:
    """Say whether a file is a gzip, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _pieces(path: Path, told: Callable[[int], None], damaged: Callable[[str], None]) -> Iterator[bytes | None]:
    """Yield a file in pieces, unpacked and in UTF-8; None where something is missing between two of them."""
    try:
        with path.open("rb", buffering=0) as opened:
            magic = opened.read(len(MAGIC))
            opened.seek(0)
            with io.BufferedReader(_Counted(opened, told), _PIECE) as counted:
                plain = unpacked(counted, damaged) if magic == MAGIC else iter(lambda: counted.read1(_PIECE), b"")
                yield from _in_utf8(plain)
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror or error}") from None


def _in_utf8(pieces: Iterator[bytes | None]) -> Iterator[bytes | None]:
    """Take off the mark that may stand before a text, and turn a text of two bytes a character into UTF-8."""
    first = next(pieces, None)
    while first is not None and len(first) < _LONGEST_MARK and (more := next(pieces, None)):
        first += more
    encoding = next((name for mark, name in _MARKS if first is not None and first.startswith(mark)), None)
    if first is None or encoding is None:
        if first is not None:
            yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first).encode()
    for piece in pieces:
        yield None if piece is None else decoder.decode(piece).encode()


def matching(name: str) -> list[Path]:
    """Return the files and folders that a name or a glob stands for.

    Raises:
        ReplayError: there is none.
    """
    path = Path(name)
    if path.exists():
        return [path]
    found = [Path(item) for item in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207 (a user's own pattern)
    if not found:
        raise ReplayError(f"{name}: no such file")
    return found
