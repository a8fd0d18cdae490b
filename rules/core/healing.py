"""Is the level back? After the alerts are over, the loss is compared with the trend before the onset.

Neither the size of the peak nor a threshold decides: a loss that settles 0.7 % high for good is a level shift, and one that peaked
at twice its value and is back after 30 steps is nothing (design §4.1; cases A01, A11).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .facts import Facts
from .trend import Shift, shift

Level = Literal["back", "high", "settled", "unknown"]

#: Standard errors, and standard deviations of one record, above the trend from which the level is high.
ERRORS, SDS = 4.0, 1.0
#: Records behind the onset that tell the level soon after it, when a spike of a hundred is over and the trend still says something.
SOON = slice(100, 200)
#: The excess of the newer half over that of the older from which it is not coming down any more.
STILL_FALLING = 0.75


def stands_above(found: Shift, noise: float) -> bool:
    """Say whether losses lie above a trend by more than its error and one record's ``noise`` explain; False where that is not known."""
    return found.excess > max(ERRORS * found.error, SDS * noise)


def high_now(facts: Facts, records: int) -> bool:
    """Say whether the newest ``records`` lie above the trend; True where there is no trend to say otherwise."""
    if facts.trend is None or facts.nonfinite[-1:].any():
        return True
    found = shift(facts.trend, facts.steps[-records:], facts.loss[-records:])
    return found is None or stands_above(found, facts.trend.noise)


def level(facts: Facts, since: int, level_steps: int) -> Level:
    """Judge the loss of the steps after ``since``, the last with a firing alert.

    ``high`` may still come down; ``settled`` has stayed high for ``level_steps`` and does not; ``unknown``: there is no loss or
    no trend to compare.
    """
    if facts.trend is None:
        return "unknown"
    after = facts.steps > since
    steps, losses = facts.steps[after], facts.loss[after]
    if facts.nonfinite[after].any():
        return "high"
    found = shift(facts.trend, steps, losses)
    if found is None:
        return "unknown"
    if not stands_above(found, facts.trend.noise):
        if not _stayed(facts, found):
            return "back"
        return "high" if facts.now - facts.onset < level_steps else "settled"
    if facts.now - since < level_steps:
        return "high"
    half = len(steps) // 2
    older, newer = shift(facts.trend, steps[:half], losses[:half]), shift(facts.trend, steps[half:], losses[half:])
    if older is None or newer is None or not np.isfinite(newer.excess):
        return "unknown"
    if not stands_above(newer, facts.trend.noise):
        return "back"
    return "high" if newer.excess < STILL_FALLING * older.excess else "settled"


def _stayed(facts: Facts, found: Shift) -> bool:
    """Say whether only the doubt about a trend that was extrapolated far hides a level that stood above it behind the onset (case A11)."""
    if facts.trend is None or found.excess <= SDS * facts.trend.noise:
        return False
    soon = shift(facts.trend, facts.steps[SOON], facts.loss[SOON])
    return (
        soon is not None
        and soon.n >= (SOON.stop - SOON.start) // 2
        and stands_above(soon, facts.trend.noise)
        and found.excess >= STILL_FALLING * soon.excess
    )
