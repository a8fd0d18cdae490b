"""An earlier attempt broke at the same step, or the same time after its start (design §4.7; cases A35, E05).

The same step again: the data, or a kernel that does the same with the same input. The same number of steps since the start at another
step: the state of the process.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Facts, Finding

#: Steps by which two onsets may differ and still be the same step.
NEAR = 3


def find(facts: Facts) -> list[Finding]:
    """Return findings for the newest earlier incident that repeats."""
    near = NEAR * facts.trace.stride()
    since_start = None if facts.first_step is None else facts.onset - facts.first_step
    for earlier in reversed(facts.earlier):
        if abs(earlier.onset - facts.onset) <= near:
            says = f"Attempt {earlier.attempt} broke at step {earlier.onset} too: the data, or a deterministic kernel."
            return [
                Finding(kind="repeated_step", step=facts.onset, cause="data", weight=0.35, says=says),
                Finding(kind="repeated_step", step=facts.onset, cause="numeric", weight=0.3, says=says),
            ]
        same_age = since_start is not None and earlier.since_start is not None
        if same_age and since_start and abs(since_start - (earlier.since_start or 0)) <= near:
            return [
                Finding(
                    kind="repeated_step",
                    step=facts.onset,
                    cause="data",
                    weight=-0.4,
                    says=f"Attempt {earlier.attempt} broke as many steps after its start: the process's state, not the data.",
                )
            ]
    return []
