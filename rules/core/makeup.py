"""How the batches right behind a start are made up, by the signals of the user's own: the ratio of kinds, the mean length.

A loader that fills anew gives other batches at first, and the loss is higher for no fault (case A07). Looked at are the first
records of each start alone: the very first, and those by which it has settled, which tell the next start what is usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from msgspec import Struct, field

from trainwarden.signals import BY_NAME

from .block import Block

#: Records of a start that are its beginning, and those (first, end) by which it has settled.
EARLY, SETTLED = 10, (40, 60)
#: Signals that are followed, the first that come.
MOST = 8
#: Known signals of what a batch is made of.
BATCH = ("batch_supervised_tokens", "batch_unique_token_ratio", "batch_longest_repeat_tokens")
#: Signals of the inside of the model, which tell of another library and not of the batch (case F01).
MODEL = (("activation_rms", "all"), ("activation_absmax", "all"), ("residual_rms",))
INSIDE = ("activation", "residual")
#: Standard deviations and share of the usual value by which the beginning must differ.
SDS, SHARE = 5.0, 0.05


class Makeup(Struct):
    """The values of the beginning and of the settled records, by signal; ``usual`` are those of the attempt before."""

    seen: int = 0
    early: dict[str, list[float]] = field(default_factory=dict)
    settled: dict[str, list[float]] = field(default_factory=dict)
    usual: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moved:
    """A signal that began otherwise than it was before the resume."""

    name: str
    early: float
    usual: float


def after(before: Makeup) -> Makeup:
    """Return what the next start begins with."""
    return Makeup(usual={**before.usual, **before.settled})


def look(makeup: Makeup, block: Block) -> None:
    """Take the records of a start in order; from the sixtieth on there is nothing more to take."""
    if makeup.seen >= SETTLED[1]:
        return
    first, makeup.seen = makeup.seen, min(makeup.seen + len(block), SETTLED[1])
    for key, column in block.columns.items():
        if key not in MODEL and (len(key) != 1 or (key[0] in BY_NAME and key[0] not in BATCH)):
            continue
        for into, start, end in ((makeup.early, 0, EARLY), (makeup.settled, *SETTLED)):
            rows = slice(max(start - first, 0), max(end - first, 0))
            values = column.values[rows][column.present[rows]]
            taken = values[np.isfinite(values)].tolist()
            if taken and (key[0] in into or len(into) < MOST):
                into.setdefault(key[0], []).extend(taken)


def moved(makeup: Makeup, records: int) -> tuple[Moved, ...]:
    """Return the signals whose beginning is far from what was usual before the resume, the farthest first.

    ``records`` is how many of the start were judged: more may have been looked at, and the beginning must be among them.
    """
    found: list[tuple[float, Moved]] = []
    if records < EARLY:
        return ()
    for name, early, usual in _both(makeup.early, makeup.usual):
        middle, spread = float(np.mean(usual)), float(np.std(usual))
        distance = abs(float(np.mean(early)) - middle)
        if distance > max(SDS * spread, SHARE * abs(middle)):
            found.append((distance / max(abs(middle), 1e-300), Moved(name, float(np.mean(early)), middle)))
    return tuple(one for _, one in sorted(found, key=lambda each: (-each[0], each[1].name)))


def _both(
    early: Mapping[str, list[float]], usual: Mapping[str, list[float]]
) -> list[tuple[str, list[float], list[float]]]:
    return [
        (name, early[name], usual[name])
        for name in early
        if len(usual.get(name, ())) >= EARLY and not any(word in name for word in INSIDE)
    ]
