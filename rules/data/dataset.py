"""Reads the text of single rows of a data set: files of tokens or lines, or whatever a function of the user's returns.

Files are mapped or read in pieces; no data set is loaded.
"""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from .records import DataError
from .tokenizer import Decode

#: Kinds of files that are read, by the end of their names.
KINDS = (".bin", ".npy", ".jsonl", ".txt")
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
#: What text is called in a line of JSON or in a sample, and what token ids are.
TEXT_NAMES = ("text", "content", "body")
TOKEN_NAMES = ("input_ids", "tokens", "ids", "input", "x")
#: Lines are counted this many bytes at a time.
_PIECE = 1 << 24
#: Beginning of an index of Megatron's (``IndexedDataset``), and its types of tokens by code.
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A row as it is read: its text, or its tokens where nothing decodes them, and where it lies in a file."""

    text: str | None = None
    tokens: list[int] | None = None
    file: str | None = None
    byte: int | None = None
    line: int | None = None


class DataSet(Protocol):
    """Rows of a data set."""

    @property
    def shards(self) -> Sequence[Any] | None:
        """``(name, first_row, end_row)`` of each shard, where the data set says."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> Sample:
        """Return a row.

        Raises:
            DataError: it cannot be read.
        """


def open_dataset(named: str, *, context: int | None, dtype: str, decode: Decode | None) -> DataSet:
    """Open ``module:function`` (or ``module:function:argument``), a file, or a folder of files of one kind.

    ``context``: tokens of a row, for files of tokens without rows; ``dtype`` of those tokens; ``decode`` makes text of tokens.

    Raises:
        DataError: it cannot be opened.
    """
    path = Path(named)
    if not path.exists():
        if ":" in named:
            return _Given(named, call(named), decode)
        raise DataError(f"--dataset {named}: no such file or folder, and no module:function")
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in KINDS)
    kinds = sorted({one.suffix for one in files})
    if len(kinds) != 1 or kinds[0] not in KINDS:
        what = f"files of kind {' and '.join(kinds)}" if len(kinds) > 1 else "nothing that is read"
        raise DataError(f"--dataset {named}: holds {what}; name a file or folder of one of {', '.join(KINDS)}")
    try:
        if kinds[0] in (".jsonl", ".txt"):
            return _Lines(files, is_json=kinds[0] == ".jsonl", decode=decode)
        return _TokenFiles([_tokens_of(one, context, dtype) for one in files], decode)
    except (OSError, ValueError, struct.error) as error:
        raise error if isinstance(error, DataError) else DataError(f"--dataset {named}: {error}") from None


def call(named: str) -> Any:
    """Import ``module:function`` and return what the function returns; it is given ``argument`` of ``module:function:argument``.

    Raises:
        DataError: there is no such function, or it failed.
    """
    found = load(named)
    argument = named.split(":", 2)[2:]
    try:
        return found(*argument)
    except Exception as error:
        raise DataError(f"{named}: {type(error).__name__}: {error}") from None


def load(named: str) -> Callable[..., Any]:
    """Import ``module:function``, also from the current folder.

    Raises:
        DataError: there is no such function, or its module cannot be imported.
    """
    module, _, name = named.partition(":")
    name = name.partition(":")[0]
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise DataError(f"{named}: cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise DataError(f"{named}: is no function")
    function: Callable[..., Any] = found
    return function


class _Given:
    """What a function of the user's returned: ``len()``, ``[row]``, and ``shards`` where it has them."""

    def __init__(self, named: str, dataset: Any, decode: Decode | None) -> None:
        self._named = named
        self._dataset = dataset
        self._decode = decode
        try:
            self._length = len(dataset)
        except TypeError:
            raise DataError(f"{named}: {type(dataset).__name__} has no length: rows cannot be named in it") from None

    def __len__(self) -> int:
        return self._length

    @property
    def shards(self) -> Sequence[Any] | None:
        offered = getattr(self._dataset, "shards", None)
        return offered if isinstance(offered, list | tuple) and offered else None

    def read(self, row: int) -> Sample:
        try:
            item = self._dataset[row]
        except Exception as error:
            raise DataError(f"{self._named}: row {row}: {type(error).__name__}: {error}") from None
        text, tokens = _content(item)
        if text is None and tokens is None:
            raise DataError(
                f"{self._named}: row {row} is {type(item).__name__}, in which no text and no token ids are found"
            )
        if text is None and tokens is not None and self._decode is not None:
            text = self._decode(tokens)
        return Sample(text, tokens if text is None else None)


def _content(item: Any, depth: int = 3) -> tuple[str | None, list[int] | None]:
    """Return the text or the token ids in a sample."""
    if isinstance(item, str):
        return item, None
    if isinstance(item, bytes | bytearray):
        return bytes(item).decode("utf-8", "replace"), None
    if isinstance(item, Mapping):
        for name in (*TEXT_NAMES, *TOKEN_NAMES):
            if name in item:
                found = _content(item[name], depth - 1) if depth else (None, None)
                if found != (None, None):
                    return found
        return None, None
    try:
        numbers = np.asarray(item)
    except Exception:
        numbers = np.zeros(0)
    if numbers.dtype.kind in "iu" and numbers.ndim == 1 and numbers.size:
        return None, [int(number) for number in numbers]
    if isinstance(item, Sequence) and len(item) and depth:
        return _content(item[0], depth - 1)
    return None, None


@dataclass(frozen=True, slots=True)
class _TokenFile:
    """A file of tokens: row i is ``tokens[bounds[i] : bounds[i + 1]]``. ``head``: bytes in front of them."""

    path: Path
    tokens: np.ndarray
    rows: int
    bounds: Callable[[int], tuple[int, int]]
    head: int = 0


class _TokenFiles:
    """Rows of tokens in files, one file behind the other."""

    shards = None

    def __init__(self, files: list[_TokenFile], decode: Decode | None) -> None:
        self._files = files
        self._ends = np.cumsum([file.rows for file in files])
        self._decode = decode

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, row: int) -> Sample:
        _check(row, len(self))
        number = int(np.searchsorted(self._ends, row, side="right"))
        file = self._files[number]
        first, end = file.bounds(row - int(self._ends[number]) + file.rows)
        tokens = [int(token) for token in file.tokens[first:end]]
        at = file.head + first * file.tokens.dtype.itemsize
        text = None if self._decode is None else self._decode(tokens)
        return Sample(text, tokens if text is None else None, str(file.path), byte=at)


def _tokens_of(path: Path, context: int | None, dtype: str) -> _TokenFile:
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
            raise DataError(
                f"{path}: holds {array.dtype} of shape {array.shape}, no token ids in one or two dimensions"
            )
        head = int(getattr(array, "offset", 0))
        return _fixed(path, array.reshape(-1), array.shape[1] if array.ndim == 2 else context, head)
    index = path.with_suffix(".idx")
    if index.is_file():
        return _of_megatron(path, index)
    if not path.stat().st_size:
        raise DataError(f"{path}: is empty")
    return _fixed(path, np.memmap(path, dtype=dtype, mode="r"), context, 0)


def _fixed(path: Path, tokens: np.ndarray, context: int | None, head: int) -> _TokenFile:
    if context is None:
        raise DataError(f"{path}: its tokens have no rows: say with --context how many of them are one sample")
    width = context
    return _TokenFile(path, tokens, len(tokens) // width, lambda row: (row * width, (row + 1) * width), head)


def _of_megatron(path: Path, index: Path) -> _TokenFile:
    """Read the index of a Megatron data set: version, type and number of sequences, then their lengths and byte offsets."""
    data = index.read_bytes()
    if not data.startswith(_MEGATRON):
        raise DataError(f"{index}: is no index of a Megatron data set; move it away to read {path.name} by --context")
    _, code, count, _ = struct.unpack_from("<QBQQ", data, len(_MEGATRON))
    dtype = np.dtype(_MEGATRON_TYPES[code]) if code in _MEGATRON_TYPES else None
    if dtype is None:
        raise DataError(f"{index}: tokens of an unknown type (code {code})")
    at = len(_MEGATRON) + struct.calcsize("<QBQQ")
    lengths = np.frombuffer(data, np.int32, count, at)
    offsets = np.frombuffer(data, np.int64, count, at + lengths.nbytes) // dtype.itemsize
    return _TokenFile(
        path,
        np.memmap(path, dtype=dtype, mode="r"),
        count,
        lambda row: (int(offsets[row]), int(offsets[row]) + int(lengths[row])),
    )


class _Lines:
    """A line a row, of files one behind the other. Where lines begin is found in pieces, as they are asked for."""

    shards = None

    def __init__(self, files: list[Path], is_json: bool, decode: Decode | None) -> None:
        self._is_json = is_json
        self._decode = decode
        #: (file, byte, rows before the piece, rows before the file) of each piece; a row is in the piece in which it begins.
        self._pieces: list[tuple[Path, int, int, int]] = []
        rows = 0
        for path in files:
            before = rows
            at, fresh = 0, True
            for piece in _pieces(path):
                begins = np.count_nonzero(np.frombuffer(piece, np.uint8)[:-1] == 10) + fresh
                self._pieces.append((path, at, rows, before))
                rows, at, fresh = rows + int(begins), at + len(piece), piece.endswith(b"\n")
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def read(self, row: int) -> Sample:
        _check(row, self._rows)
        number = int(np.searchsorted([rows for _, _, rows, _ in self._pieces], row, side="right")) - 1
        path, at, rows, before = self._pieces[number]
        with path.open("rb") as file:
            file.seek(at - 1 if at else 0)
            if at and file.read(1) != b"\n":
                file.readline()
            for _ in range(row - rows):
                file.readline()
            begin = file.tell()
            line = file.readline().removesuffix(b"\n").removesuffix(b"\r")
        text, tokens = (line.decode("utf-8", "replace"), None) if not self._is_json else _of_json(line)
        if text is None and tokens is not None and self._decode is not None:
            text = self._decode(tokens)
        return Sample(text, tokens if text is None else None, str(path), byte=begin, line=row - before + 1)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _of_json(line: bytes) -> tuple[str | None, list[int] | None]:
    try:
        found = _content(msgspec.json.decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = (None, None)
    return (line.decode("utf-8", "replace"), None) if found == (None, None) else found


def _check(row: int, rows: int) -> None:
    if not 0 <= row < rows:
        raise DataError(f"row {row} is not in this data set, which has {rows}: it is not the one that was trained on")
