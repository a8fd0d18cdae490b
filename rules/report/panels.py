"""The pictures of a run: the loss with everything that happened on it, each incident close up, all signals on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Key
from trainwarden.rules.core.planned import Announced
from trainwarden.signals import BY_NAME

from . import marks, words
from .curve import Line, Mark, Picture, draw
from .recorded import Column, Recorded, StartColumns
from .telling import PASSIVE, Reads, telling
from .usual import usual

#: Lines of one picture; what is more is said and not drawn.
MOST_LINES = 7
#: A close-up shows at least this many records before the onset and at most ``MOST_BEFORE``.
LEAST_AROUND, MOST_BEFORE, MOST_AFTER = 40, 200, 600
#: Small pictures around one incident.
MOST_AROUND = 24
#: Share of a run's steps at its beginning in which the loss falls from where it started.
WARMING = 0.05


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture with its heading: a signal's name, its unit and what it is."""

    name: str
    picture: Picture
    unit: str = ""
    help: str = ""
    notes: tuple[str, ...] = ()


class Gallery:
    """The pictures of one recording. The baseline is reckoned once a start.

    ``reads`` tells the signals that an alert reads, where its rules are at hand; ``changes`` are the planned ones of the run.
    """

    def __init__(
        self,
        report: dict[str, Any],
        recorded: Recorded,
        *,
        reads: Reads | None = None,
        changes: Sequence[Announced] = (),
    ) -> None:
        self.report = report
        self.recorded = recorded
        self.reads = reads
        self.planned = marks.of_changes(changes)
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
            marks=[*self.planned, *marks.of_events(self.starts), *marks.of_incidents(self.incidents)],
            ticks=marks.ticks(self.starts),
            meanings=marks.MEANINGS,
            warming=self._warming(),
            values=True,
        )
        return _panel("loss", picture)

    def signals(self) -> list[Panel]:
        """Return one small picture for each signal that changed, all over the same steps."""
        seen = marks.bare([*self.planned, *marks.of_incidents(self.incidents)])
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
                marks=seen,
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
        own = self._own(row)
        if own is None or onset is None:
            return []
        others = [kept for kept in self.starts if kept is not own]
        before = self.starts[: self.starts.index(own)]
        first, last = _window(row, own, before)
        around = [*self.planned, *marks.of_events(self.starts)]
        seen = [*around, *marks.of_life(row)]
        said = f"around step {onset}, incident {number}"
        panels = []
        lines = _around(("loss",), own, others, first, last)
        if lines:
            lines.append(Line("baseline", self._usual_of(own), "usual"))
            meanings = {look: marks.MEANINGS[look] for look in ("planned", "attempt", "event")}
            ticks = marks.ticks(self.starts)
            picture = draw(
                lines, first, last, says=f"Loss {said}", marks=seen, ticks=ticks, meanings=meanings, values=True
            )
            panels.append(_panel("loss", picture))
        odd = self._odd_ranks(row, own)
        if odd:
            picture = draw(odd, first, last, says=f"Loss by rank {said}", height=110, marks=seen, values=True)
            panels.append(_panel("rank_loss", picture))
        for key in telling(row, own, before, first, last, self.reads):
            picture = draw(
                _around(key, own, others, first, last),
                first,
                last,
                says=f"{_name(key)} {said}",
                height=84,
                marks=marks.bare(seen),
                values=True,
                stepped=False,
            )
            panels.append(_panel(_name(key), picture))
        return panels

    def around(self, row: dict[str, Any], number: int, shown: Sequence[Panel]) -> list[Panel]:
        """Return one small picture for each other signal around an incident that changed there, with other attempts behind it."""
        own = self._own(row)
        if own is None or row.get("onset_step") is None:
            return []
        others = [kept for kept in self.starts if kept is not own]
        first, last = _window(row, own, self.starts[: self.starts.index(own)])
        seen = marks.bare([*self.planned, *marks.of_events(self.starts), *marks.of_life(row)])
        names = [panel.name for panel in shown]
        panels = []
        for key in sorted(own.tracks, key=lambda key: _place(_heading(key))):
            lines = _around(key, own, others, first, last)
            if _name(key) in names or not lines or _constant(lines) is not None:
                continue
            says = f"{_name(key)} around step {row['onset_step']}, incident {number}"
            panels.append(
                _panel(
                    _name(key), draw(lines, first, last, says=says, height=84, marks=seen, values=True, stepped=False)
                )
            )
        return panels[:MOST_AROUND]

    def _own(self, row: dict[str, Any]) -> StartColumns | None:
        """Return the start that an incident is of; None where it left no record."""
        own = next((kept for kept in self.starts if kept.start.start_id == row.get("start_id")), None)
        if own is None:
            attempts = [kept for kept in self.starts if kept.start.attempt == row.get("attempt")]
            own = attempts[-1] if attempts else None
        return own

    def sketch(self) -> Picture | None:
        """Return the loss alone, small, for a list of runs."""
        lines = [line for line in self._lineage_of_loss() if line.look != "usual"]
        if not lines:
            return None
        graver = [mark for mark in marks.of_incidents(self.incidents) if mark.look != "info"]
        return draw(
            lines,
            self.first,
            self.last,
            says="Loss",
            height=48,
            marks=[Mark(mark.step, mark.look, mark.says) for mark in graver],
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


def _window(row: dict[str, Any], own: StartColumns, before: Sequence[StartColumns]) -> tuple[int, int]:
    """Return the steps of a close-up, counted in records so that a log of every tenth step shows as much.

    Shortly behind a resume the steps of the starts before it come first: what was usual is seen there.
    """
    steps = np.unique(np.frombuffer(own.steps, dtype=np.int64))
    older = [np.frombuffer(kept.steps, dtype=np.int64) for kept in before]
    led = np.unique(np.concatenate([part[part < steps[0]] for part in older])) if older else steps[:0]
    steps = np.concatenate([led, steps])
    onset = row["onset_step"]
    at = int(np.searchsorted(steps, onset))
    end = marks.bad_until(row)
    until = at if end is None else int(np.searchsorted(steps, end))
    lasted = min(max(until - at, 0), MOST_AFTER)
    around = min(max(LEAST_AROUND, lasted), MOST_BEFORE)
    after = lasted + max(LEAST_AROUND, min(lasted, MOST_BEFORE))
    first = steps[max(0, at - around)]
    return int(first), int(steps[min(len(steps) - 1, at + after)])
