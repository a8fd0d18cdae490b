"""The pictures of a run: the loss with everything that happened on it, each incident close up, all signals on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Key
from trainwarden.signals import BY_NAME

from . import words
from .curve import Line, Mark, Picture, draw
from .recorded import Column, Recorded, StartColumns
from .usual import usual

#: Lines of one picture; what is more is said and not drawn.
MOST_LINES = 7
#: A close-up shows at least this many records before the onset and at most ``MOST_BEFORE``.
LEAST_AROUND, MOST_BEFORE, MOST_AFTER = 40, 200, 600
#: A signal moved at an onset if it left its values before by this many robust deviations.
MOVED = 6.0
#: Signals that only count, tell the time or repeat the plan: never the reason of anything.
PASSIVE = frozenset(
    {"sample_position", "epoch", "samples_seen", "tokens", "optimizer_step", "step_duration_seconds", "beta2"}
)
#: Share of a run's steps at its beginning in which the loss falls from where it started.
WARMING = 0.05
#: Kinds of events that are marked on the loss curve.
MARKED = frozenset({"resume", "stage", "mixture", "batch_size", "lr_phase", "epoch"})


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture with its heading: a signal's name, its unit and what it is."""

    name: str
    picture: Picture
    unit: str = ""
    help: str = ""
    notes: tuple[str, ...] = ()


class Gallery:
    """The pictures of one recording. The baseline is reckoned once a start."""

    def __init__(self, report: dict[str, Any], recorded: Recorded) -> None:
        self.report = report
        self.recorded = recorded
        self.starts = recorded.starts
        self.first, self.last = recorded.extent()
        self.incidents = words.ordered(report.get("incidents") or [])
        self._usual: dict[str, Column] = {}

    def overview(self) -> Panel | None:
        """Return the loss of all starts with its baseline and a mark for each incident, or None without a loss."""
        lines = self._lineage_of_loss()
        if not lines:
            return None
        picture = draw(
            lines,
            self.first,
            self.last,
            says=f"Loss over steps {self.first} to {self.last} with {words.tally(self.report)}",
            height=320,
            marks=[*self._events(), *self._incident_marks()],
            warming=self._warming(),
            values=True,
        )
        return _panel("loss", picture)

    def signals(self) -> list[Panel]:
        """Return one small picture for each signal that changed, all over the same steps."""
        marks = [Mark(mark.step, mark.look, mark.says, mark.end) for mark in self._incident_marks()]
        panels = []
        for heading, keys in self._headings():
            lines, notes = self._signal_lines(keys)
            if not lines or _constant(lines) is not None:
                continue
            picture = draw(
                lines,
                self.first,
                self.last,
                says=f"{'/'.join(heading)} over steps {self.first} to {self.last}",
                height=110,
                marks=marks,
                warming=self._warming(),
                columns=400,
            )
            panels.append(_panel("/".join(heading), picture, notes))
        return panels

    def constant(self) -> list[tuple[str, float]]:
        """Return the signals that were the same at every step, with their value."""
        found = []
        for heading, keys in self._headings():
            value = _constant(self._signal_lines(keys)[0])
            if value is not None:
                found.append(("/".join(heading), value))
        return found

    def closeup(self, row: dict[str, Any], number: int) -> list[Panel]:
        """Return the loss around an incident, and below it the signals that moved with it."""
        onset = row.get("onset_step")
        own = next((kept for kept in self.starts if kept.start.start_id == row.get("start_id")), None)
        if own is None:
            attempts = [kept for kept in self.starts if kept.start.attempt == row.get("attempt")]
            own = attempts[-1] if attempts else None
        if own is None or onset is None:
            return []
        first, last = _window(row, own)
        marks = _life(row)
        said = f"around step {onset}, incident {number}"
        others = [kept for kept in self.starts if kept is not own]
        panels = []
        lines = _around(("loss",), own, others, first, last)
        if lines:
            level = self._usual_of(own)
            picture = draw(
                [*lines, Line("baseline", level, "usual")], first, last, says=f"Loss {said}", marks=marks, values=True
            )
            panels.append(_panel("loss", picture))
        odd = self._odd_ranks(row, own)
        if odd:
            picture = draw(odd, first, last, says=f"Loss by rank {said}", height=110, marks=marks, values=True)
            panels.append(_panel("rank_loss", picture))
        for key in self._moved(own, onset, first, last):
            picture = draw(
                _around(key, own, others, first, last),
                first,
                last,
                says=f"{_name(key)} {said}",
                height=84,
                marks=[Mark(mark.step, mark.look, mark.says, mark.end) for mark in marks],
                values=True,
                stepped=False,
            )
            panels.append(_panel(_name(key), picture))
        return panels

    def sketch(self) -> Picture | None:
        """Return the loss alone, small, for a list of runs."""
        lines = [line for line in self._lineage_of_loss() if line.look != "usual"]
        if not lines:
            return None
        marks = [Mark(mark.step, mark.look, mark.says) for mark in self._incident_marks() if mark.look != "info"]
        return draw(
            lines,
            self.first,
            self.last,
            says="Loss",
            height=48,
            marks=marks,
            warming=self._warming(),
            columns=240,
            stepped=False,
        )

    def _warming(self) -> float:
        """Return the step before which the first decline may leave the frame: no incident begins before it."""
        onsets = [row["onset_step"] for row in self.incidents if row.get("onset_step") is not None]
        return float(min([self.first + WARMING * (self.last - self.first), *onsets]))

    def _headings(self) -> list[tuple[tuple[str, ...], list[Key]]]:
        """Return the columns by the picture that they belong to, the telling ones first."""
        grouped: dict[tuple[str, ...], dict[Key, None]] = {}
        for kept in self.starts:
            for key in kept.tracks:
                grouped.setdefault(_heading(key), {})[key] = None
        return [
            (heading, sorted(grouped[heading], key=lambda key: (key[-1] != "all", key)))
            for heading in sorted(grouped, key=_place)
        ]

    def _lineage(self, key: Key, name: str, look: str) -> list[Line]:
        """Return a column over all starts: what led to the end as one line, and what a later start went back behind."""
        led: list[Column] = []
        left: list[Line] = []
        for place, kept in enumerate(self.starts):
            column = kept.column(key)
            later = [min(other.steps) for other in self.starts[place + 1 :]]
            cut = int(np.searchsorted(column.steps, min(later))) if later else len(column.steps)
            led.append(Column(column.steps[:cut], column.values[:cut]))
            if cut < len(column.steps):
                joined = max(cut - 1, 0)
                abandoned = Column(column.steps[joined:], column.values[joined:])
                left.append(Line(f"attempt {kept.start.attempt}, left behind", abandoned, "past"))
        whole = Column(np.concatenate([part.steps for part in led]), np.concatenate([part.values for part in led]))
        return [*left, Line(name, whole, look)] if len(whole.steps) else left

    def _lineage_of_loss(self) -> list[Line]:
        if not any(("loss",) in kept.tracks for kept in self.starts):
            return []
        levels = []
        for place, kept in enumerate(self.starts):
            later = [min(other.steps) for other in self.starts[place + 1 :]]
            levels.append(self._usual_of(kept).between(-np.inf, min(later) - 1 if later else np.inf))
        level = Column(np.concatenate([one.steps for one in levels]), np.concatenate([one.values for one in levels]))
        return [*self._lineage(("loss",), "loss", "main"), Line("baseline", level, "usual")]

    def _usual_of(self, kept: StartColumns) -> Column:
        level = self._usual.get(kept.start.start_id)
        if level is None:
            stride = int(np.median(np.frombuffer(kept.strides, dtype=np.int64)))
            level = self._usual[kept.start.start_id] = usual(kept.column(("loss",)), max(stride, 1))
        return level

    def _signal_lines(self, keys: Sequence[Key]) -> tuple[list[Line], list[str]]:
        known = BY_NAME.get(keys[0][0])
        notes = []
        ranks = self.recorded.ranks_of(self.starts[-1].start.start_id)
        if known is not None and known.reduce == "none" and len(ranks) > 1:
            named = [(f"rank {kept.rank}", kept.column(keys[0])) for kept in ranks if keys[0] in kept.tracks]
            lines = [[Line(name, column, "")] for name, column in named]
        else:
            lines = [self._lineage(key, _member(key), "") for key in keys]
            # What was left behind is drawn for the first of them alone: the whole model.
            lines = [lines[0], *(one[-1:] for one in lines[1:])]
        if len(lines) > MOST_LINES:
            notes.append(f"{len(lines) - MOST_LINES} more are not drawn.")
            lines = lines[:MOST_LINES]
        looks = ["main", *(f"other{number}" for number in range(1, MOST_LINES))]
        coloured = [
            Line(line.name, line.column, line.look or look)
            for look, one in zip(looks, lines, strict=False)
            for line in one
            if len(line.column.steps)
        ]
        return coloured, notes

    def _incident_marks(self) -> list[Mark]:
        marks = []
        for number, row in enumerate(self.incidents, start=1):
            onset = row.get("onset_step")
            if onset is None:
                continue
            severity = str(row.get("severity"))
            label = "" if severity == "info" else str(number)
            marks.append(
                Mark(
                    onset,
                    severity if severity in words.SEVERITIES else "info",
                    f"{number}: {words.title(row)}, {words.steps_of(row)}",
                    _bad_until(row),
                    label,
                    f"#incident-{number}",
                )
            )
        return marks

    def _events(self) -> list[Mark]:
        marks = []
        for kept in self.starts:
            for event in kept.events:
                if event.step is not None and event.kind in MARKED:
                    marks.append(Mark(event.step, "event", f"{event.kind.replace('_', ' ')} at step {event.step}"))
        for kept in self.starts[1:]:
            first = kept.steps[0]
            says = f"Attempt {kept.start.attempt} goes on from step {first}"
            marks.append(Mark(first, "event", says, None, f"attempt {kept.start.attempt}"))
        return marks

    def _odd_ranks(self, row: dict[str, Any], own: StartColumns) -> list[Line]:
        """Return the loss of the ranks that the incident names over that of one that it does not name."""
        named = set((row.get("scope") or {}).get("ranks") or [])
        ranks = [kept for kept in self.recorded.ranks_of(own.start.start_id) if ("rank_loss",) in kept.tracks]
        odd = [kept for kept in ranks if kept.rank in named][: MOST_LINES - 1]
        others = [kept for kept in ranks if kept.rank not in named][:1]
        looks = ["main", *(f"other{number}" for number in range(1, MOST_LINES))]
        return [
            *(Line(f"rank {kept.rank}", kept.column(("rank_loss",)), "past") for kept in others if odd),
            *(
                Line(f"rank {kept.rank}", kept.column(("rank_loss",)), look)
                for kept, look in zip(odd, looks, strict=False)
            ),
        ]

    def _moved(self, own: StartColumns, onset: int, first: int, last: int) -> list[Key]:
        """Return up to three signals that left their values at the onset, the farthest first; the gradient norm always."""
        found: list[tuple[float, Key]] = []
        for key in own.tracks:
            if key[0] in PASSIVE or key == ("loss",) or (len(key) > 1 and key[-1] != "all" and key[0] != "nonfinite"):
                continue
            column = own.column(key).between(first, last)
            before = column.values[column.steps < onset]
            after = column.values[column.steps >= onset]
            before = before[np.isfinite(before)]
            if key == ("grad_norm", "all") and len(column.steps):
                found.append((np.inf, key))
            elif len(before) >= 10 and len(after):
                level = float(np.median(before))
                spread = max(1.4826 * float(np.median(np.abs(before - level))), 0.002 * abs(level), 1e-12)
                way = np.abs(after - level)
                moved = float(way.max()) / spread if np.isfinite(way).all() else np.inf
                if moved > MOVED:
                    found.append((moved, key))
        found.sort(key=lambda item: (-item[0], item[1]))
        return [key for _, key in found[:3]]


def _around(key: Key, own: StartColumns, others: Sequence[StartColumns], first: int, last: int) -> list[Line]:
    """Return a column of the incident's own start, over those of other starts at the same steps."""
    lines = [
        Line(f"attempt {kept.start.attempt}", kept.column(key), "main" if kept is own else "past")
        for kept in (*others, own)
        if len(kept.column(key).between(first, last).steps)
    ]
    if len(lines) == 1:
        return [Line(_name(key), lines[0].column, lines[0].look)]
    return lines


def _constant(lines: Sequence[Line]) -> float | None:
    """Return the one value that all lines have at all steps, or None."""
    values = np.concatenate([line.column.values for line in lines]) if lines else np.zeros(0)
    if len(values) == 0 or not np.isfinite(values[0]) or bool((values != values[0]).any()):
        return None
    return float(values[0])


def _panel(name: str, picture: Picture, notes: Sequence[str] = ()) -> Panel:
    known = BY_NAME.get(name.partition("/")[0])
    unit = known.unit if known and known.unit != "1" else ""
    return Panel(name, picture, unit, known.help if known else "", (*notes, *picture.notes))


def _heading(key: Key) -> tuple[str, ...]:
    """Return what keys of one picture share: all labels but the last."""
    return key[:1] if len(key) <= 2 else key[:-1]


def _member(key: Key) -> str:
    return key[-1] if len(key) > 1 else key[0]


def _name(key: Key) -> str:
    return "/".join(part for part in key if part != "all")


_ORDER = {name: place for place, name in enumerate(BY_NAME)}


def _place(heading: tuple[str, ...]) -> tuple[bool, int, tuple[str, ...]]:
    name = heading[0]
    return name in PASSIVE, _ORDER.get(name, len(_ORDER)), heading


def _bad_until(row: dict[str, Any]) -> float | None:
    """Return where the band of an incident ends: its close, or without one its confirmation.

    An incident with an action closes when its verification ends, long after the run went back: its band ends where the
    abandoned attempt was confirmed broken.
    """
    closed, confirmed = row.get("closed_step"), row.get("confirmed_step")
    if row.get("action") in ("rollback", "stop"):
        return confirmed
    return closed if closed is not None else confirmed


def _life(row: dict[str, Any]) -> list[Mark]:
    severity = str(row.get("severity"))
    look = severity if severity in words.SEVERITIES else "info"
    marks = [Mark(row["onset_step"], look, f"Onset at step {row['onset_step']}", _bad_until(row), "onset")]
    for name in ("opened", "confirmed", "closed"):
        step = row.get(f"{name}_step")
        if step is not None and step != row["onset_step"]:
            marks.append(Mark(step, "life", f"{name.capitalize()} at step {step}", None, name))
    plan = row.get("plan")
    target = plan.get("target") if isinstance(plan, dict) else None
    if isinstance(target, dict) and target.get("step") is not None:
        marks.append(Mark(target["step"], "life", f"The plan goes back to step {target['step']}", None, "target"))
    return marks


def _window(row: dict[str, Any], own: StartColumns) -> tuple[int, int]:
    """Return the steps of a close-up, counted in records so that a log of every tenth step shows as much."""
    steps = np.sort(np.frombuffer(own.steps, dtype=np.int64))
    onset = row["onset_step"]
    at = int(np.searchsorted(steps, onset))
    end = _bad_until(row)
    until = at if end is None else int(np.searchsorted(steps, end))
    lasted = min(max(until - at, 0), MOST_AFTER)
    before = min(max(LEAST_AROUND, lasted), MOST_BEFORE)
    after = lasted + max(LEAST_AROUND, min(lasted, MOST_BEFORE))
    first = steps[max(0, at - before)]
    return int(first), int(steps[min(len(steps) - 1, at + after)])
