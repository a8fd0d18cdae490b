"""Can a checkpoint be loaded? What can be said from its files alone, without torch and without reading all of it."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

#: First bytes of a zip file, which every torch.save of torch 1.6 and later is.
_ZIP = b"PK\x03\x04"
_PIECE = 4096


class UnreadableError(ValueError):
    """A checkpoint that could not be loaded; the message names the file and what is wrong with it."""


def inside(path: Path, roots: list[Path]) -> bool:
    """Say whether the path, with all links followed, lies in one of the folders; what cannot be followed does not."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all, or links that lead round in a circle
        return False
    return any(real.is_relative_to(root.resolve()) for root in roots)


def check_readable(path: Path) -> None:
    """Check that the checkpoint at ``path`` (a file or a folder) is there, whole as far as its format shows, and readable.

    Of every file the first and last bytes are read. Further: a zip file (torch.save) must have its central directory,
    which is written last; a .safetensors file must be as long as its header says; a folder with .distcp files
    (torch.distributed.checkpoint) must have the .metadata that is written last.

    Raises:
        UnreadableError: any of it fails.
    """
    try:
        if path.is_dir():
            _check_folder(path)
        elif path.is_file():
            _check_file(path)
        elif path.exists():
            raise UnreadableError(f"{path}: neither a file nor a folder")
        else:
            raise UnreadableError(f"{path}: is not there")
    except OSError as error:
        raise UnreadableError(f"{error.filename or path}: {error.strerror}") from None


def _check_folder(folder: Path) -> None:
    def fail(error: OSError) -> None:
        raise error

    files = [Path(parent) / name for parent, _, names in os.walk(folder, onerror=fail) for name in names]
    if not files:
        raise UnreadableError(f"{folder}: holds no file")
    for file in files:
        # Marker files of frameworks are empty on purpose; the data files must not be.
        _check_file(file, may_be_empty=len(files) > 1)
    if not any(file.stat().st_size for file in files):
        raise UnreadableError(f"{folder}: all of its files are empty")
    shards = {file.parent for file in files if file.suffix == ".distcp"}
    for parent in sorted(shards):
        if not (parent / ".metadata").is_file():
            raise UnreadableError(f"{parent}: .metadata is missing: the save did not finish")


def _check_file(path: Path, may_be_empty: bool = False) -> None:
    if not path.is_file():
        # A pipe would be waited for until somebody writes to it, with all other requests of the run behind it.
        raise UnreadableError(f"{path}: {'no file that can be read' if path.exists() else 'a link to nothing'}")
    with path.open("rb") as file:
        first = file.read(_PIECE)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _PIECE))
        file.read(_PIECE)
    if not first:
        if may_be_empty and path.suffix not in (".distcp", ".safetensors", ".pt", ".pth", ".ckpt", ".bin"):
            return
        raise UnreadableError(f"{path}: is empty")
    if first.startswith(_ZIP):
        try:
            with zipfile.ZipFile(path) as archive:
                if not archive.namelist():
                    raise UnreadableError(f"{path}: an empty zip file")
        except zipfile.BadZipFile:
            raise UnreadableError(f"{path}: a zip file without its end: the save did not finish") from None
    elif path.suffix == ".safetensors":
        _check_safetensors(path, first, size)


def _check_safetensors(path: Path, first: bytes, size: int) -> None:
    """Compare the length of the file with its header: 8 bytes of length, JSON, then the tensors' bytes."""
    length = int.from_bytes(first[:8], "little")
    if size < 8 + length or length > 100_000_000:
        raise UnreadableError(f"{path}: shorter than its header")
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise UnreadableError(f"{path}: its header cannot be read") from None
    if size != 8 + length + max(ends, default=0):
        raise UnreadableError(f"{path}: its length is not the one that its header gives: the save did not finish")
