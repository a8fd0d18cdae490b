"""JSON lines: one object a line, as many training scripts and ``wandb`` histories write them; also behind a logger's prefix, and as
Python prints a dictionary (``{'loss': 2.1, 'epoch': 0.1}``, the console of Hugging Face's Trainer), among other lines.

Nested objects become names with slashes (``train/loss``). Bare ``NaN`` and ``Infinity``, which some writers use, are read, and numbers
that are written as texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainwarden.rules.replay.objects import numbers_of, object_of
from trainwarden.rules.replay.rows import TIME, Notices, Reader, Row, lines_within
from trainwarden.rules.replay.texts import share_of, time_of

#: Entries at the end of a training: means over all of it, no step's.
_SUMMARY = frozenset({"train_runtime", "total_flos"})


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    lines = [line for line in head[:50] if line.strip()]
    if lines and lines[0].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        found = [object_of(line) for line in lines[:-1] or lines]
        good = sum(one is not None and bool(numbers_of(one)) for one in found)
        if good > len(found) / 2:
            return 0.8
    return 0.7 if share_of(head, _of_training) else 0.0


def _of_training(line: bytes) -> bool:
    if b"{" not in line or b"loss" not in line:
        return False
    found = object_of(line)
    return found is not None and any("loss" in name for name in numbers_of(found))


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
        for line in lines_within(lines):
            self._line += 1
            if not line.strip():
                continue
            found = object_of(line)
            if found is None:
                if line.lstrip().startswith(b"{"):
                    self._notices.add("torn", f"Line {self._line} is no JSON object: it was left out.")
            elif not _SUMMARY & found.keys():
                values = numbers_of(found)
                time = time_of(line[: line.find(b"{")])
                if time is not None and values:
                    values.setdefault(TIME, time)
                if values:
                    yield Row(values, self._line)

    def end(self) -> None:
        """Nothing is known only at the end."""
