"""What ranks hold or read that they should not: replicas that are no longer equal, batches that two of them share, work that is uneven.

Looked at record by record and remembered by kind; which kind an incident is about, its rules say by the signals they read. So a
rank that is always a little slower is not named where something else is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import Struct, field

from .block import Block, Bools, Floats

Kind = Literal["drift", "weights", "duplicate", "tokens", "slow", "faulty", "throttled"]

#: The signals by which each kind shows, the best one first.
SIGNALS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "drift": ("param_hash",),
        "weights": ("ln_weight_norm",),
        "duplicate": ("batch_rows_hash", "batch_hash", "sample_overlap"),
        "tokens": ("batch_supervised_tokens",),
        "slow": ("rank_compute_seconds",),
        "faulty": ("gpu_faults", "gpu_ecc_uncorrected", "gpu_row_remap_failed"),
        "throttled": ("gpu_throttled",),
    }
)
#: Kinds that are a device's own, each a number above 0.
OF_DEVICES: tuple[Kind, ...] = ("faulty", "throttled")
#: Factor off the ranks' middle from which a record counts as one of uneven tokens, or of a slow rank.
UNEVEN, SLOW = 1.5, 1.25
#: Share of a norm of weights by which ranks that hold the same ones do not differ (case D01).
SAME_WEIGHTS = 1e-6
#: What is compared of a batch with those of the other ranks, and the factor beyond all of theirs from which it is unlike them.
FINGERPRINT: Mapping[str, float] = MappingProxyType(
    {"batch_longest_repeat_tokens": 3.0, "batch_unique_token_ratio": 1.25, "batch_supervised_tokens": 2.0}
)
#: By how much a source's share must be larger than on any other rank.
MIX = 0.4
#: Marks of one kind that are remembered, and the share of them that a rank must be in to be named.
KEPT, SHARE = 64, 0.5


class Apart(Struct, frozen=True):
    """Ranks that are apart at a step; none where it cannot be said which of them."""

    step: int
    ranks: list[int]


class Kept(Struct):
    """The newest marks by kind, and the newest step at which all replicas were equal."""

    marks: dict[str, list[Apart]] = field(default_factory=dict)
    equal_at: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a block shows: marks by kind with their rows, and the rows at which all replicas were equal."""

    marks: Mapping[Kind, Sequence[tuple[int, Apart]]]
    equal: Sequence[tuple[int, int]]  # (row, step)


@dataclass(frozen=True, slots=True)
class Named:
    """The ranks of one kind, in how many records since which step."""

    ranks: tuple[int, ...]
    records: int
    step: int


def kinds_of(signals: Collection[str]) -> Iterable[Kind]:
    """Yield the kinds that a rule which reads these signals is about."""
    for kind, names in SIGNALS.items():
        if any(name in signals for name in names):
            yield kind


def scan(block: Block) -> Seen:
    """Look at all rows of a block of several ranks."""
    marks: dict[Kind, list[tuple[int, Apart]]] = {}
    equal: list[tuple[int, int]] = []
    ranks, table = _table(block, "param_hash")
    if len(ranks) > 1:
        equal = _mark_drift(block, ranks, table, marks)
    ranks, table = _table(block, "ln_weight_norm")
    if len(ranks) > 1:
        _mark_weights(block, ranks, table, marks)
    for name in SIGNALS["duplicate"][:2]:
        ranks, table = _table(block, name)
        if len(ranks) > 1:
            _mark(block, ranks, twins(table), "duplicate", marks)
            break
    ranks, table = _table(block, "sample_overlap")
    with np.errstate(invalid="ignore"):
        _mark(block, ranks, table > 0, "duplicate", marks)
    ranks, table = _table(block, "batch_supervised_tokens")
    if len(ranks) > 2:
        centre = middle(table)
        with np.errstate(invalid="ignore"):
            _mark(block, ranks, (table > UNEVEN * centre) | (table * UNEVEN < centre), "tokens", marks)
    ranks, table = _table(block, "rank_compute_seconds")
    if len(ranks) > 1:
        with np.errstate(invalid="ignore"):
            _mark(block, ranks, table > SLOW * middle(table), "slow", marks)
    _mark_devices(block, marks)
    return Seen(marks, equal)


def advance(kept: Kept, seen: Seen, first: int, end: int) -> None:
    """Remember what the rows ``[first, end)`` showed."""
    for kind, rows in seen.marks.items():
        found = [mark for row, mark in rows if first <= row < end]
        if found:
            kept.marks[kind] = [*kept.marks.get(kind, ()), *found][-KEPT:]
    for row, step in seen.equal:
        if first <= row < end:
            kept.equal_at = step


def named(kept: Kept, kinds: Iterable[Kind], since: int) -> dict[Kind, Named]:
    """Return, of each kind that was seen from ``since`` on, the ranks that were in most of its marks."""
    found: dict[Kind, Named] = {}
    for kind in kinds:
        marks = [mark for mark in kept.marks.get(kind, ()) if mark.step >= since]
        if not marks:
            continue
        counts: dict[int, int] = {}
        for mark in marks:
            for rank in mark.ranks:
                counts[rank] = counts.get(rank, 0) + 1
        ranks = tuple(sorted(rank for rank, count in counts.items() if count > SHARE * len(marks)))
        found[kind] = Named(ranks, len(marks), marks[0].step)
    return found


def twins(values: Floats) -> Bools:
    """Say which of the members (members, n) hold a value that another one holds too; NaN is no value.

    None at a row where they fall into groups of one size: ranks that split one model's work read one batch by design, and where all
    of them do it is the sampler, which other numbers tell.
    """
    found: Bools = np.zeros(values.shape, dtype=np.bool_)
    ordered = np.sort(values, axis=0)
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero((ordered[1:] == ordered[:-1]).any(axis=0))
    for row in rows.tolist():
        column = values[:, row]
        known = ~np.isnan(column)
        _, inverse, counts = np.unique(column[known], return_inverse=True, return_counts=True)
        if len(set(counts.tolist())) > 1:
            found[np.flatnonzero(known)[counts[inverse] > 1], row] = True
    return found


def middle(table: Floats) -> Floats:
    """Return the median over the members (members, n), what is not finite left out; NaN where nothing is."""
    finite = np.isfinite(table)
    if finite.all():
        found: Floats = np.median(table, axis=0)
        return found
    values = np.full(table.shape[1], np.nan)
    some = finite.any(axis=0)
    if some.any():
        values[some] = np.nanmedian(np.where(finite, table, np.nan)[:, some], axis=0)
    return values


def unlike(block: Block, row: int, ranks: Sequence[int]) -> str:
    """Say in what the batch of these ranks is unlike that of the others at a row, by its fingerprint; an empty text where in nothing."""
    said = []
    for name, factor in FINGERPRINT.items():
        mine: list[float] = []
        others: list[float] = []
        for (signal, rank), column in block.ranks.items():
            if signal == name and column.present[row] and np.isfinite(column.values[row]):
                (mine if rank in ranks else others).append(float(column.values[row]))
        if not mine or not others:
            continue
        low, high = min(others), max(others)
        if len(others) == 1:  # which tells nothing of how much batches differ anyway
            factor *= factor
        worst = max(mine, key=lambda value: max(value - high, low - value))
        beyond = worst > high + (high - low) or worst < low - (high - low)
        if beyond and (worst > factor * high or worst * factor < low):
            said.append(f"{name} {worst:.4g} against {low:.4g} to {high:.4g}")
    return ", ".join([*said, *_sources(block, row, ranks)])


def _sources(block: Block, row: int, ranks: Sequence[int]) -> list[str]:
    """Say of which sources the batch of these ranks holds far more than that of any other rank."""
    shares: dict[str, tuple[list[float], list[float]]] = {}
    for (signal, rank), column in block.ranks.items():
        if signal.startswith("source_share.") and column.present[row]:
            mine, others = shares.setdefault(signal.removeprefix("source_share."), ([], []))
            (mine if rank in ranks else others).append(float(column.values[row]))
    found = []
    for source, (mine, others) in sorted(shares.items()):
        high = max(others, default=0.0)
        if mine and max(mine) > high + MIX:
            found.append(f"{100 * max(mine):.0f} % of source {source} against {100 * high:.0f} % at most")
    return found[:3]


def _table(block: Block, name: str) -> tuple[list[int], Floats]:
    """Return the ranks that have a signal and its values (ranks, n), NaN where it is absent or not finite."""
    columns = {rank: column for (signal, rank), column in block.ranks.items() if signal == name}
    ranks = sorted(columns)
    if not ranks:
        return [], np.zeros((0, len(block)))
    values = [np.where(columns[rank].present, columns[rank].values, np.nan) for rank in ranks]
    table = np.stack(values)
    return ranks, np.where(np.isfinite(table), table, np.nan)


def _mark(
    block: Block, ranks: Sequence[int], odd: Bools, kind: Kind, marks: dict[Kind, list[tuple[int, Apart]]]
) -> None:
    for row in np.flatnonzero(odd.any(axis=0)).tolist() if len(ranks) else ():
        found = [ranks[place] for place in np.flatnonzero(odd[:, row]).tolist()]
        marks.setdefault(kind, []).append((row, Apart(int(block.step[row]), found)))


def _mark_devices(block: Block, marks: dict[Kind, list[tuple[int, Apart]]]) -> None:
    """Mark the ranks whose device says something of itself; where their own records are not read, the one with the most of it."""
    own = {signal for signal, _ in block.ranks if signal.startswith("gpu_")}
    told = {signal for signal, _ in block.stats if signal.startswith("gpu_")}
    for kind in OF_DEVICES:
        for name in SIGNALS[kind]:
            if name in own:
                ranks, table = _table(block, name)
                with np.errstate(invalid="ignore"):
                    _mark(block, ranks, table > 0, kind, marks)
            elif name in told:
                most, whose = block.stats[name, "max"], block.stats[name, "argmax"]
                with np.errstate(invalid="ignore"):
                    rows = np.flatnonzero(most.present & (most.values > 0))
                for row in rows.tolist():
                    marks.setdefault(kind, []).append((row, Apart(int(block.step[row]), [int(whose.values[row])])))


def _mark_weights(
    block: Block, ranks: Sequence[int], table: Floats, marks: dict[Kind, list[tuple[int, Apart]]]
) -> None:
    """Mark where a norm of weights is not one number, with the ranks whose it is not where most agree on one."""
    centre = middle(table)
    with np.errstate(invalid="ignore"):
        apart = np.abs(table - centre)
        same = SAME_WEIGHTS * np.abs(centre)
        odd = apart > same
        most_agree = 2 * (apart <= same).sum(axis=0) > (~np.isnan(table)).sum(axis=0)
    for row in np.flatnonzero(odd.any(axis=0)).tolist():
        found = [ranks[place] for place in np.flatnonzero(odd[:, row]).tolist()] if most_agree[row] else []
        marks.setdefault("weights", []).append((row, Apart(int(block.step[row]), found)))


def _mark_drift(
    block: Block, ranks: Sequence[int], table: Floats, marks: dict[Kind, list[tuple[int, Apart]]]
) -> list[tuple[int, int]]:
    """Mark the ranks whose hash is not that of most; return the rows at which all are equal."""
    known = ~np.isnan(table)
    equal: list[tuple[int, int]] = []
    for row in np.flatnonzero(known.sum(axis=0) > 1).tolist():
        column = table[:, row]
        values, counts = np.unique(column[known[:, row]], return_counts=True)
        step = int(block.step[row])
        if len(values) == 1:
            equal.append((row, step))
            continue
        most = int(np.argmax(counts))
        if 2 * counts[most] > counts.sum():
            odd = np.flatnonzero(known[:, row] & (column != values[most]))
            found = [ranks[place] for place in odd.tolist()]
        else:
            found = []
        marks.setdefault("drift", []).append((row, Apart(step, found)))
    return equal
