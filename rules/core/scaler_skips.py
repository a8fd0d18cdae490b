"""How many steps a GradScaler has skipped: its work, and no fault, so it is a notice alone (cases A15, B06).

One notice a start, whose number is brought up to date as it doubles. What is too much of it is for the rules to say.
"""

from __future__ import annotations

import numpy as np

from .block import Block
from .counted import counted
from .instrument import Watch

#: Where the count is kept among what is remembered of signals.
NAME = "scaler skips"


def look(watches: dict[str, Watch], block: Block) -> tuple[int, str] | None:
    """Take records in order; return the step of the first skip and what is to be said, where it is the first or they have doubled."""
    skipped, scale = block.columns.get(("skipped",)), block.columns.get(("loss_scale",))
    if skipped is None or scale is None:
        return None
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero(skipped.present & scale.present & (skipped.values > 0))
    if not len(rows):
        return None
    watch = watches.setdefault(NAME, Watch())
    found = None
    for row in rows:
        step, before = int(block.step[row]), watch.held
        if not before:
            watch.last = float(step)
        watch.held += max(1, round(min(float(skipped.values[row]), float(block.stride[row]))))
        if before == 0 or int(np.log2(watch.held)) > int(np.log2(before)):
            since = int(watch.last)
            where = f"at step {since}" if since == step else f"between steps {since} and {step}"
            found = (
                since,
                f"The GradScaler skipped {counted(watch.held, 'step')} {where}: its work, as long as it is seldom.",
            )
    return found
