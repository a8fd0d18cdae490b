"""Files as they are named on a command line: paths, globs, standard input, gzip; with a say in how far reading has come."""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_PIECE = 1024 * 1024
_MAGIC = b"\x1f\x8b"


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


def open_file(path: Path, told: Callable[[int], None] = ignore) -> IO[bytes]:
    """Open a file for reading, through gzip where it is one, whatever its name."""
    opened = path.open("rb", buffering=0)
    magic = opened.read(2)
    opened.seek(0)
    counted = io.BufferedReader(_Counted(opened, told), _PIECE)
    return gzip.GzipFile(fileobj=counted) if magic == _MAGIC else counted  # type: ignore[return-value]


def read_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, unpacked; of a damaged gzip what can be unpacked.

    Raises:
        ReplayError: the file cannot be read.
    """
    data = b""
    try:
        with open_file(path) as file:
            while len(data) < size and (piece := file.read1(size - len(data))):  # type: ignore[attr-defined]
                data += piece
    except (EOFError, zlib.error):
        pass
    except OSError as error:
        if not data:
            raise ReplayError(f"{path}: cannot be read: {error.strerror or error}") from None
    return data


def read_lines(
    path: Path, told: Callable[[int], None] = ignore, cut: Callable[[], None] | None = None
) -> Iterator[bytes]:
    """Yield a file's lines with their ends. ``cut`` is called where a gzip ends too early or is damaged: all before it is whole.

    Raises:
        ReplayError: the file cannot be read.
    """
    try:
        with open_file(path, told) as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile):
        if cut is not None:
            cut()
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror or error}") from None


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
