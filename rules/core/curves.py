"""The signals around an incident, kept with it for its report: what the records showed outlives the records' own memory.

Written again whenever the incident enters another state. Of each attempt that made these steps at most ``ROWS`` records are kept, so the
curves of attempts before and after a rollback lie over each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwarden.record import encode_numbers

from .effects import Save
from .state import Incident, Run
from .trace import TRACKED, Trace
from .turn import Turn

#: Records before the onset and behind it that are kept, and attempts.
BEFORE, BEHIND, ATTEMPTS = 80, 240, 4
ROWS = BEFORE + BEHIND
#: Signals that are kept: those that judgement remembers, but for what only counts.
NAMES = tuple(name for name, _ in TRACKED if name not in ("sample_position", "epoch", "substituted_samples", "beta2"))


def keep_curves(turn: Turn, run: Run, incident: Incident) -> None:
    """Save the curves of an incident that is more than information and has entered another state."""
    if incident.severity == "info" or incident.drawn == incident.state:
        return
    incident.drawn = incident.state
    turn.effects.append(Save("curves", incident.id, encode_numbers(curves(run, incident))))


def curves(run: Run, incident: Incident) -> dict[str, Any]:
    """Return the signals around the onset by attempt, the oldest first."""
    traces = {attempt: ("", trace) for attempt, trace in run.traces.items()}
    alive = run.alive
    if alive is not None:
        traces[alive.start.attempt] = (alive.start.start_id, alive.trace)
    if incident.attempt in traces:
        traces[incident.attempt] = (incident.start_id, traces[incident.attempt][1])
    first, end = _window(traces[incident.attempt][1] if incident.attempt in traces else None, incident.onset)
    found = []
    for attempt in sorted(traces)[-ATTEMPTS:]:
        start_id, trace = traces[attempt]
        rows = trace.rows(first, end)
        if rows.stop > rows.start:
            found.append(_attempt(attempt, start_id, trace, slice(rows.start, min(rows.stop, rows.start + ROWS))))
    return {
        "incident": incident.id,
        "run": incident.run,
        "run_uid": incident.run_uid,
        "onset_step": incident.onset,
        "attempts": found,
    }


def _window(trace: Trace | None, onset: int) -> tuple[int, int]:
    """Return the steps from the first one that is kept to the one behind the last."""
    stride = 1 if trace is None else trace.stride()
    return onset - BEFORE * stride, onset + BEHIND * stride


def _attempt(attempt: int, start_id: str, trace: Trace, rows: slice) -> dict[str, Any]:
    signals = {}
    for name in NAMES:
        measured = trace.measured(name)[rows]
        if measured.any():
            values = trace.column(name)[rows]
            signals[name] = [
                _short(value) if known else None
                for value, known in zip(values.tolist(), measured.tolist(), strict=True)
            ]
    times = trace.times()[rows]
    return {
        "attempt": attempt,
        "start_id": start_id or f"attempt-{attempt}",
        "stride": trace.stride(),
        "steps": trace.steps[rows].tolist(),
        "times": [round(time, 3) if np.isfinite(time) else None for time in times.tolist()],
        "signals": signals,
    }


def _short(value: float) -> float:
    """Return a number with the six digits that a picture can show."""
    return float(f"{value:.6g}")
