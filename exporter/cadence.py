"""When the costly probes run: every so many steps, and at every step for a while once something looks odd.

Reading parameters and moments at every step costs more than a tenth of a small model's step. The drain thread looks at
finished records and arms a flag of the host; the training thread reads it. That is no detection: it decides nothing but
how closely the next steps are looked at.
"""

from __future__ import annotations

import math

from trainwarden.record import Step

#: A value this many times above its own average, or so many times below, is looked at more closely.
ODD_FACTOR = {"loss": 1.2, "grad_norm": 2.0}
#: Decay of those averages, and the records they need before they count.
BETA, WARM_UP = 0.9, 10
#: Steps of close watching that can be saved up; each step earns a quarter of one, so that a run that is odd throughout
#: costs a quarter of what the costly probes cost.
SAVED, EARNED = 200.0, 0.25


class Cadence:
    """Tells the training thread whether a step is due. ``every`` 1 is every step."""

    def __init__(self, every: int = 10, watch_steps: int = 50) -> None:
        self.every = every
        self._watch = watch_steps
        self._until = 0
        self._saved = SAVED
        self._average: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def due(self, step: int) -> bool:
        """Say whether the costly probes run in ``step``. Called on the training thread, once a step."""
        if self.regular(step):
            return True
        self._saved = min(SAVED, self._saved + EARNED)
        if step > self._until or self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def regular(self, step: int) -> bool:
        """Say whether they run in ``step`` on every rank, whatever any of them has seen."""
        return step % self.every == 0 or step == 1

    def arm(self, step: int) -> None:
        """Have every step watched for a while after ``step``."""
        self._until = step + self._watch

    def look(self, step: Step) -> None:
        """Arm if the record looks odd: non-finite, skipped, or far from its own recent average."""
        if step.value("skipped") or step.value("clip_ratio") == math.inf or step.value("nonfinite", "activation"):
            self.arm(step.step)
        for name, factor in ODD_FACTOR.items():
            value = step.value(name)
            if value is None:
                continue
            if not math.isfinite(value):
                self.arm(step.step)
                continue
            average = self._average.get(name, value)
            seen = self._seen[name] = self._seen.get(name, 0) + 1
            if seen > WARM_UP and average > 0 and not average / factor <= value <= average * factor:
                self.arm(step.step)
            if average > 0:  # one outlier must not make what follows look odd
                value = min(max(value, average / factor), average * factor)
            self._average[name] = BETA * average + (1 - BETA) * value
