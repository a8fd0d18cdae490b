"""Algebra of half-open ranges of positions or rows: union is :func:`trainwarden.plan.merge_ranges`, the rest is here.

Lists that these functions return are sorted, disjoint and non-touching.
"""

from __future__ import annotations

from .plan import merge_ranges
from .record import Ranges


def length(ranges: Ranges) -> int:
    """Return how many positions the ranges hold, counting each once."""
    return sum(end - first for first, end in merge_ranges(ranges))


def within(ranges: Ranges, first: int, end: int) -> Ranges:
    """Return the part of the ranges that lies in ``[first, end)``."""
    return merge_ranges([(max(first, low), min(end, high)) for low, high in ranges])


def shared(one: Ranges, other: Ranges) -> Ranges:
    """Return the positions that both lists of ranges hold."""
    found: Ranges = []
    second = merge_ranges(other)
    place = 0
    for low, high in merge_ranges(one):
        while place < len(second) and second[place][1] <= low:
            place += 1
        at = place
        while at < len(second) and second[at][0] < high:
            found.append((max(low, second[at][0]), min(high, second[at][1])))
            at += 1
    return found


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """Return the positions of ``ranges`` that are not in ``removed``."""
    left: Ranges = []
    holes = merge_ranges(removed)
    for first, end in merge_ranges(ranges):
        at = first
        for low, high in holes:
            if high <= at:
                continue
            if low >= end:
                break
            if low > at:
                left.append((at, low))
            at = max(at, high)
        if at < end:
            left.append((at, end))
    return left
