"""Numbers with what they count, in sentences for people."""

from __future__ import annotations


def counted(number: float, of: str) -> str:
    """Return ``1 step`` or ``3 steps``; a float is rounded, and infinity and NaN are what they are."""
    said = f"{number}" if isinstance(number, int) else f"{number:.0f}"
    return f"{said} {of}{'' if said == '1' else 's'}"
