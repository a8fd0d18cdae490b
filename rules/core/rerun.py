"""A framework that makes a suspect step again by itself, and what its exit codes say of it (case E10).

Megatron-LM's rerun machine makes the step again in its place. If the result is another one it was a passing fault: the run ends with code 17,
and what it saved is for whoever looks into it. If it is the same it ends with code 16: start it again on other devices, and tell a passing fault
from a lasting one. While it is at it nothing is requested: two systems that mend one fault undo each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwarden.record import Event

from .state import Alive

#: The kind of the event that tells of it, with ``state`` begin or end.
KIND = "rerun"
#: Exit codes: start again to tell a passing fault from a lasting one, and a result that did not stand the test.
DISAMBIGUATE, FAILED = 16, 17
#: Parts of an exit's reason that mean the same where it has another code.
WORDS: tuple[tuple[str, int], ...] = (
    ("disambiguate", DISAMBIGUATE),
    ("transient", FAILED),
    ("result_validation", FAILED),
)


def heard(alive: Alive, event: Event) -> None:
    """Take the event that a step is made again, or that this is over."""
    over = event.fields.get("state") in ("end", "ended", "finished", "over")
    alive.rerun = None if over else event.step if event.step is not None else alive.line.released


def going_on(alive: Alive) -> bool:
    """Say whether a step is being made again: until that is said to be over, or a later step was recorded."""
    return alive.rerun is not None and alive.ended is None and not alive.line.released > alive.rerun


def code_of(fields: Mapping[str, Any]) -> int | None:
    """Return which of the two codes an exit has, by its number or its reason, or None."""
    code, reason = fields.get("code"), fields.get("reason")
    said = reason.lower().replace(" ", "_").replace("-", "_") if isinstance(reason, str) else ""
    found = next((number for word, number in WORDS if word in said), None)
    if found is None and said != "finished" and isinstance(code, int) and code in (DISAMBIGUATE, FAILED):
        found = code
    return found


def words(code: int) -> str:
    """Return what an exit code says, as a sentence."""
    if code == FAILED:
        return (
            "The run ended with code 17: made again, the step gave another result. A passing fault of the numbers, by a device most likely; "
            "starting again is right, from a checkpoint that was complete before."
        )
    return (
        "The run ended with code 16: made again, the step gave the same result. The framework asks to be started again on other devices, "
        "which tells a deterministic fault from one of a device."
    )
