"""What a batch's loss should be, given where its samples are from: the level of each source, followed from step to step.

A batch of a hard source has a high loss and harms nothing; the same loss in a batch of an easy one is a spike. Only the mean loss
of a step is known, so the levels are found by regression on the mix: a Kalman filter whose state is one level a source, each a random
walk of which the larger part is common to all, because training lowers them together. Its variances are in units of one
record's noise, so that nothing depends on the scale of the loss. State: K x K numbers for K sources. Runs on the drain thread, in
numpy.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

#: Variance that a step adds to all levels together, and to each on its own, in units of one record's noise. The common one makes the
#: gain of a single source 0.095: it follows within about ten steps.
COMMON, OWN = 0.01, 0.002
#: Variance of a level of which nothing is known.
UNKNOWN = 1e6
#: A mix is known once its expectation is no more uncertain than this many records' noise (as a variance).
KNOWN = 2.0
#: What differs by more than so many times the source's usual difference teaches no more than that: an outlier is no new level.
CLIP = 4.0
#: Batches' worth of a source over which its usual difference is remembered, and that are seen before it is relied upon.
MEMORY, WARM = 100.0, 10.0

Floats = npt.NDArray[np.float64]


class Levels:
    """The levels of up to ``sources`` sources, by number."""

    def __init__(self, sources: int) -> None:
        self._level: Floats = np.zeros(sources)
        self._variance: Floats = np.eye(sources) * UNKNOWN
        self._usual: Floats = np.zeros(sources)
        self._seen: Floats = np.zeros(sources)

    def expected(self, mix: Floats) -> float | None:
        """Return the loss that a batch of this mix should have, None while a source that matters in it is hardly known.

        ``mix`` holds the share of each source and sums to 1.
        """
        doubt = float(mix @ self._variance @ mix)
        return float(mix @ self._level) if doubt <= KNOWN else None

    def pass_step(self) -> None:
        """Let a step go by: every level may have moved a little."""
        self._variance += COMMON
        self._variance[np.diag_indices_from(self._variance)] += OWN

    def learn(self, mix: Floats, loss: float, noise: float = 1.0) -> None:
        """Take in the mean loss of a batch of this mix; ``noise`` is its variance in units of a whole record's. NaN teaches nothing."""
        if not math.isfinite(loss):
            return
        toward = self._variance @ mix
        doubt = float(mix @ toward)
        off = loss - float(mix @ self._level)
        if doubt <= KNOWN:  # else it is the first of its kind: it is no outlier, and no measure of what is usual
            usual = float(mix @ self._usual)
            if usual > 0 and float(mix @ np.minimum(self._seen, WARM)) >= WARM:
                off = max(-CLIP * usual, min(CLIP * usual, off))
            self._seen = np.minimum(self._seen + mix, MEMORY)
            self._usual = self._usual + (abs(off) - self._usual) * mix / np.maximum(self._seen, 1.0)
        gain = toward / (doubt + noise)
        self._level = self._level + gain * off
        self._variance = self._variance - np.outer(gain, toward)
        self._variance = (self._variance + self._variance.T) / 2
