"""What a resumed start is compared with, and what a comparison says at once: never an alert, the rules see to those.

The line that it resumed from is the parent's records up to the resume, and behind it those of steps that are made again. What a
plan changed, or an event announced, is no longer what is expected of the new start and is left out of the line (design §4.10).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from trainwarden.rules.core.counted import counted

from .block import Block, Bools, Column, Floats, Key, Parent
from .trace import TRACKED, Trace
from .trend import Shift, Trend, fit, shift

#: Steps behind the resume for which the line may be asked for; further on only the parent's records of the same steps.
COMPARED_STEPS = 1000
#: What the rule language can ask of a parent: the signals that the trace remembers, with their labels.
REMEMBERED: frozenset[Key] = frozenset(labels for _, labels in TRACKED)
#: Records of steps that were made twice, from which their differences are told.
ENOUGH = 5
#: Losses of the same step in two attempts differ by less than this share of their level where everything was restored.
RESTORED = 1e-3

#: Newest records of the parent that its line goes through; no older than this share of the step of the resume.
LINE_RECORDS, LINE_FROM = 600, 0.4
#: Losses since the resume that are compared with the line, and the standard errors and deviations from which they are off it.
OFF_RECORDS, OFF_ERRORS, OFF_SDS = 60, 3.0, 1.0

#: Signals that say what the optimizer did.
_OPTIMIZER = ("optimizer_step", "moment_rms", "update_ratio")
#: What an event of this kind, or a part of a plan, makes incomparable with the parent.
_CHANGED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lr_phase", ("lr", "update_ratio")),
    ("batch_size", ("lr", "update_ratio", "loss", "grad_norm", "sample_position")),
    ("stage", ("lr", "update_ratio", "loss", "grad_norm", "sample_position")),
    ("mixture", ("loss", "grad_norm", "sample_position")),
    ("reset", (*_OPTIMIZER, "loss", "grad_norm")),
    ("ramp", ("lr", "update_ratio", "loss")),
    ("factor", ("update_ratio", "loss")),
    ("skip", ("sample_position", "loss")),
    ("unit of loss", ("loss",)),
    ("unit of grad_norm", ("grad_norm",)),
)
#: Kinds of events that announce such a change.
ANNOUNCING = ("lr_phase", "batch_size", "stage", "mixture")


#: The word of a start event that tells of another number of ranks: a step may read another number of samples.
RANKS = "ranks"


class Planned(Struct, frozen=True):
    """What a start does on purpose differently from its parent: the plan's factor on the rate, and words of ``_CHANGED``.

    ``pace``: by how much more samples a step may read, at most; with it comes the word :data:`RANKS`.
    """

    lr_factor: float = 1.0
    changed: tuple[str, ...] = ()
    pace: float = 1.0

    def leaves_out(self, signal: str) -> bool:
        """Say whether a signal of this name is no longer comparable."""
        return any(word in self.changed and signal in signals for word, signals in _CHANGED)


#: Nothing.
UNPLANNED = Planned()


def parent_of(inherited: Trace, beyond: Trace | None, resumed_from: int, planned: Planned) -> Parent:
    """Return the line as a block: the inherited rows and those beyond the resume, with the planned rate."""
    parts = [inherited] if beyond is None or not len(beyond) else [inherited, beyond]
    columns: dict[Key, Column] = {}
    for name, key in TRACKED:
        if planned.leaves_out(key[0]) or not any(name in part.values for part in parts):
            continue
        values = np.concatenate([part.column(name) for part in parts])
        present = np.concatenate([part.measured(name) for part in parts])
        if key[0] == "lr":
            values = values * planned.lr_factor
        elif key[0] == "sample_position" and RANKS in planned.changed:
            values = _paced(values, present, len(inherited), planned.pace)
        columns[key] = Column(values, present)
    block = Block(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.times() for part in parts]),
        np.concatenate([part.stride_column[: len(part)] for part in parts]),
        columns,
        {},
    )
    return Parent(block, resumed_from, last_compared(inherited, beyond, resumed_from))


def _paced(values: Floats, present: Bools, rows: int, pace: float) -> Floats:
    """Return positions that come to the same one at the resume, behind ``rows`` rows, at another pace; none of what is made again.

    How many samples a step reads under other ranks is not told: the accumulation may make up for them. So the pace is the largest that
    may be, what was read up to the resume is exact, and the parent's position at a step behind it says nothing.
    """
    known = np.flatnonzero(present[:rows])
    if len(known):
        end = values[known[-1]]
        values = end + (values - end) * pace
    # What is absent would be taken for the last one that was there; nothing is equal to NaN, and nothing above it.
    return np.where(np.arange(len(values)) < rows, values, np.nan)


@dataclass(frozen=True, slots=True)
class Departed:
    """How far the first losses since a resume lie from where the parent's line leads; ``trend`` is that line."""

    trend: Trend
    shift: Shift

    @property
    def off(self) -> bool:
        """Whether that is more than noise."""
        return abs(self.shift.excess) > max(OFF_ERRORS * self.shift.error, OFF_SDS * self.trend.noise)


def line_of(inherited: Trace, resumed_from: int) -> Trend | None:
    """Return the trend of the parent's loss up to the resume."""
    rows = slice(max(0, len(inherited) - LINE_RECORDS), len(inherited))
    kept = inherited.steps[rows] >= LINE_FROM * resumed_from
    return fit(inherited.steps[rows][kept], inherited.column("loss")[rows][kept])


def departed(inherited: Trace, own: Trace, resumed_from: int) -> Departed | None:
    """Compare the first losses since a resume with the parent's line; None where there is no line or no loss."""
    first = own.row(resumed_from + 1)
    rows = slice(first, first + OFF_RECORDS)
    trend = line_of(inherited, resumed_from)
    found = None if trend is None else shift(trend, own.steps[rows], own.column("loss")[rows])
    return None if trend is None or found is None else Departed(trend, found)


def last_compared(inherited: Trace, beyond: Trace | None, resumed_from: int) -> int:
    """Return the step up to which anything can be asked of the parent."""
    reach = resumed_from + COMPARED_STEPS * inherited.stride()
    return reach if beyond is None or not len(beyond) else max(reach, int(beyond.steps[-1]))


def same_steps(own: Trace, beyond: Trace) -> tuple[Floats, Floats, list[int]]:
    """Return the losses of the steps that both attempts made, the new ones and the abandoned ones, with the steps."""
    steps, ours, theirs = np.intersect1d(own.steps, beyond.steps, assume_unique=True, return_indices=True)
    return own.column("loss")[ours], beyond.column("loss")[theirs], steps.tolist()


def restore_check(own: Trace, beyond: Trace) -> tuple[int, str] | None:
    """Return the last step that was made twice and what the comparison says, or None where there is too little to compare.

    Case B05: what a backward step repeats is compared and never averaged.
    """
    now, before, steps = same_steps(own, beyond)
    both = np.isfinite(now) & np.isfinite(before)
    if int(both.sum()) < min(ENOUGH, len(beyond)) or not both.any():
        return None
    differences = np.abs(now - before)[both]
    place = int(np.argmax(differences))
    at = [step for step, here in zip(steps, both.tolist(), strict=True) if here]
    largest, level = float(differences[place]), float(np.median(np.abs(before[both])))
    verdict = "the state and the data of the first time" if largest <= RESTORED * level else "not the same numbers"
    says = (
        f"{counted(len(at), 'step')} from {at[0]} to {at[-1]} {'was' if len(at) == 1 else 'were'} made again: their losses differ by at most {largest:.4g} "
        f"(at step {at[place]}): {verdict}."
    )
    return at[-1], says
