"""The first sign of a drift that led to the onset, long before any rule fired (case A03).

A loss scale that falls, step by step over thousands of steps, tells that gradients have been growing all that time: the reviewers of
that run saw it from step 4700 on, 2300 steps before the loss broke. A checkpoint from within the drift is a bad target.
"""

from __future__ import annotations

import numpy as np

from .trace import Trace

#: Halvings by which the scale must have fallen before the onset; a growth interval and a back-off make one.
HALVINGS = 2.0
#: Records that a level is the median of, and records that the drift must have lasted.
LEVEL, LASTED = 20, 40
#: Steps before the onset within which a fall is the incident's own beginning.
OWN = 100


def first_sign(trace: Trace, inherited: Trace | None, onset: int) -> int | None:
    """Return the step from which the loss scale fell and never came back until the onset, or None where it did not."""
    parts = [part for part in (inherited, trace) if part is not None and len(part)]
    if not parts:
        return None
    begin = int(trace.steps[0]) if len(trace) else onset
    steps = np.concatenate([part.steps[: part.row(begin if part is inherited else onset)] for part in parts])
    scales = np.concatenate(
        [part.column("loss_scale")[: part.row(begin if part is inherited else onset)] for part in parts]
    )
    known = np.isfinite(scales) & (scales > 0) & (steps < onset - OWN)
    steps, levels = steps[known], np.log2(scales[known])
    if len(levels) < 2 * LEVEL + LASTED:
        return None
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(levels, LEVEL), axis=1)
    steps = steps[LEVEL - 1 :]
    top = float(np.max(smooth))
    if top - float(smooth[-1]) < HALVINGS:
        return None
    last = int(np.flatnonzero(smooth >= top - 0.5)[-1])
    if len(smooth) - 1 - last < LASTED:
        return None
    return int(steps[max(0, last + 1 - LEVEL // 2)])
