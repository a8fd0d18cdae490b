"""The onset lies right behind an evaluation or a checkpoint, and an earlier one did so too (case A39).

Evaluation code that leaves the model in another mode, or touches buffers and the optimizer's state, breaks the steps behind it.
Once may be chance; a second time, behind another evaluation, is not, where these are rare. It is no fault of the data: to go back
and skip samples runs into the next evaluation.
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.events import PHASES, behind, reach
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "It did not begin right behind an evaluation or a checkpoint."

#: Times the steps looked at behind an event that must lie between two: at fewer it would be chance too often (1 in 20).
RARE = 20


def find(facts: Facts) -> Evidence:
    """Return findings for the kinds that stand right before the onset: weak the first time, strong where it repeats."""
    if not any(facts.events.steps.get(kind) for kind in PHASES):
        return NotPossible("no event tells of an evaluation or a checkpoint")
    stride = facts.trace.stride()
    here = behind(facts.events, facts.onset, stride)
    best: tuple[int, str] | None = None
    for kind in PHASES:
        interval = facts.events.interval(kind)
        if kind == "checkpoint" and here.get(kind) == facts.resumed_from:
            continue  # what it was loaded from was saved by another process
        if kind not in here or (interval is not None and interval < RARE * reach(stride)):
            continue
        times = 1 + len(_earlier(facts, kind, here[kind], stride))
        if best is None or times > best[0]:
            best = (times, kind)
    if best is None:
        return []
    times, kind = best
    step = here[kind]
    known = [one for one in facts.events.steps[kind] if one <= facts.onset]
    test = f"Resume from before step {step} and run past it without the {kind}: if it passes, the {kind} did it."
    if times == 1:
        says = f"It began right behind the {kind} at step {step}, for the first time."
        return [
            Finding(kind="after_event", step=step, cause="optimizer_state", weight=0.3, says=says, test=test),
            Finding(kind="after_event", step=step, cause="data", weight=-0.2, says=says),
        ]
    others = {one.onset for one in facts.events.beginnings if not one.behind.get(kind) and one.onset != facts.onset}
    weight = 0.9 if times >= len(others) else 0.4
    elsewhere = f"{counted(len(others), 'time')} elsewhere" if others else "nowhere else"
    says = (
        f"It began right behind the {kind} at step {step}, as behind {times - 1} of the {len(known) - 1} before it and "
        f"{elsewhere}: a side effect of the {kind}."
    )
    return [
        Finding(kind="after_event", step=step, cause="optimizer_state", weight=weight, says=says, test=test),
        *(Finding(kind="after_event", step=step, cause=cause, weight=-0.8, says=says) for cause in ("data", "numeric")),
    ]


def _earlier(facts: Facts, kind: str, step: int, stride: int) -> set[int]:
    """Return the other events of a kind right behind which an incident began."""
    steps = {one.behind[kind] for one in facts.events.beginnings if kind in one.behind}
    return {one for one in steps if abs(one - step) > reach(stride)}
