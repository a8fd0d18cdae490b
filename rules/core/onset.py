"""Where an incident began: the first step of its alerts, moved back to the first abnormal record that leads up to it.

Gradient norm, update ratio and loss scale lead the loss by 1 to 30 steps (design §4.2; cases A01, A04, A10), and a dirty batch is
dirty before anything else is abnormal.
"""

from __future__ import annotations

import numpy as np

from .baseline import Baseline
from .facts import dirty_rows, high_gradient, high_loss
from .trace import Trace
from .trend import Trend

#: Steps before the first alert within which an abnormal record may still be its beginning.
LEAD_STEPS = 30
#: Normal records that may lie between abnormal ones of one beginning.
BREAKS = 1


def onset(trace: Trace, since: int, trend: Trend | None, usual: dict[str, Baseline]) -> int:
    """Return the step of the first abnormal record of the unbroken stretch that leads up to ``since``."""
    reach = LEAD_STEPS * trace.stride()
    rows = trace.rows(since - reach, since + 1)
    if rows.stop - rows.start < 2:
        return since
    _, loss_high, _ = high_loss(trace, rows, trend)
    odd = loss_high | high_gradient(trace, rows, usual) | dirty_rows(trace, rows, usual)
    steps = trace.steps[rows]
    first, breaks = since, 0
    for place in range(len(steps) - 1, -1, -1):
        if odd[place]:
            first, breaks = int(steps[place]), 0
        elif steps[place] < since:
            breaks += 1
            if breaks > BREAKS:
                break
    return min(first, since)


def uncertainty(trace: Trace, step: int, trend: Trend | None, usual: dict[str, Baseline]) -> int:
    """Return by how many steps the true beginning may lie before ``step``.

    One record where a signal of every record tells the beginning, one measuring interval where only a slower one does.
    """
    row = trace.row(step)
    if row >= len(trace):
        return trace.stride()
    rows = slice(row, row + 1)
    _, loss_high, _ = high_loss(trace, rows, trend)
    told_at_once = bool(np.any(loss_high | dirty_rows(trace, rows, usual)))
    grad = {name: usual[name] for name in ("grad_norm",) if name in usual}
    told_at_once = told_at_once or bool(np.any(high_gradient(trace, rows, grad)))
    return trace.stride() if told_at_once else max(trace.stride(), trace.cadence("update_ratio"))
