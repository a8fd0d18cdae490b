"""Progress of a start: the phase that it is in, when it last gave a sign, and how long it may go on without one.

A gauge that stands still looks like a healthy one for 18 hours, and a fixed time limit pages at each evaluation (case D03): so each
phase has a budget of its own, learned from this start alone. A sign is a record, or the beginning or the end of a phase.
What a checkpoint's event says comes from any thread at any time, so it is none.

Two clocks are kept apart, for a trainer's may go wrong: durations are differences of the run's own times, and how long nothing came
is counted from the first tick behind a sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from msgspec import Struct, field

from trainwarden.record import Event, Step

from .inputs import SourceSeen
from .settings import Settings
from .stream import Cursor
from .trace import Trace

TRAIN, INIT, EXIT = "train", "init", "exit"
#: Phases that have budgets of their own. Any other word, one of the user's own, counts as training.
APART = ("evaluation", "checkpoint", "data")
#: What trainers call their phases.
ALIASES = MappingProxyType(
    {
        "eval": "evaluation",
        "validation": "evaluation",
        "save": "checkpoint",
        "saving": "checkpoint",
        "initialising": INIT,
        "initializing": INIT,
        "finished": EXIT,
    }
)
#: Usual steps without a record that are a stall, and the fewest that may be one however long a step takes.
STEPS, LEAST_STEPS = 20.0, 3.0
#: Usual durations of a phase that it may take (case D03: twice 12 minutes).
TIMES = 2.0
#: Durations of a phase that are remembered, and those from which they are believed.
DURATIONS, BELIEVED = 32, 3
#: Records whose distances tell the pace, and those in which a longer pause is looked for.
PACE_RECORDS, PAUSE_RECORDS = 50, 1000


class Spent(Struct, frozen=True):
    """How long a phase took, in seconds; ``step``: the step that ended it is in there."""

    seconds: float
    step: bool = False


class Progress(Struct):
    """What is remembered of a start's progress. Times are Unix seconds.

    ``since`` is the first tick behind the last sign: NaN until there is one, infinite until there is a sign. ``began`` is the
    beginning of the phase by the run's own clock. ``marked``: the run says when a phase begins. ``timed``: its times are real. ``allowed`` is the budget,
    once asked for since the last sign. ``unseen`` is when the sources ceased to answer, ``missed`` whether that was said.
    """

    phase: str = INIT
    since: float = math.inf
    began: float = math.nan
    marked: bool = False
    timed: bool = True
    spent: dict[str, list[Spent]] = field(default_factory=dict)
    allowed: float | None = None
    unseen: float | None = None
    missed: bool = False


def stepped(progress: Progress, records: Sequence[Step], *, leads: bool) -> None:
    """Take records as a sign; those of the rank that leads say which phase it is, and without one it is training."""
    if not records:
        return
    if leads:
        named = {record.phase for record in records}
        if len(named) > 1 or _phase(next(iter(named))) != progress.phase:
            for record in records:
                _enter(progress, _phase(record.phase), record.time, step=True)
    _sign(progress)


def happened(progress: Progress, event: Event, last_time: float) -> None:
    """Take an event of the rank that leads; ``last_time`` is the time of its last record, NaN where there is none.

    ``start`` begins anew. ``phase`` with a field ``phase``, or an event of a phase's name with ``state`` "begin" or "end", enter one
    and leave it. An ``evaluation`` without any is over when it is told, and began behind the last record.
    """
    name = _phase(event.kind) if event.kind in APART or event.kind in ALIASES else ""
    state = event.fields.get("state")
    if event.kind == "start":
        progress.phase, progress.began = INIT, event.time
        progress.timed = event.fields.get("timed") is not False
    elif event.kind == "phase":
        told = event.fields.get("phase")
        _enter(progress, _phase(told if isinstance(told, str) else None), event.time)
    elif name and state == "begin":
        _enter(progress, name, event.time)
    elif name and state == "end":
        _enter(progress, TRAIN, event.time)
    elif name == "evaluation" and progress.phase == TRAIN:
        if not progress.marked:
            _learn(progress, name, Spent(event.time - last_time))
    else:
        return
    _sign(progress)


def idle(progress: Progress, time: float) -> float:
    """Return for how many seconds there was no sign at a tick; less than 0 where there never was one."""
    if math.isnan(progress.since):
        progress.since = time
    return time - progress.since


def budget(progress: Progress, trace: Trace, settings: Settings) -> float:
    """Return how many seconds the present phase may go on without a sign.

    A step: 20 usual ones, or twice the longest pause that was none to speak of, up to ``stall_step_seconds``. A phase apart: twice
    its longest duration but one, so that a hang teaches nothing; until three are known, a configured time.
    """
    if progress.allowed is None:
        progress.allowed = max(settings.stall_seconds, _budget(progress, trace, settings))
    return progress.allowed


def answered(
    sources: Mapping[int, SourceSeen], cursors: Mapping[int, Cursor], time: float, oldest: float
) -> bool | None:
    """Say whether the sources answered within ``oldest`` seconds and have nothing newer; None where none answered.

    Silence of a source is no silence of the training (case E08; design §3.6).
    """
    fresh = [(rank, seen) for rank, seen in sources.items() if seen.reachable and time - seen.time <= oldest]
    if not fresh:
        return None
    return all(seen.caught_up and rank in cursors and cursors[rank].last_seq >= seen.last_seq for rank, seen in fresh)


def _phase(name: str | None) -> str:
    found = ALIASES.get(name or TRAIN, name or TRAIN)
    return found if found in APART or found in (INIT, EXIT) else TRAIN


def _sign(progress: Progress) -> None:
    progress.since = math.nan
    progress.allowed = None


def _enter(progress: Progress, phase: str, time: float, *, step: bool = False) -> None:
    if phase == progress.phase:
        return
    if progress.phase in APART:
        _learn(progress, progress.phase, Spent(time - progress.began, step))
    progress.phase, progress.began = phase, time
    progress.marked = progress.marked or phase in APART


def _learn(progress: Progress, phase: str, spent: Spent) -> None:
    if spent.seconds > 0 and math.isfinite(spent.seconds):
        durations = progress.spent.setdefault(phase, [])
        durations.append(spent)
        del durations[:-DURATIONS]


def _budget(progress: Progress, trace: Trace, settings: Settings) -> float:
    gaps = np.diff(trace.times()[-PAUSE_RECORDS:])
    gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
    pace = float(np.median(gaps[-PACE_RECORDS:])) if len(gaps) else 0.0
    if progress.phase in APART:
        return _of_phase(progress, progress.phase, pace, settings)
    if progress.phase == INIT or not len(trace):
        return settings.stall_init_seconds
    learned = STEPS * pace
    if not progress.marked:  # any pause may have been an evaluation
        pauses = gaps[gaps <= settings.stall_seconds]
        learned = max(learned, TIMES * float(pauses.max()) if len(pauses) else 0.0)
    found = max(LEAST_STEPS * pace, min(learned, settings.stall_step_seconds))
    known = progress.spent.get("evaluation", ())
    if not progress.marked and known:
        found = max(found, TIMES * max(one.seconds for one in known))
    return found


def _of_phase(progress: Progress, phase: str, pace: float, settings: Settings) -> float:
    until_known = {
        "evaluation": settings.stall_evaluation_seconds,
        "checkpoint": settings.stall_checkpoint_seconds,
    }.get(phase, settings.stall_seconds)
    durations = sorted(max(0.0, one.seconds - pace * one.step) for one in progress.spent.get(phase, ()))
    if len(durations) >= BELIEVED:
        return TIMES * durations[-2]
    return max(until_known, TIMES * max(durations, default=0.0))
