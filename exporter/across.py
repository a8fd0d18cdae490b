"""What is combined over the ranks, and how it lies in the vectors that the side group reduces.

Two kinds of numbers. *Ranked* ones are a rank's own, of which the records of all ranks say the smallest, the largest, the sum, whose
was the largest, and how many had one. *Shares* are a rank's part of a sum over all elements of the model (a sum of squares, a
count): they become a signal only where every rank measured its part in that step. Each number has its fixed place, so that a
step's vector has one length, whatever the number of ranks. Plain numpy; nothing here knows how it is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwarden.record import RankStats, Value
from trainwarden.signals import GROUPS, QUANTITIES

Floats = NDArray[np.float64]

#: Signals of which a record says how they were on all ranks, by their ``all`` where they are grouped.
RANKED = (
    "loss",
    "loss_expected",
    "grad_norm",
    "rank_grad_norm",
    "rank_compute_seconds",
    "param_hash",
    "step_duration_seconds",
    "tokens",
    "batch_supervised_tokens",
    "batch_unique_token_ratio",
    "batch_longest_repeat_tokens",
    "batch_ids_out_of_range",
    "batch_hash",
    "nonfinite",
    *(f"nonfinite.{quantity}" for quantity in QUANTITIES),
    "gpu_temperature_celsius",
    "gpu_memory_temperature_celsius",
    "gpu_power_watts",
    "gpu_sm_clock_ratio",
    "gpu_throttled",
    "gpu_row_remap_failed",
    "gpu_ecc_uncorrected",
    "gpu_faults",
)
#: Of these a record speaks only where some rank had one: most steps have none.
ONLY_WHERE_FOUND = frozenset(
    name for name in RANKED if name.startswith("nonfinite.") or name in ("gpu_ecc_uncorrected", "gpu_faults")
)
#: A rank's number where no rank is meant.
NO_RANK = 2.0**31


@dataclass(frozen=True, slots=True)
class Own:
    """One rank's numbers of a step. ``values`` count where ``present``; ``shares`` where their set is ``measured``."""

    values: Floats  # (ranked,)
    present: Floats  # (ranked,) 0 or 1
    shares: Floats  # (shares,)
    measured: Floats  # (sets,) 0 or 1


@dataclass(frozen=True, slots=True)
class Joined:
    """A step's numbers over all ranks. ``totals`` are the sums of each set of shares that every rank measured."""

    ranks: dict[str, RankStats] = field(default_factory=dict)
    totals: dict[str, dict[str, float]] = field(default_factory=dict)


class Layout:
    """The places of all numbers. ``sets`` are the shares by the name of the probe that measures them, by group each."""

    def __init__(self, sets: Mapping[str, Sequence[str]]) -> None:
        self.ranked = RANKED
        self._sets = {name: tuple(shares) for name, shares in sets.items() if shares}
        self._place: dict[str, dict[str, slice]] = {}
        self.shares = 0
        for name, shares in self._sets.items():
            self._place[name] = {}
            for share in shares:
                self._place[name][share] = slice(self.shares, self.shares + len(GROUPS))
                self.shares += len(GROUPS)

    @property
    def sets(self) -> int:
        """How many sets of shares there are."""
        return len(self._sets)

    def digest(self) -> str:
        """Return a short name of the layout: ranks of another version have another one."""
        return hashlib.sha256(repr((self.ranked, GROUPS, list(self._sets.items()))).encode()).hexdigest()[:16]

    def own(self, signals: Mapping[str, Value], shares: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Own:
        """Lay out a rank's signals, and its shares by set, share and group. What it did not measure is not a key."""
        values, present = np.zeros(len(self.ranked)), np.zeros(len(self.ranked))
        for at, name in enumerate(self.ranked):
            number = _number(signals, name)
            if number is not None:
                values[at], present[at] = number, 1.0
        parts, measured = np.zeros(self.shares), np.zeros(self.sets)
        for at, (name, places) in enumerate(self._place.items()):
            found = shares.get(name)
            if found is None:
                continue
            measured[at] = 1.0
            for share, place in places.items():
                by_group = found.get(share, {})
                parts[place] = [by_group.get(group, 0.0) for group in GROUPS]
        return Own(values, present, parts, measured)

    def joined(self, sums: Floats, largest: Floats, argmax: Floats, world_size: int) -> Joined:
        """Read what the reductions of one step gave; the rows are those of :func:`to_sum`, :func:`to_max`, :func:`to_min`."""
        count = len(self.ranked)
        present, added, unknown = sums[:count], sums[count : 2 * count], sums[2 * count : 3 * count]
        high, low = largest[:count], -largest[count:]
        ranks: dict[str, RankStats] = {}
        for at, name in enumerate(self.ranked):
            if not present[at] or (name in ONLY_WHERE_FOUND and added[at] == 0.0):
                continue
            ranks[name] = RankStats(
                min=float(low[at]) if present[at] > unknown[at] else np.nan,
                max=float(np.nan if unknown[at] else high[at]),
                sum=float(added[at]),
                argmax=int(argmax[at]),
                n=int(present[at]),
            )
        measured, shares = sums[3 * count : 3 * count + self.sets], sums[3 * count + self.sets :]
        totals: dict[str, dict[str, float]] = {}
        for at, (name, places) in enumerate(self._place.items()):
            if measured[at] == world_size:
                totals[name] = {
                    f"{share}.{group}": float(number)
                    for share, place in places.items()
                    for group, number in zip(GROUPS, shares[place], strict=True)
                }
        return Joined(ranks, totals)


def _number(signals: Mapping[str, Value], name: str) -> float | None:
    """Return a ranked number of a rank's own signals: of a grouped one its ``all``, of counts by quantity their sum."""
    name, _, label = name.partition(".")
    value = signals.get(name)
    if isinstance(value, dict):
        if label:
            value = value.get(label)
        elif "all" in value:
            value = value["all"]
        else:
            numbers = [number for number in value.values() if not isinstance(number, dict)]
            return float(sum(numbers)) if numbers else None
    return float(value) if isinstance(value, int | float) else None


def to_sum(own: Sequence[Own], weight: float) -> Floats:
    """Return (steps, numbers) to be added up over the ranks. ``weight`` is what this rank's shares count."""
    rows = []
    for each in own:
        unknown = np.isnan(each.values) * each.present
        with np.errstate(invalid="ignore"):
            rows.append(np.concatenate([each.present, each.values, unknown, each.measured, each.shares * weight]))
    return np.ascontiguousarray(np.stack(rows))


def to_max(own: Sequence[Own]) -> Floats:
    """Return (steps, numbers) of which the largest over the ranks are taken: the values, and their negatives. NaN is left out."""
    rows = []
    for each in own:
        known = (each.present > 0) & ~np.isnan(each.values)
        rows.append(np.concatenate([np.where(known, each.values, -np.inf), np.where(known, -each.values, -np.inf)]))
    return np.ascontiguousarray(np.stack(rows))


def to_min(own: Sequence[Own], sums: Floats, largest: Floats, rank: int) -> Floats:
    """Return (steps, numbers): this rank's number where its value is the largest. Of several ranks the lowest wins, and NaN first."""
    rows = []
    for each, added, high in zip(own, sums, largest, strict=True):
        count = len(each.values)
        unknown = added[2 * count : 3 * count] > 0
        mine = np.where(unknown, np.isnan(each.values), each.values == high[:count]) & (each.present > 0)
        rows.append(np.where(mine, float(rank), NO_RANK))
    return np.ascontiguousarray(np.stack(rows))
