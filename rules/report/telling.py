"""Which signals a close-up shows below the loss: what its alerts read, then what else left its usual values. Never a quiet one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from trainwarden.rules.core.block import Key

from .recorded import Column, StartColumns
from .thinning import Floats

#: The names of the signals that an alert reads.
Reads: TypeAlias = Callable[[str], frozenset[str]]

#: A signal moved at an onset if it left its values before by this many robust deviations, and by more than it had before.
MOVED, FARTHER = 6.0, 1.25
#: Values before the onset from which its usual values are known.
ENOUGH = 10
#: Values behind the onset that are looked at, at least; else as many as before it: what drifts leaves any value in the end.
LEAST_AFTER = 40
#: Signals of one close-up, and of one alert's signal those with different labels.
MOST, MOST_LABELS = 4, 2
#: Signals that only count, tell the time or repeat the plan: the reason of nothing that no alert reads in them.
PASSIVE = frozenset(
    {"sample_position", "epoch", "samples_seen", "tokens", "optimizer_step", "step_duration_seconds", "beta2"}
)


def telling(
    row: dict[str, Any], own: StartColumns, before: Sequence[StartColumns], first: int, last: int, reads: Reads | None
) -> list[Key]:
    """Return the keys of the signals to show of an incident, besides the loss.

    ``before`` are the starts that led to ``own``, oldest first: what was usual before a resume is theirs to say. A signal
    that an alert reads and that did not move is shown only where nothing moved, the loss included: then it is all there is to see.
    """
    onset = int(row["onset_step"])
    read = _read(row, reads)
    scores = {key: _moved(key, own, before, onset, first, last) for key in own.tracks}
    moved = sorted((key for key, score in scores.items() if score > MOVED), key=lambda key: (-scores[key], key))
    chosen = []
    for name in read:
        chosen += [key for key in moved if key[0] == name and key != ("loss",)][:MOST_LABELS]
    if not chosen and "loss" not in read:
        chosen = [key for name in read for key in own.tracks if key[0] == name and key[1:] in ((), ("all",))]
    chosen = chosen[: MOST - 1] if any(_speaks(key) and key not in chosen for key in moved) else chosen[:MOST]
    chosen += [key for key in moved if key not in chosen and _speaks(key)]
    return chosen[:MOST]


def _read(row: dict[str, Any], reads: Reads | None) -> list[str]:
    """Return the names of the signals that an incident's alerts read, those of the first alert first."""
    if reads is None:
        return []
    return list(dict.fromkeys(name for alert in row.get("alerts") or [] for name in sorted(reads(str(alert)))))


def _speaks(key: Key) -> bool:
    """Say whether a signal may be shown though no alert reads it."""
    if key[0] in PASSIVE or key == ("loss",):
        return False
    return len(key) == 1 or key[-1] == "all" or key[0] == "nonfinite"


def _moved(key: Key, own: StartColumns, before: Sequence[StartColumns], onset: int, first: int, last: int) -> float:
    """Return how far a signal left its values before the onset, in robust deviations; 0 where nobody can say."""
    column = own.column(key).between(first, last)
    usual = _finite(column.values[column.steps < onset])
    begins = min(own.steps)
    for older in reversed(before):
        if len(usual) >= ENOUGH:
            break
        part = older.column(key).between(first, begins - 1)
        usual = np.r_[_finite(part.values), usual]
        begins = min(begins, *older.steps)
    after = _behind(column, onset)[: max(len(usual), LEAST_AFTER)]
    if len(usual) < ENOUGH or not len(after):
        return 0.0
    if not np.isfinite(after).all():
        return float("inf")
    level = float(np.median(usual))
    ways = np.abs(usual - level)
    spread = max(1.4826 * float(np.median(ways)), 0.002 * abs(level), 1e-12)
    way = float(np.abs(after - level).max())
    return way / spread if way > FARTHER * float(ways.max()) else 0.0


def _behind(column: Column, onset: int) -> Floats:
    return column.values[column.steps >= onset]


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]
