"""The numbers that a post-mortem asks for, taken from the records: never guessed, None where nobody measured them (case F04).

Where it began, the loss before it, at its peak and fifty steps behind that, gradient, learning rate, precision, the batch and what was
unusual of it. What it was, why, and what is done about it stands in the incident's other fields.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from .facts import Facts
from .trace import FINGERPRINT, Trace

#: Steps over which the loss before the onset is averaged, and steps behind the peak at which it is read again (case F04).
BEFORE, BEHIND = 50, 50


class Numbers(Struct, frozen=True):
    """What the records hold. A number is None where it was not measured, or is not there yet.

    ``loss_before``: mean of the finite losses of the 50 steps before the onset, or the last one where a record covers more.
    ``loss_peak``: the largest finite loss since the onset. ``loss_after``: the first loss at least 50 steps behind it.
    ``grad_norm``, ``clip_ratio``, ``lr``: at the onset, or the newest before it. ``grad_norm_peak``: the largest since, before clipping.
    ``samples``: positions that the onset's step consumed. ``unusual``: what of its batch was far off: value and what is usual.
    """

    loss_before: float | None = None
    loss_onset: float | None = None
    loss_peak: float | None = None
    loss_peak_step: int | None = None
    loss_after: float | None = None
    loss_after_step: int | None = None
    first_nonfinite_step: int | None = None
    grad_norm: float | None = None
    grad_norm_peak: float | None = None
    grad_norm_peak_step: int | None = None
    clip_ratio: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    precision: str | None = None
    samples: tuple[tuple[int, int], ...] = ()
    unusual: dict[str, tuple[float, float]] = field(default_factory=dict)


def numbers(before: Numbers, facts: Facts) -> Numbers:
    """Return the numbers as of the newest record; ``before`` are those of an earlier one, which holds what has left the memory since."""
    trace = facts.trace
    if not facts.records or int(trace.steps[0]) > facts.onset:
        return _peaks(before, facts)
    row = facts.rows.start
    found = Numbers(
        loss_before=_mean_before(trace, row, facts.onset),
        loss_onset=_at(trace, "loss", row),
        grad_norm=_at(trace, "grad_norm", row),
        clip_ratio=_newest(trace, "clip_ratio", row),
        lr=_newest(trace, "lr", row),
        loss_scale=_newest(trace, "loss_scale", row),
        precision=facts.versions.get("precision"),
        samples=facts.samples,
        unusual=_unusual(facts),
    )
    return _peaks(found, facts)


def _peaks(known: Numbers, facts: Facts) -> Numbers:
    """Add what the records since the onset hold; where those that held the peak have left the memory, the known one stays."""
    steps = facts.steps
    changed: dict[str, float | int] = {}
    for name, column in (("loss_peak", facts.loss), ("grad_norm_peak", facts.trace.column("grad_norm")[facts.rows])):
        finite = np.where(np.isfinite(column), column, -np.inf)
        place = int(np.argmax(finite)) if len(finite) else 0
        peak = getattr(known, name)
        if len(finite) and math.isfinite(finite[place]) and (peak is None or finite[place] > peak):
            changed |= {name: float(finite[place]), f"{name}_step": int(steps[place])}
    if known.first_nonfinite_step is None and facts.nonfinite.any():
        changed["first_nonfinite_step"] = int(steps[int(np.argmax(facts.nonfinite))])
    found = replace(known, **changed) if changed else known
    if "loss_peak" in changed:
        found = replace(found, loss_after=None, loss_after_step=None)
    if found.loss_peak_step is not None and found.loss_after is None:
        later = np.flatnonzero((steps >= found.loss_peak_step + BEHIND) & np.isfinite(facts.loss))
        if len(later):
            at = int(later[0])
            found = replace(found, loss_after=float(facts.loss[at]), loss_after_step=int(steps[at]))
    return found


def _mean_before(trace: Trace, row: int, onset: int) -> float | None:
    first = trace.row(onset - BEFORE)
    values = trace.column("loss")[min(first, max(row - 1, 0)) : row]
    finite = values[np.isfinite(values)]
    return float(np.mean(finite)) if len(finite) else None


def _at(trace: Trace, name: str, row: int) -> float | None:
    return float(trace.column(name)[row]) if trace.measured(name)[row] else None


def _newest(trace: Trace, name: str, row: int) -> float | None:
    known = np.flatnonzero(np.isfinite(trace.column(name)[: row + 1]))
    return float(trace.column(name)[known[-1]]) if len(known) else None


def _unusual(facts: Facts) -> dict[str, tuple[float, float]]:
    """Return of the batch's fingerprint what was far off at the first dirty record: (value, what is usual)."""
    if not facts.dirty.any():
        return {}
    place, found = int(np.argmax(facts.dirty)), {}
    for name in FINGERPRINT:
        usual, value = facts.usual.get(name), float(facts.trace.column(name)[facts.rows][place])
        if usual is not None and math.isfinite(value) and abs(value - usual.median) > 4 * max(usual.noise, 1e-12):
            found[name] = (value, usual.median)
    return found


def as_row(known: Numbers) -> dict[str, Any]:
    """Return the numbers as a JSON object; null is what nobody measured."""
    return {
        **{name: getattr(known, name) for name in known.__struct_fields__ if name not in ("samples", "unusual")},
        "samples": [[first, end] for first, end in known.samples],
        "unusual": {name: {"value": value, "usual": usual} for name, (value, usual) in known.unusual.items()},
    }
