"""The framework made the step again itself, and its exit code says what came of it (case E10).

Another result of the same step is a passing fault: the numbers went wrong once, and a device is the likeliest reason. The same result is a
deterministic one, of the data or of a kernel.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The start did not end with a code that tells of a step made again."

#: Exit codes of Megatron-LM's rerun machine.
DISAMBIGUATE, FAILED = 16, 17


def find(facts: Facts) -> Evidence:
    """Return findings where the start ended with such a code."""
    if facts.exit_code is None:
        return NotPossible("the start has not ended with a code that tells")
    if facts.exit_code == FAILED:
        says = "The framework made the step again and got another result (exit code 17): a passing fault, and the data is cleared."
        test = "Run the self-test of the devices of the ranks that failed, before they are trusted again."
        return [
            Finding(kind="exit_code", step=facts.now, cause="numeric", weight=0.8, says=says, test=test),
            Finding(kind="exit_code", step=facts.now, cause="hardware", weight=0.5, says=says),
            *(
                Finding(kind="exit_code", step=facts.now, cause=cause, weight=-0.8, says=says)
                for cause in ("data", "model")
            ),
        ]
    if facts.exit_code == DISAMBIGUATE:
        says = "The framework made the step again and got the same result (exit code 16): it is deterministic on this device."
        return [
            Finding(kind="exit_code", step=facts.now, cause="numeric", weight=0.4, says=says),
            Finding(kind="exit_code", step=facts.now, cause="data", weight=0.3, says=says),
            Finding(kind="exit_code", step=facts.now, cause="hardware", weight=0.2, says=says),
        ]
    return []
