"""Builds the inputs of the public cases and plays them through the default pack and the judgement, as replay does.

Every input is generated here; only figures that people published are carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np

from trainwarden.record import Event, Step
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.language import Pack, load_pack
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay

Row = dict[str, Any]
Make = Callable[[int, np.random.Generator], Row]


class Verdicts(msgspec.Struct):
    """What came out: incidents in the order of their opening, and notices."""

    incidents: list[dict[str, Any]]
    notices: list[dict[str, Any]]

    @property
    def told(self) -> list[dict[str, Any]]:
        """Incidents that somebody is told of: above info."""
        return [one for one in self.incidents if one["severity"] != "info"]

    @property
    def pages(self) -> list[dict[str, Any]]:
        """Incidents that page."""
        return [one for one in self.incidents if one["severity"] == "critical"]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the notices."""
        return [one["kind"] for one in self.notices]


@cache
def pack() -> Pack:
    return load_pack((files("trainwarden.rules.packs") / "default.yml").read_text(encoding="utf-8"), "default.yml")


def rows(first: int, last: int, make: Make, stride: int = 1, seed: int = 0) -> list[tuple[int, Row]]:
    """Return ``make(step, chance)`` for each record from ``first`` to ``last``."""
    chance = np.random.default_rng(seed)
    return [(step, make(step, chance)) for step in range(first, last + 1, stride)]


def steady(loss: float, sd: float, **others: tuple[float, float]) -> Make:
    """Return a maker of a loss (and other signals) of a level and a standard deviation."""

    def make(step: int, chance: np.random.Generator) -> Row:
        made = {"loss": loss + sd * float(chance.normal())}
        made.update({name: abs(level + spread * float(chance.normal())) for name, (level, spread) in others.items()})
        return made

    return make


def lines_of(
    *attempts: Sequence[tuple[int, Row]],
    stride: int = 1,
    samples: int = 0,
    said: Mapping[int, dict[str, Any]] | None = None,
    events: Mapping[int, Sequence[Event]] | None = None,
    changes: Sequence[tuple[int, str, dict[str, Any]]] = (),
    told_after: int | None = None,
) -> list[tuple[Start, int, Step | Event]]:
    """Return the lines of attempts, each resumed from the record before its first step.

    ``said`` adds to the start event of an attempt, ``events`` are those behind it. ``changes`` (step, kind, fields) are events behind
    the record of their step, or all behind that of ``told_after``.
    """
    lines: list[tuple[Start, int, Step | Event]] = []
    clock = 0.0
    for number, attempt in enumerate(attempts):
        start = Start("uid", "case", number, f"start-{number}")
        first = attempt[0][0]
        resumed = None if number == 0 else {"attempt": number - 1, "step": first - stride, "path": "ckpt"}
        fields = {"world_size": 1, "attempt": number, "start_id": start.start_id, "resumed_from": resumed}
        fields |= (said or {}).get(number, {})
        lines.append((start, 0, Event(kind="start", time=clock, seq=1, step=first - stride, fields=fields)))
        lines += [(start, 0, msgspec.structs.replace(one, time=clock)) for one in (events or {}).get(number, ())]
        seq = 1
        for step, row in attempt:
            clock += 1.0
            seq += 1
            span = [((step - 1) * samples, step * samples)] if samples else []
            record = Step(seq=seq, step=step, time=clock, stride=stride, signals=row, samples=span)
            lines.append((start, 0, record))
            for at, kind, fields in changes:
                if (told_after or at) == step:
                    seq += 1
                    lines.append((start, 0, Event(kind=kind, time=clock, seq=seq, step=at, fields=fields)))
    return lines


def judge(*attempts: Sequence[tuple[int, Row]], settings: Settings | None = None, **how: Any) -> Verdicts:
    """Play attempts as :func:`lines_of` makes them, and return what came out."""
    return play(lines_of(*attempts, **how), settings)


def play(lines: Iterable[tuple[Start, int, Step | Event]], settings: Settings | None = None) -> Verdicts:
    """Play lines as they are and return what came out."""
    found = Replay(settings or Settings(), pack()).run(lines)
    incidents = sorted(found.incidents.values(), key=lambda one: one["opened_step"])
    return Verdicts(incidents, list(found.notices.values()))
