"""Order statistics of a sorted list: median and median absolute deviation without sorting again."""

from __future__ import annotations

#: Times a median absolute deviation this is the standard deviation of a normal distribution.
SIGMA_OF_MAD = 1.4826


def median_of(ordered: list[float]) -> float:
    """Return the median of a sorted, non-empty list."""
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else 0.5 * ordered[half - 1] + 0.5 * ordered[half]


def deviation_of(ordered: list[float], centre: float) -> float:
    """Return the median of ``|x - centre|`` over a sorted, non-empty list, in O(log n).

    The k values nearest to a centre stand side by side in a sorted list, and the farthest of them is at one end.
    """
    half, odd = divmod(len(ordered), 2)
    if odd:
        return _farthest_of_nearest(ordered, centre, half + 1)
    return 0.5 * _farthest_of_nearest(ordered, centre, half) + 0.5 * _farthest_of_nearest(ordered, centre, half + 1)


def _farthest_of_nearest(ordered: list[float], centre: float, count: int) -> float:
    low, high = 0, len(ordered) - count
    while low < high:
        middle = (low + high) // 2
        if centre - ordered[middle] > ordered[middle + count] - centre:
            low = middle + 1
        else:
            high = middle
    return max(centre - ordered[low], ordered[low + count - 1] - centre)
