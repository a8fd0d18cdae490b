"""Order statistics of a sorted list: median and median absolute deviation without sorting again."""

from __future__ import annotations

#: Times a median absolute deviation this is the standard deviation of a normal distribution.
SIGMA_OF_MAD = 1.4826


def median_of(ordered: list[float]) -> float:
    """Return the median of a sorted, non-empty list."""
    size = len(ordered)
    half = size // 2
    return ordered[half] if size % 2 else 0.5 * ordered[half - 1] + 0.5 * ordered[half]


def deviation_of(ordered: list[float], centre: float) -> float:
    """Return the median of ``|x - centre|`` over a sorted, non-empty list, in O(log n).

    The k values nearest to a centre stand side by side in a sorted list, and the farthest of them is at one end.
    """
    size = len(ordered)
    half = size // 2
    if size % 2:
        low = _nearest(ordered, centre, half + 1)
        return max(centre - ordered[low], ordered[low + half] - centre)
    low = _nearest(ordered, centre, half)
    end = low + half
    farthest = max(centre - ordered[low], ordered[end - 1] - centre)
    # The next one beyond stands beside them.
    if low == 0:
        beyond = ordered[end] - centre
    elif end == size:
        beyond = centre - ordered[low - 1]
    else:
        beyond = min(centre - ordered[low - 1], ordered[end] - centre)
    return 0.5 * farthest + 0.5 * beyond


def deviation_near(ordered: list[float], centre: float, hint: int) -> tuple[float, int]:
    """Return :func:`deviation_of` and the hint for the next time, in O(1) where the list hardly changed since the last."""
    size = len(ordered)
    half = size // 2
    count = half + 1 if size % 2 else half
    limit = size - count
    low = min(hint, limit)
    while low < limit and centre - ordered[low] > ordered[low + count] - centre:
        low += 1
    while low > 0 and centre - ordered[low - 1] <= ordered[low - 1 + count] - centre:
        low -= 1
    end = low + count
    before, behind = centre - ordered[low], ordered[end - 1] - centre
    farthest = before if before > behind else behind
    if size % 2:
        return farthest, low
    if low == 0:
        beyond = ordered[end] - centre
    elif end == size:
        beyond = centre - ordered[low - 1]
    else:
        before, behind = centre - ordered[low - 1], ordered[end] - centre
        beyond = before if before < behind else behind
    return 0.5 * farthest + 0.5 * beyond, low


def _nearest(ordered: list[float], centre: float, count: int) -> int:
    """Return where the ``count`` values nearest to ``centre`` begin."""
    low, high = 0, len(ordered) - count
    while low < high:
        middle = (low + high) // 2
        if centre - ordered[middle] > ordered[middle + count] - centre:
            low = middle + 1
        else:
            high = middle
    return low
