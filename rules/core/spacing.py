"""Are checkpoints too rare, or kept too briefly? What a rollback costs, beside what it would cost if one lay where the cause asks for it.

What cannot be helped are the steps since the onset, and one memory of the second moment where the optimizer carries the damage. The rest
is the distance to the next older checkpoint. Where that alone is more than what cannot be helped, a closer spacing would have halved the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwarden.rules.core.counted import counted

from .state import Checkpoint
from .targets import Choice

#: Records that a closer spacing must save to be worth a word.
WORTH = 20


@dataclass(frozen=True, slots=True)
class Going:
    """A way back: from ``now`` to a target, for an onset that may lie ``uncertainty`` steps earlier; ``seconds`` is the usual step's time."""

    onset: int
    uncertainty: int
    now: int
    stride: int
    seconds: float | None


def interval(checkpoints: Sequence[Checkpoint]) -> int | None:
    """Return the usual steps between two complete checkpoints of one attempt, None where there are fewer than two."""
    steps: dict[int, set[int]] = {}
    for one in checkpoints:
        if one.complete is True:
            steps.setdefault(one.attempt, set()).add(one.step)
    gaps = [gap for of_attempt in steps.values() if len(of_attempt) > 1 for gap in np.diff(sorted(of_attempt))]
    return int(np.median(gaps)) if gaps else None


def advice(choice: Choice, checkpoints: Sequence[Checkpoint], going: Going) -> list[str]:
    """Return what to change about the run's checkpoints, in words; nothing where they are close and old enough."""
    every = interval(checkpoints)
    found = []
    if choice.too_young and choice.memory is not None:
        kept = going.onset - min(target.step for target in (choice.target, *choice.fallbacks))
        says = (
            f"No checkpoint that may be loaded is older than the onset by one memory of the second moment ({choice.memory} steps); the "
            f"oldest at hand lies {counted(kept, 'step')} before it."
        )
        if every is not None:
            number = math.ceil((choice.memory + going.uncertainty) / every) + 1
            says += f" At one every {every} steps keep {counted(number, 'checkpoint')}, or one of them for as long."
        found.append(says)
    wanted = choice.wanted
    cannot_help, more = going.now - wanted, wanted - 1 - choice.target.step
    if more > max(cannot_help, WORTH * going.stride):
        total = going.now - choice.target.step
        cost = "" if going.seconds is None else f" ({hours(total * going.seconds / going.stride)})"
        spaced = f", which come every {every} steps" if every is not None else ""
        found.append(
            f"Checkpoints are too rare{spaced}: going back makes {counted(total, 'step')} again{cost}, {more} of them only because none "
            f"lies closer before step {wanted}. One every {max(1, cannot_help)} steps would at least halve that."
        )
    return found


def none_at_all(checkpoints: Sequence[Checkpoint], onset: int) -> str:
    """Return in words why there was nothing to go back to, and what would have helped."""
    every = interval(checkpoints)
    complete = [one.step for one in checkpoints if one.complete is True]
    if not complete:
        return "No complete checkpoint was ever reported: let the run save some, and tell the exporter of each."
    if min(complete) >= onset:
        return f"The first checkpoint is of step {min(complete)}: save one earlier, and keep it."
    spaced = "" if every is None else f" They come every {every} steps."
    return f"None of those before step {onset} may be loaded any more: keep them for longer.{spaced}"


def hours(seconds: float) -> str:
    """Return a duration in words: seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
