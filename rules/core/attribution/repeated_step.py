"""An earlier attempt broke at the same step, near it, or the same time after its start (design §4.7; cases A03, A35, E05).

The same step again: the data, or a kernel that does the same with the same input; the kernel first where the numbers are narrow.
Near it, but not at it: no batch, but the place in the schedule: the model, or the learning rate where that was at its highest. The
same number of steps since the start at another step: the state of the process.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Earlier, Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.machines import listed, narrow
from trainwarden.rules.core.replays import same_data

#: What is said where this line looked and found nothing.
CLEAR = "No earlier attempt broke at this step, near it, or as many steps after its start."

#: Steps by which two onsets may differ and still be the same step; a record may cover several.
NEAR = 3
#: Share of the step by which two onsets may differ and still be near each other (case A03: 6900 and 7000).
SIMILAR = 0.02
#: An attempt must have run for so many times that distance before it broke, or it proves nothing.
RAN = 2


def find(facts: Facts) -> Evidence:
    """Return findings for the newest earlier incident that repeats."""
    if not facts.earlier:
        return NotPossible("no earlier attempt had an incident")
    near = max(NEAR * facts.trace.stride(), facts.uncertainty)
    since_start = None if facts.first_step is None else facts.onset - facts.first_step
    for earlier in reversed(facts.earlier):
        if abs(earlier.onset - facts.onset) <= near:
            return _same_step(facts, earlier)
        same_age = since_start is not None and earlier.since_start is not None
        if same_age and since_start and abs(since_start - (earlier.since_start or 0)) <= near:
            return _same_age(facts, earlier, since_start)
        distance = SIMILAR * facts.onset
        if abs(earlier.onset - facts.onset) <= distance and since_start is not None and since_start >= RAN * distance:
            return _near(facts, earlier)
    return []


def _same_step(facts: Facts, earlier: Earlier) -> list[Finding]:
    other = same_data(facts, earlier) is False
    if other and not facts.nonfinite.any():
        says = f"Attempt {earlier.attempt} broke at step {earlier.onset} too, with other data: it is not the batch."
        return _schedule(facts, "repeated_step", says)
    data, numeric = (0.3, 0.5) if narrow(facts.versions) else (0.45, 0.3)
    computed = listed([f"{name} {value}" for name, value in facts.versions.items()], most=8)
    says = f"Attempt {earlier.attempt} broke at step {earlier.onset} too: the data, or a deterministic kernel"
    if other:
        data, says = data / 3, f"{says}; its losses before are not those of the same batches"
    says += f" (computed with {computed})." if computed else "."
    return [
        Finding(kind="repeated_step", step=facts.onset, cause="data", weight=data, says=says),
        Finding(kind="repeated_step", step=facts.onset, cause="numeric", weight=numeric, says=says),
    ]


def _near(facts: Facts, earlier: Earlier) -> list[Finding]:
    says = (
        f"Attempt {earlier.attempt} broke at step {earlier.onset}, near this one and not at it: no batch does that, but the "
        "place in the schedule does."
    )
    return _schedule(facts, "repeated_nearby", says)


def _schedule(facts: Facts, kind: str, says: str) -> list[Finding]:
    rates = facts.before("lr", records=2000)
    rising = len(rates) >= 2 and rates[-1] >= 0.98 * float(np.max(rates)) and rates[-1] > 1.02 * float(np.min(rates))
    rate, model = (0.65, 0.2) if rising else (0.25, 0.65)
    return [
        Finding(kind=kind, step=facts.onset, cause="data", weight=-0.6, says=says),
        Finding(kind=kind, step=facts.onset, cause="learning_rate", weight=rate, says=says),
        Finding(kind=kind, step=facts.onset, cause="model", weight=model, says=says),
    ]


def _same_age(facts: Facts, earlier: Earlier, since_start: int) -> list[Finding]:
    says = (
        f"Attempt {earlier.attempt} broke at step {earlier.onset}, {counted(earlier.since_start or 0, 'step')} after its start, and this one "
        f"{since_start} after its own: the state of the process or a ramp that begins anew, not the data."
    )
    return [
        Finding(kind="repeated_age", step=facts.onset, cause="data", weight=-0.6, says=says),
        Finding(kind="repeated_age", step=facts.onset, cause="numeric", weight=-0.4, says=says),
    ]
