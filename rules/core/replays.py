"""What a replay teaches: an attempt that makes the steps of another again reads the same data, or it does not (case A38).

With the same data and state a deterministic fault comes again. Losses of single steps carry the batch's own noise: where it is the
same in both attempts they read the same batches, in whatever order the records number them.
"""

from __future__ import annotations

import numpy as np

from .block import Floats
from .facts import Earlier, Facts
from .trace import Trace

#: Records in common that tell, and the most that are looked at.
ENOUGH, MOST = 20, 400
#: Steps by which two onsets may differ and still be the same step; a record may cover several.
NEAR = 3
#: Correlation of the step-to-step changes of both losses above which they are of the same batches, and below which they are not.
PAIRED, UNPAIRED = 0.8, 0.3


def same_data(facts: Facts, earlier: Earlier) -> bool | None:
    """Say whether an incident and an earlier one began with the same data; None where nothing tells.

    Positions number an order: where two attempts shuffled anew the same ones are other samples, which the losses before tell.
    """
    if facts.samples and earlier.samples:
        if not any(max(a, c) < min(b, d) for a, b in facts.samples for c, d in earlier.samples):
            return False
    elif abs(facts.onset - earlier.onset) > max(NEAR * facts.trace.stride(), facts.uncertainty):
        return False
    other = facts.traces.get(earlier.attempt)
    paired = None if other is None else same_losses(facts.trace, other, facts.onset)
    return (True if facts.samples and earlier.samples else None) if paired is None else paired


def same_losses(trace: Trace, other: Trace, before: int) -> bool | None:
    """Say whether two attempts read the same batches before step ``before``, by their losses; None where that is open."""
    steps, mine, theirs = np.intersect1d(trace.steps, other.steps, assume_unique=True, return_indices=True)
    wanted = steps < before
    one, two = trace.column("loss")[mine[wanted]][-MOST:], other.column("loss")[theirs[wanted]][-MOST:]
    known = np.isfinite(one) & np.isfinite(two)
    one, two = one[known], two[known]
    if len(one) < ENOUGH:
        return None
    correlation = _correlation(np.diff(one), np.diff(two))
    if correlation is None:
        return None
    return True if correlation >= PAIRED else False if correlation <= UNPAIRED else None


def same_samples(trace: Trace, other: Trace, first: int, last: int) -> bool | None:
    """Say whether two attempts consumed the same positions in the steps ``first`` to ``last``; None where nothing tells."""
    told = False
    for row in range(trace.row(first), min(trace.row(last + 1), len(trace))):
        step = int(trace.steps[row])
        place = other.row(step)
        if place >= len(other) or int(other.steps[place]) != step:
            continue
        ours, theirs = trace.samples(row), other.samples(place)
        if ours and theirs:
            told = True
            if ours != theirs:
                return False
    return True if told else None


def same_batches(trace: Trace, other: Trace, first: int, onset: int) -> bool:
    """Say whether two attempts read the same batches up to ``onset``, by their positions since ``first`` and by their losses.

    The same positions of another order are other samples: only the losses tell that (case A24), and where they tell nothing the positions
    count.
    """
    samples, losses = same_samples(trace, other, first, onset), same_losses(trace, other, onset)
    return samples is not False and bool(samples if losses is None else losses)


def _correlation(one: Floats, two: Floats) -> float | None:
    """Return Pearson's correlation by ranks (Spearman), which a spike in one of the two does not rule; None without variation."""
    first, second = np.argsort(np.argsort(one)).astype(np.float64), np.argsort(np.argsort(two)).astype(np.float64)
    if not one.any() or not two.any() or len(first) < 2:
        return None
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / size if size > 0 else None
