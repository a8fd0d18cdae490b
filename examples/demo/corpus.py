"""The demo's text: the Python standard library's own sources, cut into rows of bytes and put up in shards.

The same on every machine with the same Python, and deterministic: files in the order of their names, every tenth held
out, rows shuffled by the seed. No held-out file has a row in the training data.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]  # (rows, context + 1)

#: Name of the data set in the exporter's records.
DATASET = "stdlib"
#: Folders whose files are no ordinary source text, or are not installed everywhere.
_NOT_TEXT = frozenset(
    (
        *("site-packages", "dist-packages", "ensurepip", "__pycache__"),
        *("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo"),
    )
)
_SMALLEST, _LARGEST = 8_000, 120_000  # bytes of a file that is taken: neither a stub nor one file that dominates
_HELD_OUT_EVERY = 10
_HELD_OUT_ROWS = 256


class CorpusError(RuntimeError):
    """The text cannot be gathered. The message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows ``[first, end)`` of the training data, under a name."""

    name: str
    first: int
    end: int


@dataclass(slots=True)
class Corpus:
    """Training rows in shards, and held-out rows. ``rows`` may be written to: that is how it is poisoned."""

    rows: Rows
    held_out: Rows
    shards: tuple[Shard, ...]

    def write(self, folder: Path) -> None:
        """Write ``train.bin``, ``heldout.bin`` and ``index.json``: all that the training script reads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.bin").write_bytes(self.rows.tobytes())
        (folder / "heldout.bin").write_bytes(self.held_out.tobytes())
        index = {
            "dataset": DATASET,
            "row_bytes": int(self.rows.shape[1]),
            "shards": [[shard.name, shard.first, shard.end] for shard in self.shards],
        }
        (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Index:
    """Contents of ``index.json``."""

    dataset: str
    row_bytes: int
    shards: list[tuple[str, int, int]]


def read_index(folder: Path) -> Index:
    """Read ``index.json``.

    Raises:
        CorpusError: there is none, or it was cut off.
    """
    path = folder / "index.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Index(raw["dataset"], raw["row_bytes"], [(name, first, end) for name, first, end in raw["shards"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path}: {error}; `trainwarden demo` writes it") from None


def read_rows(path: Path, row_bytes: int) -> Rows:
    """Map ``train.bin`` or ``heldout.bin`` as ``(rows, row_bytes)``, read-only, without loading it."""
    flat: Rows = np.memmap(path, dtype=np.uint8, mode="r")
    return flat.reshape(-1, row_bytes)


def sources(root: Path | None = None) -> list[Path]:
    """Return the source files that make up the text, in the order of their names below ``root`` (the standard library)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in root.rglob("*.py") if not _NOT_TEXT.intersection(path.relative_to(root).parts))
    return sorted(
        (path for path in found if _SMALLEST <= path.stat().st_size <= _LARGEST),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def build(seed: int, *, rows: int, row_bytes: int, shard_rows: tuple[int, int], root: Path | None = None) -> Corpus:
    """Gather at least ``rows`` training rows in shards of ``shard_rows[0]`` to ``shard_rows[1]`` rows, and the held-out ones.

    Raises:
        CorpusError: the standard library's sources are not there, or do not suffice.
    """
    files = sources(root)
    training = _cut([path for number, path in enumerate(files) if number % _HELD_OUT_EVERY], row_bytes)
    held_out = _cut(files[::_HELD_OUT_EVERY], row_bytes)
    chance = np.random.default_rng(seed)
    sizes: list[int] = []
    while sum(sizes) < rows:
        sizes.append(int(chance.integers(shard_rows[0], shard_rows[1] + 1)))
    total = sum(sizes)
    if len(training) < total or len(held_out) < _HELD_OUT_ROWS:
        raise CorpusError(
            f"the standard library at {root or sysconfig.get_paths()['stdlib']} holds {len(training)} rows of {row_bytes} "
            f"bytes to train on and {len(held_out)} held out; {total} and {_HELD_OUT_ROWS} are needed. Is it installed "
            "without its sources? Run the demo with a Python that has them (apt-get install libpython3-stdlib)"
        )
    ends = np.cumsum(sizes)
    shards = tuple(
        Shard(f"{DATASET}-{number:03}", int(end) - size, int(end))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    # The held-out rows do not depend on the seed: losses of different seeds are about the same text.
    spread = np.linspace(0, len(held_out) - 1, _HELD_OUT_ROWS).astype(np.int64)
    return Corpus(training[chance.permutation(len(training))[:total]], held_out[spread], shards)


def _cut(files: list[Path], row_bytes: int) -> Rows:
    text = b"".join(path.read_bytes() for path in files)
    whole = len(text) // row_bytes * row_bytes
    return np.frombuffer(text[:whole], dtype=np.uint8).reshape(-1, row_bytes)
