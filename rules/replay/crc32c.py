"""CRC-32C (Castagnoli), with the mask that TFRecord files put on it (RFC 3720, appendix B.4; tensorflow/core/lib/hash/crc32c.h)."""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the checksum of ``data``."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """Return the checksum as it is stored: rotated right by 15 bits, with a constant added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
