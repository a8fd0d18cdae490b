"""What is wrong with the settings of a run, said once as a notice: nobody is woken, and nothing is judged.

Some of it stands in the start event. Some the exporter finds by itself, and tells of by an event ``preflight``. The rest shows in the
records: an alert with the label ``notice`` writes a notice of that kind the first time that it fires in a start.
"""

from __future__ import annotations

from typing import Any

from trainwarden.record import Event

from .seeing import Change
from .state import Alive
from .turn import Turn

#: Precisions in which an optimizer's moments lose what they should add up.
LOW = ("bfloat16", "float16")
#: Characters of the name of a check and of what it says, and checks of a start, that are taken: a peer's line is no book.
LONGEST_NAME, LONGEST, CHECKS = 40, 600, 32


def described(turn: Turn, alive: Alive, event: Event) -> None:
    """Look at what a start event says of the run."""
    dtype: Any = event.fields.get("optimizer_state_dtype")
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in LOW:
        name = dtype.removeprefix("torch.")
        says = (
            f"The optimizer keeps its moments in {name}: small updates and slow averages are rounded away. "
            "Keep them, and a copy of the parameters, in float32."
        )
        turn.notice(alive.start, "preflight", event.step, says, "optimizer_state_dtype")


def told(turn: Turn, alive: Alive, event: Event) -> None:
    """Take what the exporter found, once a check."""
    check: Any = event.fields.get("check")
    says: Any = event.fields.get("says")
    if not (
        isinstance(check, str) and isinstance(says, str) and 0 < len(check) <= LONGEST_NAME and 0 < len(says) <= LONGEST
    ):
        return
    mark = f"preflight {check}"
    known = [one for one in alive.noticed if one.startswith("preflight ")]
    if mark in known or len(known) >= CHECKS:
        return
    alive.noticed.append(mark)
    turn.notice(alive.start, "preflight", event.step, says, check)


def say_once(turn: Turn, alive: Alive, change: Change) -> None:
    """Write the notice that a firing alert's label asks for."""
    kind = change.labels.get("notice", "")
    if not kind or change.rule in alive.noticed:
        return
    alive.noticed.append(change.rule)
    says = f"{change.rule} holds since step {change.since}: a setting does not do what it is there for."
    turn.notice(alive.start, kind, change.since, says)
