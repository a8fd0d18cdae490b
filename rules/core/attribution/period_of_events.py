"""Spikes at even distances come as something else in the job does: evaluations, checkpoints, epochs, shards, phases of the rate.

It fits if it comes at the same distance and the spikes lie at one and the same distance behind it; if it comes more often, if
they lie right behind it. Ends of epochs, beginnings of shards and restarts of the rate are looked for in the records as well.
Sources: case A29 (icefall 1676 and others: shards, gone after a global shuffle), case A39 (evaluations).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.trace import Trace

#: What is said where this line looked and found nothing.
CLEAR = "Spikes come at even distances, and nothing else in the job does."

#: Spikes that must be found in the records, those that are looked for at most, and the share of them that must fit.
LEAST, MOST, FIT = 3, 64, 0.8
#: Part of the period by which distances may differ, and by which the places behind may.
TOLERANCE, PLACE = 0.1, 0.05
#: Records by which places may differ however short the period is, and within which a spike is right behind something.
NEAR = 3
#: Records between two events from which more than one in a period may be told from chance.
RARE = 20
#: Growth of the learning rate from one record to the next that is a restart.
JUMP = 1.2

#: How each kind is called, what it speaks for and how strongly.
_KINDS = (
    ("evaluation", "the evaluations", "optimizer_state", 0.6),
    ("checkpoint", "the checkpoints", "optimizer_state", 0.6),
    ("epoch", "the epochs", "data", 0.7),
    ("shard", "the shards", "data", 0.7),
    ("lr_phase", "the learning rate's phases", "learning_rate", 0.7),
)


def find(facts: Facts) -> Evidence:
    """Return a finding for each kind that fits, or one that says that none does."""
    if facts.periodic is None:
        return NotPossible("no rule saw spikes at even distances: there is no period to compare")
    spikes = _spikes(facts, *facts.periodic)
    if len(spikes) < LEAST:
        return NotPossible("the records reach back over fewer than three of the spikes")
    period = float(np.median(np.diff(spikes)))
    stride = facts.trace.stride()
    known = {kind: _borders(facts, kind) for kind, _, _, _ in _KINDS}
    fits = [one for one in _KINDS if _fits(spikes, known[one[0]], period, stride)]
    every = f"The spikes come every {period:.0f} steps"
    if not fits:
        compared = [f"{name} every {_every(known[kind]):.0f}" for kind, name, _, _ in _KINDS if len(known[kind]) > 1]
        says = f"{every}, as nothing does that is known of" + (f" ({', '.join(compared)})." if compared else ".")
        return [Finding(kind="period", step=facts.onset, says=says)]
    found = []
    for kind, name, cause, weight in fits:
        borders = known[kind]
        last = max(border for border in borders if border <= spikes[-1] + stride)
        later = max(0, spikes[-1] - last)
        where = f"{later} step{'s' if later > 1 else ''} behind" if later else "at the same step"
        says = f"{every}, as {name} do, {where}."
        test = ""
        if cause == "optimizer_state":
            test = f"Run past the next {kind} without it: if the spike stays away, the {kind} leaves something behind."
        found.append(Finding(kind="period", step=last, cause=cause, weight=weight, says=says, test=test))
    return found


def _spikes(facts: Facts, since: int, period: float) -> list[int]:
    """Return the first records of the spikes that the period foretells from one of them, as far as the records reach."""
    trace = facts.trace
    found: list[int] = []
    half = max(2.0 * trace.stride(), 2 * TOLERANCE * period)
    first, last = int(trace.steps[0]), int(trace.steps[-1])
    newest = int((last - since) // period)
    for turn in range(max(int((first - since) // period), newest - MOST), newest + 1):
        middle = since + turn * period
        rows = trace.rows(int(middle - half), int(middle + half) + 1)
        loss = trace.column("loss")[rows]
        finite = np.flatnonzero(np.isfinite(loss))
        if middle - half < first or middle + half / 2 > last or len(finite) < 5:
            continue
        usual, top = float(np.median(loss[finite])), float(np.max(loss[finite]))
        place = int(np.argmax(np.nan_to_num(loss, nan=-np.inf) > usual + (top - usual) / 2))
        if top > usual:
            found.append(int(trace.steps[rows][place]))
    return found


def _borders(facts: Facts, kind: str) -> list[int]:
    """Return the steps at which something of a kind happened, as events or the records tell it."""
    told = facts.events.steps.get(kind)
    if told:
        return told
    trace = facts.trace
    if kind == "epoch":
        epochs = np.floor(trace.column("epoch"))
        return [int(step) for step in trace.steps[1:][np.diff(epochs) > 0]]
    if kind == "lr_phase":
        rates = trace.column("lr")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return [int(step) for step in trace.steps[1:][rates[1:] / rates[:-1] > JUMP]]
    if kind == "shard":
        shards = trace.shard_of[: len(trace)]
        found = [int(step) for step in trace.steps[1:][(np.diff(shards) != 0) & (shards[1:] >= 0)]]
        return found or _moves(trace, "shard") or _moves(trace, "shard_id")
    return []


def _moves(trace: Trace, name: str) -> list[int]:
    """Return the steps at which a number of the log's own, such as that of a shard, is another one than before."""
    known = np.flatnonzero(np.isfinite(trace.column(name)))
    values = trace.column(name)[known]
    return [int(step) for step in trace.steps[known][1:][np.diff(values) != 0]]


def _every(borders: Sequence[int]) -> float:
    return float(np.median(np.diff(borders)))


def _fits(spikes: Sequence[int], borders: Sequence[int], period: float, stride: int) -> bool:
    if len(borders) < LEAST:
        return False
    interval = _every(borders)
    places = np.searchsorted(borders, np.array(spikes) + stride, side="right") - 1
    behind = np.array(spikes)[places >= 0] - np.array(borders)[places[places >= 0]]
    if len(behind) < LEAST:
        return False
    if abs(interval - period) <= TOLERANCE * period:
        near = np.abs(behind - np.median(behind)) <= max(NEAR * stride, PLACE * period)
    elif RARE * stride <= interval < period:
        near = behind <= NEAR * stride
    else:
        return False
    return float(np.mean(near)) >= FIT
