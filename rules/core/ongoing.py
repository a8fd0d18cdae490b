"""A fault that goes on after its incident was handed to a person, dismissed, or written down as doing no harm.

Nothing more happens to such an incident, but what its fault still does belongs to it: the alerts of slower rules, of another threshold, of
a spike on top of it. They join it and nobody is told again. It is over once the loss is back at the trend before it, or has settled
at another level, which is then the normal one (cases B08, A39). What is graver is another event: a value that is not finite, a collapse,
a loss that runs away from the level that a person was told of.

Nothing is remembered for it: whether it goes on is read off the records when an alert fires.
"""

from __future__ import annotations

import numpy as np

from .delivery import rank
from .facts import LOSS_SDS, TREND_RECORDS, high_loss
from .healing import ERRORS, SDS, STILL_FALLING, stands_above
from .planned import parted
from .seeing import Change
from .settings import Settings
from .state import Alive, Incident, Run
from .trend import Trend, fit, shift
from .verdict import LASTS_RECORDS, LEVEL_CLAIMS, STANDING

#: States in which an incident has ended although its fault may go on.
HANDED_OVER = ("escalated", "dismissed", "inconclusive")
#: Verdicts of faults that no level of the loss explains.
GRAVER = ("nonfinite", "scale_collapse", "grad_collapse", "stall", "mismatch")
#: Verdicts of rules that speak of the loss's level, and of its size: what is known of the loss explains them.
LEVELS = (*LEVEL_CLAIMS, "drift")
SIZES = (*LEVELS, "outlier", "transient_spike", "slow_recovery")
#: Newest records that tell whether the loss runs away, and the factor on what it was handed over with.
NEWEST, RUNS_AWAY = 20, 2.0
#: Newest records of which one must be abnormal where the loss is said to be.
NOW = 3


def ongoing(run: Run, alive: Alive, change: Change, settings: Settings) -> tuple[Incident | None, Incident | None]:
    """Return the ended incident that takes a firing alert into itself, and the one behind which it is graver; at most one of both."""
    ended = [one for one in run.incidents.values() if one.start_id == alive.start.start_id and one.state in HANDED_OVER]
    behind = None
    for incident in sorted(ended, key=lambda one: (one.opened_step, one.id), reverse=True):
        if incident.excused or parted(alive.changes, incident.onset, change.step) is not None:
            continue
        if incident.state == "inconclusive" and change.rule not in incident.rules:
            continue  # it did no harm: what its own rules do not say is another matter
        if not _goes_on(incident, alive, change, settings):
            continue
        if not _graver(incident, alive, change, settings):
            return incident, None
        behind = incident  # at last the oldest one
    return None, behind


def _goes_on(incident: Incident, alive: Alive, change: Change, settings: Settings) -> bool:
    since, trend = change.since, incident.trend
    active = incident.last_active_step
    quiet = since - active
    if quiet < settings.heal_steps and (change.rule in incident.rules or trend is None):
        return True
    if trend is None:
        return _still_fires(incident, alive, change)
    if not _back(incident, trend, alive, since, settings) and not _settled(incident, trend, alive, since, settings):
        return True
    if _still_fires(incident, alive, change) and not _abnormal(alive, trend):
        return True
    return change.labels.get("verdict") in LEVELS and _old_level(incident, trend, alive, since, settings)


def _still_fires(incident: Incident, alive: Alive, change: Change) -> bool:
    """Say whether a rule of the incident fires that speaks neither of the loss's level nor of the run as a whole."""
    return any(
        name in incident.rules
        and name != change.rule
        and rank(seen.severity)
        and seen.verdict not in (*LEVEL_CLAIMS, *STANDING)
        for name, seen in alive.firing.items()
    )


def _active(incident: Incident) -> int:
    """Return the last step at which an alert of the incident fired or something was decided."""
    return max(incident.last_active_step, incident.closed_step or 0)


def _back(incident: Incident, trend: Trend, alive: Alive, since: int, settings: Settings) -> bool:
    """Say whether the loss was at the trend before the incident for the healing time before the alert began.

    What a rule compares may have begun to move ``level_steps`` before it holds: what was before that counts as well.
    """
    ends = (since, since - settings.level_steps)
    return any(_at_trend(incident, trend, alive, end, settings.heal_steps) for end in ends)


def _at_trend(incident: Incident, trend: Trend, alive: Alive, end: int, heal_steps: int) -> bool:
    trace = alive.trace
    rows = _rows(alive, incident.last_active_step, end, heal_steps)
    if rows is None or end - incident.last_active_step < heal_steps or high_loss(trace, rows, trend)[2].any():
        return False
    found = shift(trend, trace.steps[rows], trace.column("loss")[rows])
    return found is None or not stands_above(found, trend.noise)


def _settled(incident: Incident, trend: Trend, alive: Alive, since: int, settings: Settings) -> bool:
    """Say whether the loss ever stayed at one level, which no alert of the incident spoke of, long enough to be the normal one."""
    active, steps = _active(incident), settings.level_steps
    oldest = max(active, int(alive.trace.steps[0]) - 1) + steps
    return any(_level(trend, alive, active, end, steps) for end in range(since, oldest - 1, -max(1, steps // 2)))


def _level(trend: Trend, alive: Alive, active: int, end: int, steps: int) -> bool:
    trace = alive.trace
    rows = _rows(alive, active, end, steps)
    if rows is None or high_loss(trace, rows, trend)[2].any():
        return False
    places, losses = trace.steps[rows], trace.column("loss")[rows]
    half = len(places) // 2
    older, newer = shift(trend, places[:half], losses[:half]), shift(trend, places[half:], losses[half:])
    if older is None or newer is None:
        return True
    noise = trend.noise * max(ERRORS * (2 * trend.correlation / max(half, 1)) ** 0.5, SDS)
    return bool(STILL_FALLING * older.excess <= newer.excess <= older.excess + noise)


def _rows(alive: Alive, after: int, since: int, steps: int) -> slice | None:
    """Return the rows of the last ``steps`` steps before ``since``, a handful at least; None where they reach back behind ``after``."""
    trace = alive.trace
    end = trace.row(since)
    first = min(trace.row(since - steps), end - LASTS_RECORDS)
    return slice(first, end) if first >= 0 and int(trace.steps[first]) > after else None


def _abnormal(alive: Alive, trend: Trend) -> bool:
    size = len(alive.trace)
    return bool(high_loss(alive.trace, slice(max(0, size - NOW), size), trend)[1].any())


def _high(alive: Alive, trend: Trend | None) -> bool:
    """Say whether the newest losses lie above the trend before the incident."""
    found = None if trend is None else shift(trend, alive.trace.steps[-NEWEST:], alive.trace.column("loss")[-NEWEST:])
    return trend is not None and found is not None and stands_above(found, trend.noise)


def _old_level(incident: Incident, trend: Trend, alive: Alive, since: int, settings: Settings) -> bool:
    """Say whether a rule that speaks of the loss's level says nothing but that it never came back, or slowly: it has not risen since.

    What a rule compares may have begun to move ``level_steps`` before it holds.
    """
    trace = alive.trace
    end = trace.row(since - settings.level_steps)
    ended = incident.last_active_step if incident.closed_step is None else incident.closed_step
    first = max(trace.row(ended + 1), end - TREND_RECORDS)
    normal = fit(trace.steps[first:end], trace.column("loss")[first:end]) if first < end else None
    new = None if normal is None else shift(normal, trace.steps[-NEWEST:], trace.column("loss")[-NEWEST:])
    if normal is None or new is None:
        return False
    if new.excess > max(ERRORS * new.error, SDS * normal.noise) / 2 and not _lower(alive, end, settings.level_steps):
        return False
    since_then = slice(
        trace.row(ended + 1), end
    )  # where it was high, a rule that looks far back still sees that (case A04)
    came_down = shift(trend, trace.steps[since_then], trace.column("loss")[since_then])
    return _high(alive, trend) or (came_down is not None and stands_above(came_down, trend.noise))


def _lower(alive: Alive, end: int, steps: int) -> bool:
    """Say whether the newest losses are lower than those of the ``steps`` before row ``end``: a way back that flattens is no rise."""
    trace = alive.trace
    first = trace.row(int(trace.steps[max(end - 1, 0)]) - steps)
    before, now = trace.column("loss")[first:end], trace.column("loss")[-NEWEST:]
    before, now = before[np.isfinite(before)], now[np.isfinite(now)]
    return bool(len(before) and len(now) and np.median(now) < np.median(before))


def _graver(incident: Incident, alive: Alive, change: Change, settings: Settings) -> bool:
    """Say whether a person must hear of an alert although the incident goes on."""
    verdict = change.labels.get("verdict", "")
    if rank(change.labels.get("severity", "warning")) > rank(incident.severity):
        if verdict not in SIZES:
            return True
        if incident.verdict not in (*LEVEL_CLAIMS, "nonfinite") and _high(alive, incident.trend):
            return True  # a spike was dismissed, and the loss stays there
    if verdict == "nonfinite":
        return not _destroyed(incident, alive, change.since, settings)
    if verdict in GRAVER:
        return verdict != incident.verdict and all(seen.verdict != verdict for seen in incident.rules.values())
    return incident.verdict not in ("divergence", "nonfinite") and _runs_away(incident, alive)


def _destroyed(incident: Incident, alive: Alive, since: int, settings: Settings) -> bool:
    """Say whether enough of the incident's losses were not finite before that a person was told so: one that passed is no warning."""
    trace = alive.trace
    if incident.verdict != "nonfinite":
        return False
    need = max(2, settings.nonfinite_steps // trace.stride())
    return int(high_loss(trace, trace.rows(incident.onset, since), incident.trend)[2].sum()) >= need


def _runs_away(incident: Incident, alive: Alive) -> bool:
    """Say whether the newest losses lie far above those that the incident ended with."""
    trace, trend, closed = alive.trace, incident.trend, incident.closed_step
    if trend is None or closed is None:
        return False
    end = trace.row(closed + 1)
    if len(trace) - end < NEWEST:
        return False
    before = _excess(alive, trend, slice(max(trace.row(incident.onset), end - NEWEST), end))
    now = _excess(alive, trend, slice(len(trace) - NEWEST, len(trace)))
    return before is not None and now is not None and now > max(RUNS_AWAY * before, before + LOSS_SDS * trend.noise)


def _excess(alive: Alive, trend: Trend, rows: slice) -> float | None:
    over = alive.trace.column("loss")[rows] - trend.at(alive.trace.steps[rows])
    finite = over[np.isfinite(over)]
    return float(np.median(finite)) if len(finite) else None
