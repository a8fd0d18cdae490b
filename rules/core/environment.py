"""What a start runs with that the attempt before it did not: versions, precision, settings, hosts (case F01).

A library, a node or a hyperparameter that changed is no fault by itself, and no alert: it is said once as a notice, with what it did to the
activations, and an incident of that start has it as evidence. What stands in a start event is what took effect, not what a file asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainwarden.record import Event

from .instrument_scale import COMPARED
from .makeup import EARLY, INSIDE
from .state import Alive, Run
from .turn import Turn

#: Fields of a start event that are a start's own, or told elsewhere.
OWN = frozenset(
    {
        *("run_uid", "run", "attempt", "start_id", "rank", "local_rank", "pid", "host", "hosts", "world_size"),
        *("resumed_from", "plan_applied", "plan", "probe", "notices", "timed", "time", "step", "port"),
    }
)
#: Fields that hold more fields.
INNER = ("environment", "labels", "versions", "config", "hyperparameters")
#: Fields that are remembered, characters of each, and changes that a sentence names.
FIELDS, LONGEST, NAMED = 96, 120, 6
#: Standard deviations and share of its usual value by which a level must have moved.
SDS, SHARE = 4.0, 0.05


def look(turn: Turn, run: Run, alive: Alive, event: Event) -> None:
    """Compare a start's first event with that of the start before, and say once what is another one."""
    before, now = run.environment, taken(event.fields)
    run.environment = now
    changed = [
        f"{name} {before[name]} -> {value}" for name, value in now.items() if name in before and before[name] != value
    ]
    if before:
        alive.environment = ""
    if not changed:
        return
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    alive.environment = ", ".join(changed[:NAMED]) + more
    step = alive.resumed_from if alive.resumed_from is not None else event.step
    says = f"Attempt {alive.start.attempt} runs otherwise than the one before it: {alive.environment}."
    turn.notice(alive.start, "environment_change", step, says)


def taken(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the plain fields of a start event as text, those of its parts included."""
    found: dict[str, str] = {}
    inner = [fields.get(name) for name in INNER]
    for source in (fields, *(one for one in inner if isinstance(one, Mapping))):
        for name, value in source.items():
            plain = value if isinstance(value, list | tuple) else [value]
            if name in OWN or name in INNER or len(found) >= FIELDS or len(name) > LONGEST:
                continue
            if plain and all(isinstance(one, str | int | float) for one in plain):
                found[name] = (" ".join(map(str, plain)) if plain is value else str(value))[:LONGEST]
    return found


def say_levels(turn: Turn, alive: Alive, seen: int) -> None:
    """Say once, behind the first records, which activations have another level than before such a change."""
    makeup = alive.makeup
    if not alive.environment or not seen < COMPARED <= len(alive.trace):
        return
    for name, early in makeup.early.items():
        usual = makeup.usual.get(name, [])
        if not any(word in name for word in INSIDE) or len(early) < 2 or len(usual) < 2:
            continue
        level, now = float(np.mean(usual)), float(np.mean(early[:EARLY]))
        if level > 0 and abs(now - level) > max(SDS * float(np.std(usual)), SHARE * level):
            says = f"{name} is {now / level:.3g} times what it was before; the attempt runs otherwise: {alive.environment}."
            turn.notice(alive.start, "environment_change", int(alive.trace.steps[0]), says, name)
