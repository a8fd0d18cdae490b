"""Two or three ranks: too few for a middle, so each is held against its own past, and the others against theirs.

One that leaves its past while the others stay in theirs is alone; where all leave it, nobody is. What is usual is followed by moving
averages, into which an outlier goes no further than :data:`CLIP` deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

#: How many members are few.
FEWEST, MOST = 2, 3
#: Values of a member before it is judged, and what one weighs after that in the level and in the noise.
LEARNED, OF_LEVEL, OF_NOISE = 20, 0.2, 0.02
#: Deviations to which an outlier is cut before it is learned, those within which the others must stay, and those from which a member
#: that leaves its past twice in a row is named.
CLIP, STAYS, LEAVES = 4.0, 4.0, 6.0
#: Of normal noise the standard deviation over the mean difference of two values (sqrt(pi) / 2): a trend is in no difference. And a
#: deviation is at least this share of the level.
SD, FLOOR = 0.8862, 1e-3


class Past(Struct):
    """What a member usually is: its level, the mean difference from one value to the next, the last one, and how many there were."""

    level: float = 0.0
    difference: float = 0.0
    last: float = 0.0
    seen: int = 0

    def off(self, value: float) -> float:
        """Return by how many standard deviations a value lies above the level."""
        return (value - self.level) / self._noise()

    def learn(self, value: float) -> None:
        """Take in a finite value: what lies high, and a difference that is large, no further than an outlier may go."""
        known = self.seen >= LEARNED
        if self.seen:
            difference = abs(value - self.last)
            difference = min(difference, CLIP * self._noise()) if known else difference
            self.difference += max(OF_NOISE, 1 / self.seen) * (difference - self.difference)
        self.last = value
        if known:
            value = min(value, self.level + CLIP * self._noise())
        self.seen += 1
        self.level += max(OF_LEVEL, 1 / self.seen) * (value - self.level)

    def _noise(self) -> float:
        return max(SD * self.difference, FLOOR * abs(self.level), 1e-300)


def alone(pasts: Sequence[Past], values: Sequence[float]) -> tuple[int, float] | None:
    """Return the place of the member that alone lies above its past, and by how many deviations; (-1, 0) where none does so.

    None where that cannot be said: there are not two or three members, or one is not known well enough. All values are finite. Learns
    from them.
    """
    found: tuple[int, float] | None = None
    if FEWEST <= len(values) <= MOST and all(past.seen >= LEARNED for past in pasts):
        off = [past.off(value) for past, value in zip(pasts, values, strict=True)]
        place = max(range(len(off)), key=off.__getitem__)
        rest = max((one for at, one in enumerate(off) if at != place), default=math.inf)
        found = (place, off[place]) if rest <= STAYS < off[place] else (-1, 0.0)
        if rest > STAYS:  # a matter of several: whichever is back in its past first must not leave the others alone
            for past, value in zip(pasts, values, strict=True):
                past.level = value
    for past, value in zip(pasts, values, strict=True):
        past.learn(value)
    return found
