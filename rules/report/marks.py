"""What is marked over a curve: incidents, planned changes with their burn-in, attempts and other events; and what marks mean.

Checkpoints and evaluations are many and rarely the matter: short ticks on the step axis (:func:`ticks`), no lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwarden.rules.core.planned import Announced, add, of_event, of_settings
from trainwarden.rules.core.settings import Settings

from . import words
from .curve import Mark
from .recorded import Recorded, StartColumns
from .scale import whole

#: Kinds of events that are marked by a line; the kinds of planned changes are, unless their event says that nothing was planned.
MARKED = ("resume", "epoch")
#: Kinds of events that are ticks on the step axis.
TICKED = ("checkpoint", "evaluation")
#: Characters of a label; the whole text shows under the pointer and in the notices.
LONGEST_LABEL = 24
#: What a mark of each look means, in the order of a legend.
MEANINGS = {
    "critical": "critical incident",
    "warning": "incident of severity warning",
    "info": "incident of severity info",
    "planned": "planned change with its burn-in",
    "attempt": "attempt begins",
    "event": "event",
}


def announced(recorded: Recorded, settings: Settings, run: str) -> list[Announced]:
    """Return the planned changes of a run, as events or the configuration told them, by step; those of its first step are left out."""
    changes: list[Announced] = []
    for kept in recorded.starts:
        for event in kept.events:
            found = of_event(event, -1 if event.step is None else event.step, settings)
            if found is not None and found.step >= 0:
                add(changes, found)
    for one in of_settings(settings, run):
        add(changes, one)
    first, last = recorded.extent()
    return [one for one in changes if first <= one.step < last]


def of_changes(changes: Sequence[Announced]) -> list[Mark]:
    """Return a labelled mark for each planned change, with a band as long as its burn-in."""
    marks = []
    for one in changes:
        says = f"Planned change from step {whole(one.step + 1)}: {one.name}"
        says += f"; burn-in up to step {whole(one.end)}" if one.settle else ""
        marks.append(Mark(one.step + 1, "planned", says, one.end if one.settle else None, label(one.kind)))
    return marks


def of_events(starts: Sequence[StartColumns]) -> list[Mark]:
    """Return a mark for each attempt behind the first, labelled, and for each event of a kind that is marked."""
    marks = []
    for place, kept in enumerate(starts):
        for event in kept.events:
            # A start behind the first has its own mark; of the first, a resume tells that there was one before.
            if event.step is None or event.kind not in MARKED or (place and event.kind == "resume"):
                continue
            text = label(event.kind)
            look, name = ("attempt", text) if event.kind == "resume" else ("event", "")
            marks.append(Mark(event.step, look, f"{text} at step {whole(event.step)}", None, name))
    for kept in starts[1:]:
        first = kept.steps[0]
        says = f"Attempt {kept.start.attempt} goes on from step {whole(first)}"
        marks.append(Mark(first, "attempt", says, None, f"attempt {kept.start.attempt}"))
    return marks


def ticks(starts: Sequence[StartColumns]) -> list[tuple[str, list[int]]]:
    """Return the steps of what is only ticked on the axis, by kind."""
    found = []
    for kind in TICKED:
        steps = {
            event.step for kept in starts for event in kept.events if event.kind == kind and event.step is not None
        }
        if steps:
            found.append((kind, sorted(steps)))
    return found


def of_incidents(incidents: Sequence[dict[str, Any]]) -> list[Mark]:
    """Return a mark for each incident, numbered in this order where it is above info."""
    marks = []
    for number, row in enumerate(incidents, start=1):
        onset = row.get("onset_step")
        if onset is None:
            continue
        says = f"{number}: {words.title(row)}, {words.steps_of(row)}"
        name = "" if row.get("severity") == "info" else str(number)
        marks.append(Mark(onset, _look(row), says, bad_until(row), name, f"#incident-{number}"))
    return marks


def of_life(row: dict[str, Any]) -> list[Mark]:
    """Return what is marked in the close-up of one incident: its onset and how it went on."""
    marks = [Mark(row["onset_step"], _look(row), f"Onset at step {row['onset_step']}", bad_until(row), "onset")]
    for name in ("opened", "confirmed", "closed"):
        step = row.get(f"{name}_step")
        if step is not None and step != row["onset_step"]:
            marks.append(Mark(step, "life", f"{name.capitalize()} at step {step}", None, name))
    plan = row.get("plan")
    target = plan.get("target") if isinstance(plan, dict) else None
    if isinstance(target, dict) and target.get("step") is not None:
        marks.append(Mark(target["step"], "life", f"The plan goes back to step {target['step']}", None, "target"))
    return marks


def bad_until(row: dict[str, Any]) -> float | None:
    """Return where the band of an incident ends: its close, or without one its confirmation.

    An incident with an action closes when its verification ends, long after the run went back: its band ends where the
    abandoned attempt was confirmed broken. A single loss that stood out ends where it was confirmed: the wait for the next is not it.
    """
    closed, confirmed = row.get("closed_step"), row.get("confirmed_step")
    if row.get("verdict") == "outlier" and words.came_back(row):
        return confirmed
    if row.get("action") in ("rollback", "probe", "stop"):
        return confirmed
    return closed if closed is not None else confirmed


def bare(marks: Sequence[Mark]) -> list[Mark]:
    """Return marks without labels, for small pictures."""
    return [Mark(mark.step, mark.look, mark.says, mark.end) for mark in marks]


def label(text: str) -> str:
    """Return a kind as the label of a mark."""
    said = text.replace("_", " ")
    return said if len(said) <= LONGEST_LABEL else f"{said[:LONGEST_LABEL]}…"


def _look(row: dict[str, Any]) -> str:
    severity = str(row.get("severity"))
    return severity if severity in words.SEVERITIES else "info"
