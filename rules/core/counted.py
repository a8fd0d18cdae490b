"""Numbers with what they count, in sentences for people."""

from __future__ import annotations


def counted(number: int, of: str) -> str:
    """Return ``1 step`` or ``3 steps``."""
    return f"{number} {of}{'' if number == 1 else 's'}"
