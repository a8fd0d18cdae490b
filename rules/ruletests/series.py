"""The notation of values that promtool's users know, counted in records.

``1 2 3``: three records. ``1+0.1x50``: 1 and then 50 more, each 0.1 higher. ``5-1x3``: 5 4 3 2. ``2x10``: 2 and then 10 more. ``_``: the
record lacks the signal; ``_x3``: three records lack it. ``NaN``, ``Inf`` and ``-Inf`` are values. ``stale``: so many records lack the
signal that its last value no longer stands in for it and it is unknown.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

from trainwarden.rules.core.language.measured import STALE_AFTER

#: Records of one test.
MOST = 1_000_000

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_VALUE = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<number>{_NUMBER})(?:(?P<by>[-+]{_NUMBER})?x(?P<times>\d+))?|(?P<word>[nN]a[nN]|[iI]nf))"
)
_MISSING = re.compile(r"_(?:x(\d+))?")


class NotationError(ValueError):
    """A text that is not in the notation; ``offset`` is the character of the word that is wrong."""

    def __init__(self, offset: int, says: str) -> None:
        super().__init__(says)
        self.offset = offset


def values(text: str, stride: int = 1) -> list[float | None]:
    """Return one value a record; None is absent.

    Raises:
        NotationError: a word is not in the notation, or there are more than a million values.
    """
    found: list[float | None] = []
    for word in re.finditer(r"\S+", text):
        more = _word(word[0], word.start(), found, stride)
        if len(found) + len(more) > MOST:
            raise NotationError(word.start(), f"more than {MOST} values")
        found += more
    if not found:
        raise NotationError(0, "no value; write for example 1+0.1x50 _x3 NaN 2x10")
    return found


def _word(word: str, offset: int, before: list[float | None], stride: int) -> list[float | None]:
    if word == "stale":
        return [None] * _until_stale(before, stride)
    missing = _MISSING.fullmatch(word)
    if missing:
        return [None] * _bounded(missing[1] or "1", offset)
    found = _VALUE.fullmatch(word)
    if not found:
        raise NotationError(offset, f"{word!r} is no value; write a number, NaN, Inf, _, stale, a+bxn or axn")
    sign = -1.0 if found["sign"] == "-" else 1.0
    if found["word"]:
        return [math.nan if found["word"].lower() == "nan" else sign * math.inf]
    first = sign * float(found["number"])
    if found["times"] is None:
        return [first]
    by = float(found["by"] or 0.0)
    return [first + place * by for place in range(_bounded(found["times"], offset) + 1)]


def _bounded(times: str, offset: int) -> int:
    if len(times) > 7 or int(times) > MOST:
        raise NotationError(offset, f"more than {MOST} values")
    return int(times)


def _until_stale(before: list[float | None], stride: int) -> int:
    """Return after how many absent records the signal is unknown: 20 steps, or twice the widest gap between its values."""
    places = [place for place, value in enumerate(before) if value is not None]
    widest = max((later - one for one, later in pairwise(places)), default=1)
    return max(STALE_AFTER // stride, 2 * widest) + 1
