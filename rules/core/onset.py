"""Where an incident began: the first step of its alerts, moved back to the first abnormal record that leads up to it.

Gradient norm, update ratio and loss scale lead the loss by 1 to 30 steps (design §4.2; cases A01, A04, A10), and a dirty batch is
dirty before anything else is abnormal. A rule that compares windows holds only when half of one lies behind a shift: there the step
is looked for at which the loss left its line.
"""

from __future__ import annotations

import math

import numpy as np

from .baseline import Baseline
from .facts import DOUBTS, LOSS_SDS, dirty_rows, high_gradient, high_loss
from .trace import Trace
from .trend import Trend

#: Steps before the first alert within which an abnormal record may still be its beginning.
LEAD_STEPS = 30
#: Normal records that may lie between abnormal ones of one beginning.
BREAKS = 1
#: A loss that stands out by less than this many times the least, apart from what follows, is noise and leads up to nothing.
WEAK = 1.5
#: Records before a rule of the level first held in which the level may have shifted, as long as these rules' windows are.
WINDOW = 400
#: Records behind it that are looked at too, the least on either side of a shift, and the standard deviations from which it is told.
LEVEL, LEAST, TOLD = 50, 20, 1.0
#: Records by which a shift by one standard deviation is placed wrongly at most, but for one time in twenty; others as the inverse square.
WRONG_BY = 12.0


def onset(trace: Trace, since: int, trend: Trend | None, usual: dict[str, Baseline]) -> int:
    """Return the step of the first abnormal record of the unbroken stretch that leads up to ``since``."""
    reach = LEAD_STEPS * trace.stride()
    rows = trace.rows(since - reach, since + 1)
    if rows.stop - rows.start < 2:
        return since
    excess, loss_high, _ = high_loss(trace, rows, trend)
    odd = loss_high | high_gradient(trace, rows, usual) | dirty_rows(trace, rows, usual)
    weak = loss_high & (excess < WEAK * LOSS_SDS) & ~high_gradient(trace, rows, usual) & ~dirty_rows(trace, rows, usual)
    steps = trace.steps[rows]
    first, breaks = since, 0
    for place in range(len(steps) - 1, -1, -1):
        if odd[place] and not (breaks and weak[place]):
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


def shifted(trace: Trace, since: int, trend: Trend | None) -> tuple[int, int] | None:
    """Return the step from which the loss lies higher than before, and by how many steps it may be wrong; None where none can be told.

    ``since`` is where a rule of the level began to hold, ``trend`` that of the records ``WINDOW`` before it and earlier. The likeliest
    change of a mean: the cut between two means that leaves the least squares (Hinkley 1970).
    """
    stride = trace.stride()
    rows = trace.rows(since - WINDOW * stride, since + LEVEL * stride)
    steps, losses = trace.steps[rows], trace.column("loss")[rows]
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    if trend is None or trend.noise <= 0 or len(losses) < 2 * LEVEL:
        return None
    over = (losses - trend.at(steps)) / trend.noise
    over = np.clip(over, *np.quantile(over, (0.02, 0.98)))  # one spike is no level, and must not place it
    # What the line foretells wrongly lies in both parts; so their means are compared and none of them is held to be zero.
    sizes = np.arange(1, len(over))
    sums = np.cumsum(over)
    heights = (sums[-1] - sums[:-1]) / sizes[::-1] - sums[:-1] / sizes
    power = np.where(heights > 0, heights**2 * sizes * sizes[::-1] / len(over), 0.0)
    place = LEAST + int(np.argmax(power[LEAST - 1 : -LEAST]))
    height = float(heights[place - 1]) - DOUBTS * float(trend.doubt(steps[-1:])[0]) / trend.noise
    if height < TOLD or steps[place] >= since:
        return None
    wrong = math.ceil(WRONG_BY * trend.correlation / height**2)
    return int(steps[place]), max(1, wrong) * stride
