"""Where the learning rate's warm-up ended before an onset: three of three failures of a run of 104 billion began there (case A03)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .facts import Facts

#: Known rates that tell a warm-up, and by how many times the rate must have risen over it.
ENOUGH, RISE = 20, 2.0
#: Share of the highest rate from which the top counts as reached.
TOP = 0.999
#: Share of the warm-up's length behind its top within which an onset lies at the peak, and records that count at least.
AT_PEAK, RECORDS = 0.5, 10


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The last rise of the rate to its highest value before an onset: from ``first`` to ``top``, in steps."""

    first: int
    top: int
    low: float
    high: float

    @property
    def steps(self) -> int:
        """How long it was."""
        return self.top - self.first


def warm_up(facts: Facts) -> WarmUp | None:
    """Return the warm-up whose top the rate reached before the onset; None where the records show none. It goes on behind a resume."""
    row = facts.trace.row(facts.onset + 1)
    steps, rates = facts.trace.steps[:row], facts.trace.column("lr")[:row]
    if facts.inherited is not None and len(steps):
        older = facts.inherited.row(int(steps[0]))
        steps = np.concatenate([facts.inherited.steps[:older], steps])
        rates = np.concatenate([facts.inherited.column("lr")[:older] * facts.planned.lr_factor, rates])
    known = np.isfinite(rates) & (rates > 0)
    steps, rates = steps[known], rates[known]
    if len(rates) < ENOUGH:
        return None
    top = int(np.argmax(rates >= TOP * float(np.max(rates))))
    falls = np.flatnonzero(np.diff(rates[: top + 1]) <= 0)
    first = int(falls[-1]) + 1 if len(falls) else 0
    if top - first < RECORDS or rates[top] < RISE * rates[first]:
        return None
    return WarmUp(int(steps[first]), int(steps[top]), float(rates[first]), float(rates[top]))


def at_peak(facts: Facts) -> WarmUp | None:
    """Return the warm-up shortly behind whose top the onset lies, or None."""
    found = warm_up(facts)
    if found is None:
        return None
    behind = facts.onset - found.top
    return found if 0 <= behind <= max(RECORDS * facts.trace.stride(), AT_PEAK * found.steps) else None
