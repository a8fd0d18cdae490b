"""Gzip that loses nothing: of a damaged file, all that comes before the damage and every whole part behind it.

A gzip is one part or several in a row (RFC 1952): a writer that appends begins a new one each time. Python's own reader drops what
it holds unpacked when it meets damage, and ends there.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO

MAGIC = b"\x1f\x8b"

_PIECE = 256 * 1024
#: Unpacked at once where damage is near, so that little is unpacked twice.
_SMALL = 1024
#: The beginning of a part, strict enough that packed data hardly looks like one: method deflate, no reserved flag, a known system.
_PART = re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", re.DOTALL)
_PART_BYTES = 10
_WITH_HEADER = 31

TOO_SHORT, WRONG_CHECKSUM, HURT = "it ends too early", "its checksum is wrong", "its packed data is broken"


def unpacked(file: IO[bytes], damaged: Callable[[str], None]) -> Iterator[bytes | None]:
    """Yield the contents in pieces; None where something is missing between two of them.

    ``damaged`` is called with what is wrong, in words, once for each damage.
    """
    unpacker = zlib.decompressobj(_WITH_HEADER)
    begun = False
    rest = b""
    while True:
        read = file.read(_PIECE)
        rest += read
        while rest:
            if unpacker.eof:
                rest = rest.lstrip(b"\0")  # padding, as tapes have it
                if len(rest) < _PART_BYTES and read:
                    break
                if rest and not rest.startswith(MAGIC):
                    damaged("it is followed by something else")
                    rest = _next_part(rest)
                if not rest:
                    break
                unpacker, begun = zlib.decompressobj(_WITH_HEADER), False
            before = unpacker.copy()
            try:
                data = unpacker.decompress(rest)
            except zlib.error:
                data, rest, why = _up_to_damage(before, rest)
                if data:
                    yield data
                damaged(why)
                yield None
                rest = _next_part(rest)
                while not rest and (read := file.read(_PIECE)):
                    rest = _next_part(read)
                unpacker, begun = zlib.decompressobj(_WITH_HEADER), False
                continue
            begun = True
            rest = unpacker.unused_data
            if data:
                yield data
        if not read:
            break
    if begun and not unpacker.eof:
        damaged(TOO_SHORT)


def _up_to_damage(unpacker: zlib._Decompress, packed: bytes) -> tuple[bytes, bytes, str]:
    """Return what can be unpacked before the damage, what is packed behind it, and what the damage is."""
    found: list[bytes] = []
    at, step = 0, _SMALL
    while True:
        before = unpacker.copy()
        try:
            found.append(unpacker.decompress(packed[at : at + step]))
            at += step
        except zlib.error as error:
            if step == 1:
                checked = "incorrect data check" in str(error) or "incorrect length check" in str(error)
                return b"".join(found), packed[at + 1 :], WRONG_CHECKSUM if checked else HURT
            unpacker, step = before, 1


def _next_part(packed: bytes) -> bytes:
    """Return the bytes from the next part's beginning on, or nothing."""
    found = _PART.search(packed)
    return packed[found.start() :] if found else b""
