"""One picture: lines over a step axis, with marks. SVG that stretches to any width without stretching its text.

Lines lie in a nested picture of ``WIDTH`` units that is stretched; everything else is placed by percentages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from markupsafe import Markup

from . import scale
from .recorded import Column
from .svg import path, percent, tag
from .thinning import Floats, Ints, thin

#: Units of the stretched picture, and pixel columns for thinning: about what a wide screen has.
WIDTH = 1000
#: Height of the step axis under a picture, in pixels.
FOOT = 22
#: Share of the width that is left free on either side.
EDGE = 0.006
#: A line is interrupted where steps are missing for this many usual distances.
GAP = 20
#: Labels over marks may lie in this many rows, and must not overlap in a picture as narrow as this, in pixels.
ROWS_OF_FLAGS = 4
FLAG = 14
NARROW = 320
_NO_MEANINGS: Mapping[str, str] = MappingProxyType({})
#: With at most this many points in the picture each of them is shown.
FEW = 120


@dataclass(frozen=True, slots=True)
class Line:
    """A column under the name that its legend has. ``look`` is a class of the page's style."""

    name: str
    column: Column
    look: str = "main"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something at a step: a vertical line, with a band to ``end`` if it lasted, and a label that may be a link."""

    step: float
    look: str
    says: str
    end: float | None = None
    label: str = ""
    href: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """What a page shows of one picture. ``signs`` say what the marks in it mean, ``notes`` what the lines do not show."""

    axis: Markup
    plot: Markup
    legend: tuple[tuple[str, str], ...]  # look, name
    notes: tuple[str, ...]
    log: bool
    points: list[dict[str, Any]] = field(default_factory=list)
    first: float = 0.0
    last: float = 1.0
    signs: tuple[tuple[str, str], ...] = ()  # look, meaning


def draw(
    lines: Sequence[Line],
    first: float,
    last: float,
    *,
    says: str,
    height: int = 220,
    marks: Sequence[Mark] = (),
    ticks: Sequence[tuple[str, Sequence[int]]] = (),
    meanings: Mapping[str, str] = _NO_MEANINGS,
    warming: float | None = None,
    columns: int = WIDTH,
    values: bool = False,
    stepped: bool = True,
) -> Picture:
    """Draw lines from step ``first`` to ``last``.

    ``says`` names the picture for a reader that cannot see it. Values before step ``warming`` may lie above the frame,
    where the rest of the curve can be seen better then; a note says so. ``columns`` is how many pixel columns the picture is meant
    for: fewer points are written for a small one. ``values`` keeps the drawn numbers beside the picture. ``stepped``
    writes step numbers under it. ``ticks`` are steps by look that are only ticked on the axis; ``meanings`` are those of the
    looks that the legend explains.
    """
    room = EDGE * (last - first) if last > first else 1.0
    first, last = first - room, last + room
    parts = [_Part(line, first, last) for line in lines]
    shown = [part for part in parts if len(part.steps)]
    values_shown = np.concatenate([part.values for part in shown]) if shown else np.zeros(0)
    early = None
    if warming is not None and shown:
        early = np.concatenate([part.steps for part in shown]) < warming
    axis = scale.choose(values_shown, early)
    few = max((len(part.steps) for part in parts), default=0) <= FEW
    behind: list[Markup] = []
    above: list[Markup] = []
    top = _marks(marks, first, last, height, behind, above)
    drawn: list[Markup] = []
    points: list[dict[str, Any]] = []
    for part in parts:
        kept = part.thinned(columns)
        heights = height * (1 - np.clip(axis.place(part.values[kept]), -2, 3))
        places = np.asarray(WIDTH * (part.steps[kept] - first) / (last - first), dtype=np.float64)
        cuts = part.cuts(kept)
        drawn.append(tag("path", class_=f"line {part.line.look}", d=path(_pieces(places, heights, cuts))))
        if few and part.line.look != "usual":
            dots = ([(x, y)] for x, y in zip(places.tolist(), heights.tolist(), strict=True))
            drawn.append(tag("path", class_=f"dots {part.line.look}", d=path(dots)))
        if part.bad:
            spots = sorted({round(WIDTH * (step - first) / (last - first)) for step in part.bad})
            drawn.append(tag("path", class_="nonfinite", d=path([(float(x), 5.0)] for x in spots)))
        if values:
            points.append(_points(part, kept))
    behind.insert(0, _grid(axis, height, top))
    ticked = _ticked(ticks, first, last)
    drawn += [tag("path", class_=f"ticked {look}", d=_strokes(places, height)) for look, places, _ in ticked]
    data = tag(
        "svg",
        *drawn,
        class_="data",
        viewBox=f"0 0 {WIDTH} {height}",
        preserveAspectRatio="none",
        y=top,
        width="100%",
        height=height,
    )
    foot = _foot(first, last, top + height) if stepped else []
    total = top + height + (FOOT if stepped else 2)
    plot = tag("svg", *behind, data, *above, *foot, class_="plot", height=total, role="img", aria_label=says)
    return Picture(
        axis=_scale(axis, height, top, total),
        plot=plot,
        legend=tuple((line.look, line.name) for line in lines),
        notes=tuple(_notes(parts, axis)),
        log=axis.log,
        points=points,
        first=first,
        last=last,
        signs=tuple(_signs(marks, first, last, meanings)) + tuple((f"tick {look}", name) for look, _, name in ticked),
    )


class _Part:
    """What a picture sees of a line: its finite points within the range, and where it is not finite."""

    def __init__(self, line: Line, first: float, last: float) -> None:
        self.line = line
        column = line.column.between(first, last)
        finite = np.isfinite(column.values)
        self.first, self.last = first, last
        self.steps: Ints = column.steps[finite]
        self.values: Floats = column.values[finite]
        self.bad: list[int] = column.steps[~finite].tolist()
        self.words = [scale.short(value) for value in column.values[~finite].tolist()]
        self._breaks = np.asarray(column.steps[~finite])

    def thinned(self, columns: int) -> Ints:
        place = (self.steps - self.first) / (self.last - self.first)
        return thin((place * (columns - 1)).astype(np.int64), self.values)

    def cuts(self, kept: Ints) -> Ints:
        """Return the places among the kept points before which the line is interrupted."""
        steps = self.steps
        if len(steps) < 2:
            return np.zeros(0, dtype=np.int64)
        gaps = np.diff(steps)
        usual = float(np.median(gaps)) or 1.0
        cut = gaps > GAP * usual
        if len(self._breaks):
            before = np.searchsorted(self._breaks, steps[:-1])
            cut |= np.searchsorted(self._breaks, steps[1:]) > before
        places = np.flatnonzero(cut) + 1
        # The first kept point at or after each cut: both sides of one are ends of their pixel columns or lie in one column.
        return np.unique(np.searchsorted(kept, places))


def _pieces(places: Floats, heights: Floats, cuts: Ints) -> list[list[tuple[float, float]]]:
    joined = list(zip(places.tolist(), heights.tolist(), strict=True))
    ends = [0, *cuts.tolist(), len(joined)]
    return [joined[begin:end] for begin, end in pairwise(ends)]


def _points(part: _Part, kept: Ints) -> dict[str, Any]:
    return {
        "name": part.line.name,
        "steps": part.steps[kept].tolist(),
        "values": [scale.short(value) for value in part.values[kept].tolist()],
        "bad": list(zip(part.bad[:200], part.words[:200], strict=True)),
    }


def _grid(axis: scale.Axis, height: int, top: int) -> Markup:
    rows = (top + height * (1 - axis.place(np.array(axis.ticks(_ticks(height)))))).tolist()
    return tag("g", *(tag("line", x1=0, x2="100%", y1=y, y2=y) for y in rows), class_="grid")


def _scale(axis: scale.Axis, height: int, top: int, total: int) -> Markup:
    ticks = axis.ticks(_ticks(height))
    rows = (top + height * (1 - axis.place(np.array(ticks)))).tolist()
    texts = [
        tag("text", text, x=50, y=min(max(y + 4, 10), top + height), text_anchor="end")
        for text, y in zip(scale.labels(ticks), rows, strict=True)
    ]
    return tag("svg", *texts, class_="scale", width=56, height=total, aria_hidden="true")


def _ticks(height: int) -> int:
    return max(2, min(5, height // 36))


def _foot(first: float, last: float, height: int) -> list[Markup]:
    texts = []
    whole = [step for step in scale.linear_ticks(first, last, 8) if step == round(step)]
    for index, step in enumerate(whole):
        share = (step - first) / (last - first)
        anchor = "start" if share < 0.03 else ("end" if share > 0.97 else "middle")
        look = "tick" if index % 2 == 0 else "tick wide"
        texts.append(tag("text", scale.whole(step), class_=look, x=percent(share), y=height + 16, text_anchor=anchor))
    return texts


def _marks(
    marks: Sequence[Mark], first: float, last: float, height: int, behind: list[Markup], above: list[Markup]
) -> int:
    """Write the marks that lie in the picture, and return how many pixels their labels need over it."""
    seen = sorted(
        (mark for mark in marks if _visible(mark, first, last)),
        key=lambda mark: mark.step,
    )
    ends = [-1.0] * ROWS_OF_FLAGS
    shares = [(max(mark.step, first) - first) / (last - first) for mark in seen]
    rows = [
        _free_row(ends, mark, left) if mark.step >= first else None for mark, left in zip(seen, shares, strict=True)
    ]
    top = max((FLAG * (row + 1) + 4 for row in rows if row is not None), default=0)
    for mark, left, row in zip(seen, shares, rows, strict=True):
        title = tag("title", mark.says)
        x = percent(left)
        begin = 0 if row is None else FLAG * row + 4
        if mark.end is not None and mark.end > mark.step:
            width = percent((min(mark.end, last) - first) / (last - first) - left)
            behind.append(tag("rect", title, class_=f"band {mark.look}", x=x, width=width, y=top, height=height))
        if mark.step >= first:
            behind.append(tag("line", title, class_=f"mark {mark.look}", x1=x, x2=x, y1=begin, y2=top + height))
        if row is not None:
            anchor = "start" if left < 0.02 else ("end" if left > 0.92 else "middle")
            text = tag("text", title, mark.label, class_=f"flag {mark.look}", x=x, y=begin + 7, text_anchor=anchor)
            above.append(tag("a", text, href=mark.href) if mark.href else text)
    return top


def _visible(mark: Mark, first: float, last: float) -> bool:
    return mark.step <= last and (mark.step if mark.end is None else mark.end) >= first


def _signs(marks: Sequence[Mark], first: float, last: float, meanings: Mapping[str, str]) -> list[tuple[str, str]]:
    looks = {mark.look for mark in marks if _visible(mark, first, last)}
    return [(look, meaning) for look, meaning in meanings.items() if look in looks]


def _ticked(ticks: Sequence[tuple[str, Sequence[int]]], first: float, last: float) -> list[tuple[str, list[int], str]]:
    """Return each look with its places in the picture, one a pixel column, and what the legend says of it."""
    found = []
    for look, steps in ticks:
        inside = [step for step in steps if first <= step <= last]
        if inside:
            places = sorted({round(WIDTH * (step - first) / (last - first)) for step in inside})
            found.append((look, places, look if len(inside) == 1 else f"{look} ({scale.whole(len(inside))})"))
    return found


def _strokes(places: Sequence[int], height: int) -> str:
    return "".join(f"M{place} {height}v-7" for place in places)


def _free_row(ends: list[float], mark: Mark, left: float) -> int | None:
    """Return the row in which a mark's label overlaps none before it, also where the picture is narrow."""
    if not mark.label:
        return None
    half = (len(mark.label) * 6.5 + 8) / NARROW / 2
    for row in range(len(ends)):
        if left - half > ends[row]:
            ends[row] = left + half
            return row
    return None


def _notes(parts: Sequence[_Part], axis: scale.Axis) -> list[str]:
    notes = []
    for part in parts:
        if part.bad:
            counts = {word: part.words.count(word) for word in dict.fromkeys(part.words)}
            words = ", ".join(f"{word} {scale.whole(count)}×" for word, count in counts.items())
            where = f"at step {scale.whole(part.bad[0])}"
            if len(part.bad) > 1:
                where = f"from step {scale.whole(part.bad[0])} to {scale.whole(part.bad[-1])}"
            notes.append(f"{part.line.name} is not finite {where} ({words}): dots at the upper edge.")
        if len(part.values) == 0 or part.line.look == "usual":
            continue
        over = part.values > axis.high
        if over.any():
            highest, count = scale.short(float(part.values.max())), int(over.sum())
            said = (
                f"One value of {part.line.name}, {highest}, lies"
                if count == 1
                else (f"{scale.whole(count)} values of {part.line.name} up to {highest} lie")
            )
            last = part.steps[over][-1]
            notes.append(f"{said} above the frame, at step {scale.whole(last)}{'' if count == 1 else ' and before'}.")
    zeros = [part.line.name for part in parts if axis.log and (part.values <= 0).any()]
    if zeros:
        notes.append(f"Zeros ({', '.join(dict.fromkeys(zeros))}) lie on the lower edge: the axis is logarithmic.")
    return notes
