"""Facts for lines of evidence: a healthy stretch, and what the test makes of it from the onset on."""

from __future__ import annotations

from typing import Any

from tests.rules.core.runs import Attempt, Change
from trainwarden.record import Step
from trainwarden.rules.core.facts import (
    Earlier,
    Facts,
    before_onset,
    dirty_rows,
    high_gradient,
    high_loss,
)
from trainwarden.rules.core.trace import Trace


def facts(
    *changes: Change,
    onset: int = 301,
    last: int = 320,
    first: int = 1,
    earlier: tuple[Earlier, ...] = (),
    resumed_from: int | None = None,
    each: Any = None,
) -> Facts:
    """Return the facts of an incident with this onset after the record of ``last``; ``each`` edits whole records."""
    trace = Trace(limit=4000)
    for line in Attempt(first=first, last=last, changes=changes, checkpoint_every=0).lines():
        if isinstance(line, Step):
            if each is not None:
                each(line)
            trace.append(line)
    trend, usual = before_onset(trace, None, onset)
    rows = slice(trace.row(onset), len(trace))
    excess, loss_high, nonfinite = high_loss(trace, rows, trend)
    return Facts(
        trace=trace,
        onset=onset,
        uncertainty=1,
        opened=onset,
        now=last,
        trend=trend,
        usual=usual,
        steps=trace.steps[rows],
        loss=trace.column("loss")[rows],
        loss_measured=trace.measured("loss")[rows],
        excess=excess,
        loss_high=loss_high,
        nonfinite=nonfinite,
        grad_high=high_gradient(trace, rows, usual),
        dirty=dirty_rows(trace, rows, usual),
        first_step=first,
        resumed_from=resumed_from,
        beta2=0.999,
        earlier=earlier,
        rules=(),
        offered=(),
    )


def at(steps: range, **values: Any) -> Change:
    """Set signals at these steps; a callable gets the old value."""

    def change(step: int, signals: dict[str, Any]) -> None:
        if step in steps:
            for name, value in values.items():
                signals[name] = value(signals.get(name)) if callable(value) else value

    return change
