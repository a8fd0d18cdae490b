"""Lines of one stream, as an exporter serves them and a journal holds them, to inputs for the core.

Each line goes on once and in order. A line that is missing or cannot be read is counted and passed over, never invented.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from trainwarden.record import Event, Header, RecordError, Step, decode_line
from trainwarden.rules.core.inputs import Happened, Input, Start, Steps

_LARGEST = 2**53


class Read(msgspec.Struct, frozen=True):
    """What one page brought: ``inputs`` in order, taking a stream from ``after`` to ``upto``."""

    start: Start
    rank: int
    after: int
    upto: int
    inputs: tuple[Input, ...]


class Counts(Protocol):
    """Where a source counts what it passes over."""

    def malformed(self, lines: int) -> None:
        """Lines that could not be read."""

    def missing(self, lines: int) -> None:
        """Lines that the source no longer had."""


class Page(msgspec.Struct, frozen=True):
    """Decoded lines. ``example`` shows the first one that could not be read."""

    inputs: tuple[Input, ...]
    upto: int
    malformed: int
    missing: int
    example: str


def decode_lines(start: Start, rank: int, body: bytes, after: int, last: int | None = None) -> Page:
    """Decode the lines behind ``after``; ``last`` is the newest number there is, where the peer says so.

    What follows the last newline is torn, or nothing, and is left for the next time.
    """
    inputs: list[Input] = []
    steps: list[Step] = []
    seq = after
    malformed = missing = 0
    unread = 0  # lines that could not be read since the last good one: each had the next number
    example = ""

    def flush() -> None:
        if steps:
            inputs.append(Steps(start, rank, tuple(steps)))
            steps.clear()

    for line in body[: body.rfind(b"\n") + 1].split(b"\n"):
        if not line.strip():
            continue
        try:
            item = decode_line(line)
            if isinstance(item, Header):
                continue
            check(item)
        except RecordError as error:
            malformed += 1
            unread += 1
            example = example or f"{error}: {line[:120]!r}"
            continue
        if item.seq <= seq:
            unread = 0
            continue
        missing += max(0, item.seq - seq - 1 - unread)
        seq, unread = item.seq, 0
        if isinstance(item, Step):
            steps.append(item)
        else:
            flush()
            inputs.append(Happened(start, rank, item))
    flush()
    upto = seq if last is None else max(seq, min(seq + unread, last))
    return Page(tuple(inputs), upto, malformed, missing, example)


def check(item: Step | Event) -> None:
    """Refuse what decodes but cannot be a line of a run; the core need not be ready for it.

    Raises:
        RecordError: a number is outside what a record can hold.
    """
    if (
        isinstance(item, Step)
        and 1 <= item.seq < _LARGEST
        and 0 <= item.step < _LARGEST
        and 1 <= item.stride < _LARGEST
        and math.isfinite(item.time)
    ):
        return  # nearly always; what follows says what is wrong
    numbers = [("seq", item.seq, 1)]
    if isinstance(item, Step):
        numbers += [("step", item.step, 0), ("stride", item.stride, 1)]
    elif item.step is not None:
        numbers.append(("step", item.step, 0))
    for name, value, least in numbers:
        if not least <= value < _LARGEST:
            raise RecordError(f"{name}: {value} is out of range")
    if not math.isfinite(item.time):
        raise RecordError("time: missing or not finite")
