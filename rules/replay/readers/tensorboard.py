"""TensorBoard event files (``events.out.tfevents.…``): TFRecords of Event messages, of which the scalars are read.

A record is its length (8 bytes), a masked CRC of that, the data and a masked CRC of the data, little-endian. The fields are those
of tensorflow/core/util/event.proto, framework/summary.proto and framework/tensor.proto. A record that was torn off at the end is
left out; one whose checksum is wrong too; behind a damaged length nothing can be found any more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from trainwarden.rules.replay.crc32c import masked
from trainwarden.rules.replay.rows import STEP, TIME, Notices, Reader, Row

_HEADER, _FOOTER = 12, 4
#: Larger records are pictures and histograms: their checksum is not worth its time, nor are their contents read.
_LARGEST_SCALAR = 64 * 1024
#: A length beyond this is damage.
_LARGEST = 2**31
#: Megatron writes each scalar once more against samples or tokens; those are no steps.
_OTHER_AXES = (" vs samples", " vs tokens")
_FLOAT, _DOUBLE, _INT32, _INT64 = 1, 2, 3, 9


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    data = b"".join(head)[: _HEADER + 256]
    if len(data) < _HEADER:
        return 0.0
    length, check = struct.unpack_from("<QI", data)
    return 1.0 if length < _LARGEST and masked(data[:8]) == check else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first byte."""
    return EventFile(notices)


class EventFile:
    """Reads the bytes of one event file in turn; where they are cut makes no difference."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._rest = b""
        self._lost = False
        self._record = 0

    def read(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the rows of consecutive pieces of the file."""
        pieces = [self._rest] if self._rest else []
        size = len(self._rest)
        for line in lines:
            pieces.append(line)
            size += len(line)
            if size >= _LARGEST_SCALAR:
                yield from self._take(b"".join(pieces))
                pieces = [self._rest] if self._rest else []
                size = len(self._rest)
        yield from self._take(b"".join(pieces))

    def end(self) -> None:
        """Say whether the file ends within a record."""
        if self._rest and not self._lost:
            self._notices.add("torn", f"The file ends in the middle of record {self._record + 1}: it was left out.")

    def _take(self, data: bytes) -> Iterator[Row]:
        at, end = 0, len(data)
        while not self._lost and at + _HEADER <= end:
            length, check = struct.unpack_from("<QI", data, at)
            if length > _LARGEST or masked(data[at : at + 8]) != check:
                says = f"Record {self._record + 1} is damaged: what follows in this file cannot be read."
                self._notices.add("damaged", says)
                self._lost = True
                break
            stop = at + _HEADER + length
            if stop + _FOOTER > end:
                break
            self._record += 1
            if length <= _LARGEST_SCALAR:
                body = data[at + _HEADER : stop]
                if masked(body) == struct.unpack_from("<I", data, stop)[0]:
                    row = self._row(body)
                    if row is not None:
                        yield row
                else:
                    self._notices.add("damaged", f"Record {self._record} has a wrong checksum: it was left out.")
            at = stop + _FOOTER
        self._rest = b"" if self._lost else data[at:]

    def _row(self, body: bytes) -> Row | None:
        try:
            return event_of(body, self._record)
        except (IndexError, struct.error, UnicodeError):
            self._notices.add("damaged", f"Record {self._record} is no event: it was left out.")
            return None


def event_of(body: bytes, number: int) -> Row | None:
    """Return the scalars of an Event message, or None where it has none.

    Raises:
        IndexError, struct.error, UnicodeError: it is no such message.
    """
    values: dict[str, float] = {}
    step = 0
    time: float | None = None
    for field, value in fields_of(body):
        if field == 1 and isinstance(value, bytes):
            (time,) = struct.unpack("<d", value)
        elif field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for inner, summary in fields_of(value):
                if inner == 1 and isinstance(summary, bytes):
                    _scalar(summary, values)
    if not values:
        return None
    if time is not None:
        values[TIME] = time
    values[STEP] = float(step)
    return Row(values, number)


def _scalar(message: bytes, values: dict[str, float]) -> None:
    """Put the scalar of a Summary.Value among the values, if it holds one."""
    tag, found = "", None
    for field, value in fields_of(message):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            tag = value.decode()
        elif field == 2 and len(value) == 4:
            (found,) = struct.unpack("<f", value)
        elif field == 8:
            found = _tensor(value)
    if tag and found is not None and not tag.endswith(_OTHER_AXES):
        # A tag of the same name as the step or the time of the event must not replace it.
        values[f"tag/{tag}" if tag in (STEP, TIME) else tag] = float(found)


def _tensor(message: bytes) -> float | None:
    """Return the one number of a TensorProto, or None where it holds another count or no numbers."""
    kind, content = 0, b""
    numbers: list[float] = []
    for field, value in fields_of(message):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 4 and isinstance(value, bytes):
            content = value
        elif field in (5, 6) and isinstance(value, bytes):
            form = "f" if field == 5 else "d"
            numbers += struct.unpack(f"<{len(value) // struct.calcsize(form)}{form}", value)
        elif field in (7, 10):
            numbers.append(float(_varint(value, 0)[0] if isinstance(value, bytes) else value))
    form = {_FLOAT: "<f", _DOUBLE: "<d", _INT32: "<i", _INT64: "<q"}.get(kind, "")
    if form and len(content) == struct.calcsize(form):
        numbers = [float(*struct.unpack(form, content))]
    return float(numbers[0]) if len(numbers) == 1 else None


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message: whole numbers, else the bytes.

    Raises:
        IndexError: the message ends within a field.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value - 2**64 if value >= 2**63 else value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[kind] if kind in (1, 5) else end + 1
        if at + size > end:
            raise IndexError("a field is longer than its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number is longer than 64 bits")
