"""A signal that goes on in another unit within one start: held while that is a candidate, re-learned once it is believed.

Rules begin anew, as with a new start, and what is remembered of the past is turned into the new unit, so that later trends and
comparisons span the change. What opened on the jump is closed: it was the instrument (design §4.9).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import numpy as np

from trainwarden.record import Step

from .block import Block, Bools, Column
from .facts import Finding
from .incidents import close, open_incident, place
from .instrument_rescale import Ruling, Scale, follow
from .state import Alive, Incident, Run
from .trace import Trace
from .turn import Turn
from .verdict import SIZES

#: The signals that are followed, each with the one beside it, and whether it may well move by a root.
FOLLOWED = (("loss", "grad_norm", False), ("grad_norm", "loss", True))


@dataclass(frozen=True, slots=True)
class Looked:
    """What the first ``rows`` of a block say of its units.

    ``held``: at which of them a candidate is open, None for none. ``ruling``: what is to be carried out behind the last of them.
    """

    rows: int
    held: Bools | None = None
    name: str = ""
    ruling: Ruling | None = None


def look_at_units(alive: Alive, block: Block) -> Looked:
    """Follow the signals through a block up to the first ruling that is believed, or to its end."""
    followed = [_follow(alive, block, *one) for one in FOLLOWED if _column(block, one[0]) is not None]
    believed = [(row, one.name, ruling) for one in followed for row, ruling in one.rulings if ruling.kind == "believed"]
    if not believed:
        held = _commit(alive, followed, len(block))
        return Looked(len(block), held)
    last, name, ruling = min(believed, key=lambda one: one[0])
    part = block.rows(0, last + 1)  # what follows is another unit: it is looked at anew
    followed = [_follow(alive, part, *one) for one in FOLLOWED if _column(part, one[0]) is not None]
    return Looked(last + 1, _commit(alive, followed, last + 1), name, ruling)


@dataclass(frozen=True, slots=True)
class _Followed:
    """One signal through a block: what is known behind it, and the rulings by row of the block."""

    name: str
    scale: Scale
    open: bool  #: a candidate was open at the first row
    rulings: list[tuple[int, Ruling]]


def _follow(alive: Alive, block: Block, name: str, beside: str, roots: bool) -> _Followed:
    column, other = _column(block, name), _column(block, beside)
    assert column is not None
    known = alive.scales.get(name)
    scale = Scale() if known is None else copy(known)  # its arrays are never changed, only replaced
    values, rows = column.values, None
    others = np.full(len(values), np.nan) if other is None else np.where(other.present, other.values, np.nan)
    if not column.present.all():
        rows = np.flatnonzero(column.present)
        values, others = values[rows], others[rows]
    began = bool(scale.behind)
    rulings = [(one.row if rows is None else int(rows[one.row]), one) for one in follow(scale, values, others, roots)]
    return _Followed(name, scale, began, rulings)


def _commit(alive: Alive, followed: list[_Followed], rows: int) -> Bools | None:
    """Keep what was followed; return the rows at which a candidate was open, None where there was none."""
    held: Bools | None = None
    here = [one.name for one in followed]
    if any(scale.behind and name not in here for name, scale in alive.scales.items()):
        held = np.ones(rows, dtype=np.bool_)  # that signal is not in these records, and its candidate as open as before
    for one in followed:
        alive.scales[one.name] = one.scale
        if not one.open and not one.rulings:
            continue
        if held is None:
            held = np.zeros(rows, dtype=np.bool_)
        began: int | None = 0 if one.open else None
        for row, ruling in one.rulings:
            if ruling.kind == "began":
                began = row
            else:
                held[began : row + (ruling.kind == "believed")] = True
                began = None
        if began is not None:
            held[began:] = True
    return held


def _column(block: Block, name: str) -> Column | None:
    return block.columns.get((name,)) or block.columns.get((name, "all"))


def relearn(turn: Turn, run: Run, alive: Alive, name: str, ruling: Ruling, record: Step) -> None:
    """Carry out a ruling behind ``record``, its last one: say it, turn the past into the new unit, begin the rules anew."""
    beside = next(other for signal, other, _ in FOLLOWED if signal == name)
    first = _first_row(alive.trace, name, ruling.records)
    since = int(alive.trace.steps[first])
    _say(turn, alive, name, ruling.factor, since)
    moved = {name: ruling.factor}
    if ruling.other != 1.0:
        moved[beside] = ruling.other
        _say(turn, alive, beside, ruling.other, since)
    for signal, factor in moved.items():
        _convert(alive.trace, signal, factor, first)
        for older in (alive.inherited, alive.beyond):
            if older is not None:
                _convert(older, signal, factor, len(older))
    alive.scales[beside] = Scale()
    alive.rules = turn.state.fresh_rules()
    alive.firing = {}
    alive.unit_doubted = False
    incident = open_incident(run, alive.start.start_id)
    if incident is not None:
        _explain(turn, alive, incident, name, ruling, since, record)


def whole_norm(turn: Turn, alive: Alive, step: int) -> None:
    """From ``step`` on the gradient norm is that of the whole gradient, and was each rank's of its own shard: re-learned, and said (D05)."""
    factor = math.sqrt(max(alive.line.world_size, 1))
    alive.ranks.whole = True
    says = (
        f"grad_norm is one number on all ranks from here on, and was that of each rank's own shard: about {factor:.3g} times what it was, by "
        "the root of their number."
    )
    turn.notice(alive.start, "metric_scope", step, says, "grad_norm")
    _convert(alive.trace, "grad_norm", factor, len(alive.trace))
    alive.scales["grad_norm"] = Scale()
    alive.rules = turn.state.fresh_rules()
    alive.firing = {}
    alive.unit_doubted = False


def _explain(turn: Turn, alive: Alive, incident: Incident, name: str, ruling: Ruling, since: int, record: Step) -> None:
    for seen in incident.rules.values():
        seen.firing = False
    began = min(seen.since for seen in incident.rules.values())
    sizes = all(seen.verdict in SIZES for seen in incident.rules.values())
    if began < since or not sizes or incident.action != "none":
        place(incident, alive)
        turn.note(incident, record.time, record.step, f"{name} goes on in another unit since step {since}.")
        return
    says = f"{name} is {ruling.factor:.4g} times what it was, to the record and as noisy: it is logged in another unit."
    incident.onset, incident.uncertainty, incident.verdict = since, 1, "other"
    incident.cause, incident.confidence, incident.scores = "instrument", 0.9, {"instrument": 0.9}
    incident.findings = [Finding(kind="logging_scale_change", says=says, step=since)]
    incident.cheapest_test, incident.suspect_samples = "", []
    incident.summary = f"Change of unit from step {since}, cause instrument (confidence 0.90)."
    if not incident.announced:
        incident.severity = "info"
    close(turn, incident, record.time, record.step, "inconclusive", says)


def _say(turn: Turn, alive: Alive, name: str, factor: float, since: int) -> None:
    says = f"{name} is {factor:.4g} times what it was before this step, and as noisy: it is logged in another unit."
    turn.notice(alive.start, "logging_scale_change", since, says, name)


def _first_row(trace: Trace, name: str, records: int) -> int:
    values = trace.column(name)
    rows = np.flatnonzero(np.isfinite(values) & (values > 0))
    return int(rows[-records]) if len(rows) >= records else 0


def _convert(trace: Trace, name: str, factor: float, end: int) -> None:
    if name in trace.values:
        trace.values[name][:end] *= factor
