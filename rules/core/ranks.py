"""One rank or all (design §4.11): which ranks stand out alone, at which records, and on which hosts they run.

A rank that stands out alone is its data or its hardware; what all ranks must share and do not is the communication. Vectorised over
a block: with one rank nothing is looked at, and a record at which nothing stands out costs no Python of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec import field as stored

from . import ranks_apart, ranks_few, ranks_told
from .block import Block, Bools, Floats
from .ranks_apart import Kept, Named, middle, unlike

Kind = Literal["nonfinite", "loss", "gradient", "shared", "failed"]

#: A rank's loss this many robust deviations above the other ranks' is its own affair (design §4.11).
RANK_SDS = 10.0
#: What a rank stands out by is at least this share of the middle, whatever the spread; and so many times what is usual, after so many.
FLOORS: Mapping[Kind, float] = MappingProxyType({"loss": 1e-3, "gradient": 0.2})
USUAL, LEARNED, FADES, SLOWLY = 4.0, 20, 0.02, 1.5
#: Ranks from which a comparison between their losses means something; one value that is not finite tells among two.
RANKS, RANKS_OF_BAD = 4, 2
#: Relative difference of a value after a reduction from which two ranks do not hold the same (case A25: 0.003), and below which they do.
DIFFER, AGREE = 1e-4, 1e-5
#: Records in agreement after which a difference between all ranks is news; without them each rank logs a part of its own (case D05).
AGREED = 100
#: Relative difference of the ranks' own losses below which they are the same number (case A22: six digits and more).
SAME = 1e-5
#: Records of a start after which it is known that the ranks never logged the same (case D05).
ENOUGH = 50
#: Marks that are remembered.
REMEMBERED = 64
#: Steps around an onset within which a mark may be its beginning.
NEAR = 3


class Mark(Struct, frozen=True):
    """Ranks that stand out at a step: by a loss or an own gradient that is not finite or high, or by a shared value that they alone have.

    ``batch`` says in what their batch was unlike that of the others, where it was.
    """

    step: int
    kind: Kind
    ranks: list[int]
    batch: str = ""


class RankWatch(Struct):
    """What is remembered of a start's ranks: the newest marks, and counts of records.

    ``same``: records in a row in which all ranks' own losses were one number. ``agreed`` and ``scattered``: records in which the
    ranks' gradient norms were one number on all of them, and on no most of them. ``said``: they were scattered from the start;
    ``whole``: and became one number later; ``parted_before``: they were scattered in the attempt before.
    ``lead`` and ``leads``: by how much the highest loss usually lies above the middle, from so many records. ``past``: what the losses
    of few ranks usually are, and ``alone`` the one of them that left it in the newest record.
    """

    marks: list[Mark] = stored(default_factory=list)
    same: int = 0
    agreed: int = 0
    scattered: int = 0
    said: bool = False
    lead: float = 0.0
    leads: int = 0
    past: dict[int, ranks_few.Past] = stored(default_factory=dict)
    alone: int | None = None
    whole: bool = False
    parted_before: bool = False
    apart: Kept = stored(default_factory=Kept)


@dataclass(frozen=True, slots=True)
class Whose:
    """Where it showed first. ``hosts`` are those of ``ranks``, of ``of_hosts`` in all; domains likewise.

    ``ambiguous``: clocks do not tell which of the hosts was first. ``differ``: ranks whose shared values differ, over so many
    ``differing`` records. ``same``: records in which all ranks' own losses were one number. ``bad``: records in which a loss of
    some ranks alone was not finite, the newest at step ``bad_at``. ``batch``: in what the batch of ``ranks`` was unlike the others'.
    ``apart``: by kind, the ranks of what the incident's rules are about. ``equal_at``: when all replicas were last equal.
    """

    kind: Kind | None = None
    step: int | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    of_ranks: int = 1
    of_hosts: int = 1
    of_domains: int = 1
    ambiguous: bool = False
    differ: tuple[int, ...] = ()
    differing: int = 0
    same: int = 0
    bad: int = 0
    bad_at: int | None = None
    says: str = ""
    batch: str = ""
    apart: Mapping[ranks_apart.Kind, Named] = field(default_factory=dict)
    equal_at: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """What a block shows of its ranks, row by row."""

    n: int
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    same: Bools | None = None
    agree: Bools | None = None
    scattered: Bools | None = None
    leads: Floats | None = None
    apart: ranks_apart.Seen | None = None
    few: tuple[Block, list[int], Floats] | None = None  #: losses (ranks, n), where two or three ranks have one


def scan(block: Block) -> Rows | None:
    """Look at all rows of a block of several ranks; None where it has one.

    Where the records of all ranks are not read, what a record says of all of them (``ranks``) is looked at instead.
    """
    if not block.ranks and not block.stats:
        return None
    marks: dict[int, list[Mark]] = {}
    same = agree = scattered = leads = few = None
    ranks, losses = _table(block, ("rank_loss", "loss"))
    if len(ranks) >= RANKS_OF_BAD:
        same = _same(block, losses)
        leads = _mark_high(block, "loss", ranks, losses, marks)
        known = (~np.isnan(losses)).sum(axis=0)
        if ((known >= ranks_few.FEWEST) & (known <= ranks_few.MOST)).any():
            few = (block, ranks, losses)
    told_losses = ranks_told.losses(block, len(ranks), SAME)
    if told_losses is not None:
        same, leads = told_losses.one, told_losses.lead
        _mark_told_losses(block, told_losses, marks)
    ranks, norms = _table(block, ("rank_grad_norm",))
    if len(ranks) >= RANKS_OF_BAD:
        _mark_high(block, "gradient", ranks, norms, marks)
    ranks, norms = _table(block, ("grad_norm",))
    if len(ranks) > 1:
        agree, differ = _compare(norms)
        scattered = _mark_shared(block, ranks, norms, differ, marks)
    told_norms = ranks_told.norms(block, len(ranks), AGREE, DIFFER)
    if told_norms is not None:
        agree, scattered = told_norms.agree, np.zeros_like(told_norms.agree)
        _mark_told_norms(block, told_norms, marks)
    return Rows(len(block), marks, same, agree, scattered, leads, ranks_apart.scan(block), few)


def advance(watch: RankWatch, rows: Rows, first: int, end: int) -> list[Mark]:
    """Take the rows ``[first, end)`` into what is remembered, and return their marks."""
    if rows.same is not None:
        broken = np.flatnonzero(~rows.same[first:end])
        watch.same = watch.same + end - first if not len(broken) else end - first - 1 - int(broken[-1])
    if rows.apart is not None:
        ranks_apart.advance(watch.apart, rows.apart, first, end)
    small = _learn_leads(watch, rows.leads[first:end]) if rows.leads is not None else set()
    found: list[Mark] = []
    alone = _alone(watch, rows, first, end)
    for row in sorted({*(row for row in rows.marks if first <= row < end), *alone}):
        found += alone.get(row, ())
        agreed = watch.agreed + (0 if rows.agree is None else int(rows.agree[first:row].sum()))
        kept = [mark for mark in rows.marks.get(row, ()) if mark.kind != "loss" or row - first not in small]
        found += [mark for mark in kept if mark.ranks or agreed >= AGREED]
    if rows.agree is not None and rows.scattered is not None:
        _look_at_scope(watch, rows.agree[first:end], rows.scattered[first:end])
        watch.agreed += int(rows.agree[first:end].sum())
        watch.scattered += int(rows.scattered[first:end].sum())
    if found:
        watch.marks = [*watch.marks, *found][-REMEMBERED:]
    return found


def _alone(watch: RankWatch, rows: Rows, first: int, end: int) -> dict[int, list[Mark]]:
    """Return, by row, the rank of two or three whose loss alone left its own past twice in a row; and learn what is usual of each."""
    found: dict[int, list[Mark]] = {}
    if rows.few is None:
        return found
    block, ranks, losses = rows.few
    for row, column in enumerate(losses[:, first:end].T.tolist(), start=first):
        known = [place for place, value in enumerate(column) if math.isfinite(value)]
        if not ranks_few.FEWEST <= len(known) <= ranks_few.MOST:
            continue
        pasts = [watch.past.setdefault(ranks[place], ranks_few.Past()) for place in known]
        answer = ranks_few.alone(pasts, [column[place] for place in known])
        before, watch.alone = watch.alone, None
        if answer is not None and answer[1] > ranks_few.LEAVES:
            watch.alone = ranks[known[answer[0]]]
            if watch.alone == before:
                found[row] = [Mark(int(block.step[row]), "loss", [before], unlike(block, row, [before]))]
    return found


def _learn_leads(watch: RankWatch, leads: Floats) -> set[int]:
    """Learn by how much the highest loss usually lies above the middle, and return the places at which it is no more than usual."""
    small = set()
    for place, lead in enumerate(leads.tolist()):
        if not 0 <= lead < np.inf:
            continue
        most = USUAL * watch.lead
        if watch.leads >= LEARNED and lead <= most:
            small.add(place)
        elif watch.leads >= LEARNED:
            lead = SLOWLY * watch.lead  # what an incident brings is learned over hundreds of records
        watch.leads += 1
        watch.lead += (lead - watch.lead) * max(FADES, 1 / watch.leads)
    return small


def _look_at_scope(watch: RankWatch, agree: Bools, scattered: Bools) -> None:
    """Find out once that the ranks' gradient norms have never been one number: each logs its own part (case D05)."""
    if watch.said or watch.agreed or watch.scattered >= ENOUGH:
        return
    enough = np.flatnonzero(watch.scattered + np.cumsum(scattered) >= ENOUGH)
    watch.said = bool(len(enough) and not agree[: enough[0] + 1].any())


def first_whole(watch: RankWatch, block: Block) -> int | None:
    """Return the first row at which all ranks hold one gradient norm, of a start in which each logged that of its own shard (case D05)."""
    if watch.whole or watch.agreed or not block.ranks:
        return None
    ranks, norms = _table(block, ("grad_norm",))
    if len(ranks) < RANKS_OF_BAD:
        return None
    agree, differ = _compare(norms)
    if not agree.any():
        return None
    row = int(np.argmax(agree))
    scattered = _mark_shared(block, ranks, norms, differ, {})
    return row if watch.scattered + int(scattered[:row].sum()) >= ENOUGH else None


def since(marks: Sequence[Mark], step: int) -> list[Mark]:
    """Return the oldest marks from ``step`` on, as many as are kept with an incident."""
    return [mark for mark in marks if mark.step >= step][:REMEMBERED]


def whose(
    marks: Sequence[Mark],
    onset: int,
    uncertainty: int,
    watch: RankWatch,
    hosts: Mapping[int, str],
    domains: Mapping[int, str],
    world_size: int,
    kinds: Iterable[ranks_apart.Kind] = (),
    told: int | None = None,
) -> Whose:
    """Return whose it was at the onset, from the incident's marks.

    ``kinds``: what else its rules are about. ``told``: the first step of a rule that one rank's own value made hold.
    """
    shared = [mark for mark in marks if mark.kind == "shared"]
    own = [mark for mark in marks if mark.kind != "shared" and mark.step <= onset + max(NEAR, uncertainty)]
    bad = [mark for mark in own if mark.kind == "nonfinite"]
    if told is not None and not bad:
        own = [
            mark for mark in marks if mark.kind != "shared" and abs(mark.step - told) <= max(NEAR, uncertainty)
        ] or own
    first = next(iter(bad or own or shared), None)
    apart = ranks_apart.named(watch.apart, kinds, onset - uncertainty)
    ranks = () if first is None else tuple(first.ranks)
    if first is None:
        ranks = next((apart[kind].ranks for kind in ("drift", "weights", *ranks_apart.OF_DEVICES) if kind in apart), ())
    counts: dict[int, int] = {}
    for mark in shared:
        for rank in mark.ranks:
            counts[rank] = counts.get(rank, 0) + 1
    differ = tuple(sorted(rank for rank, count in counts.items() if 2 * count >= len(shared)))
    return Whose(
        kind=None if first is None else first.kind,
        step=None if first is None else first.step,
        ranks=ranks,
        hosts=named(ranks, hosts),
        domains=named(ranks, domains),
        of_ranks=world_size,
        of_hosts=max(1, len(set(hosts.values()))),
        of_domains=max(1, len(set(domains.values()))),
        differ=differ,
        differing=len(shared),
        same=watch.same,
        bad=sum(mark.kind == "nonfinite" for mark in marks),
        bad_at=next((mark.step for mark in reversed(marks) if mark.kind == "nonfinite"), None),
        batch=next((mark.batch for mark in own if mark.batch and tuple(mark.ranks) == ranks), ""),
        apart=apart,
        equal_at=watch.apart.equal_at,
    )


def named(ranks: Sequence[int], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the ranks' hosts or domains, each once, in the order of the ranks."""
    return tuple(dict.fromkeys(names[rank] for rank in ranks if rank in names))


def _table(block: Block, names: Sequence[str]) -> tuple[list[int], Floats]:
    """Return the ranks and their values (ranks, n); the first of the names that a rank has; NaN where it is absent."""
    found: dict[int, Floats] = {}
    absent: dict[int, Bools] = {}
    for name in names:
        for (signal, rank), column in block.ranks.items():
            if signal == name and rank not in found:
                found[rank], absent[rank] = column.values, ~column.present
    ranks = sorted(found)
    if not ranks:
        return [], np.zeros((0, len(block)))
    table = np.stack([found[rank] for rank in ranks])
    missing = np.stack([absent[rank] for rank in ranks])
    # A measured NaN is kept apart from an absent one: it becomes an infinity, which is as little finite.
    table = np.where(np.isnan(table) & ~missing, np.inf, table)
    return ranks, np.where(missing, np.nan, table)


def _same(block: Block, losses: Floats) -> Bools:
    """Say where all ranks' own losses are one number. What was reduced before it was logged is one number to the last bit."""
    own = any(name == "rank_loss" for name, _ in block.ranks)
    whole = np.isfinite(losses).all(axis=0)
    found: Bools = np.zeros(losses.shape[1], dtype=np.bool_)
    if whole.any():
        part = losses[:, whole]
        spread = part.max(axis=0) - part.min(axis=0)
        found[whole] = (spread < SAME * np.abs(part).max(axis=0)) & (own | (spread > 0))
    return found


def _mark_high(block: Block, kind: Kind, ranks: Sequence[int], table: Floats, marks: dict[int, list[Mark]]) -> Floats:
    """Mark where the value of some ranks alone, half of them at most, is not finite or far above the others'.

    Returns by how much the highest finite value lies above the middle, NaN where that cannot be said.
    """
    with np.errstate(invalid="ignore"):
        centre = middle(table)
        apart = np.where(np.isinf(table), np.inf, table - centre)
        spread = 1.4826 * middle(np.abs(apart))
        bad = np.isinf(table)
        known = ~np.isnan(table)
        enough = known.sum(axis=0) >= RANKS
        high = (apart > RANK_SDS * np.maximum(spread, FLOORS[kind] * np.abs(centre))) & enough
        leads = np.where(enough, np.max(np.where(np.isfinite(apart), apart, -np.inf), axis=0), np.nan)
    odd = (bad & ~np.isnan(centre)) | high
    for row in np.flatnonzero(odd.any(axis=0)):
        chosen = np.flatnonzero(odd[:, row]).tolist()
        if 2 * len(chosen) > known[:, row].sum():
            continue
        what: Kind = "nonfinite" if bad[chosen, row].any() else kind
        found = [ranks[place] for place in chosen if what == kind or bad[place, row]]
        marks.setdefault(int(row), []).append(Mark(int(block.step[row]), what, found, unlike(block, int(row), found)))
    return leads


def _mark_told_losses(block: Block, told: ranks_told.Losses, marks: dict[int, list[Mark]]) -> None:
    for row in np.flatnonzero(told.bad | told.high):
        kind: Kind = "nonfinite" if told.bad[row] else "loss"
        marks.setdefault(int(row), []).append(Mark(int(block.step[row]), kind, [int(told.whose[row])]))


def _mark_told_norms(block: Block, told: ranks_told.Norms, marks: dict[int, list[Mark]]) -> None:
    for row in np.flatnonzero(told.differ):
        found = [int(told.whose[row])] if told.alone[row] else []
        marks.setdefault(int(row), []).append(Mark(int(block.step[row]), "shared", found))


def _compare(norms: Floats) -> tuple[Bools, Bools]:
    """Say where all ranks hold the same gradient norm, and where they do not; at least two ranks measured it."""
    finite = np.isfinite(norms)
    enough = finite.sum(axis=0) > 1
    agree: Bools = np.zeros(norms.shape[1], dtype=np.bool_)
    differ = agree.copy()
    if enough.any():
        part = np.where(finite, norms, np.nan)[:, enough]
        top, low = np.nanmax(part, axis=0), np.nanmin(part, axis=0)
        agree[enough] = top - low <= AGREE * np.abs(top)
        differ[enough] = top - low > DIFFER * np.abs(top)
    return agree, differ


def _mark_shared(
    block: Block, ranks: Sequence[int], norms: Floats, differ: Bools, marks: dict[int, list[Mark]]
) -> Bools:
    """Mark where ranks differ: with those that differ alone, or with none where it cannot be said who is right.

    Returns where the latter is so.
    """
    if not differ.any():
        return differ
    centre = middle(norms)
    with np.errstate(invalid="ignore"):
        apart = np.abs(norms - centre)
        most_agree = middle(apart) <= AGREE * np.abs(centre)
        odd = np.isfinite(norms) & (apart > DIFFER * np.abs(centre) / 2) & most_agree
    for row in np.flatnonzero(differ):
        found = [ranks[place] for place in np.flatnonzero(odd[:, row]).tolist()] if len(ranks) > RANKS_OF_BAD else []
        marks.setdefault(int(row), []).append(Mark(int(block.step[row]), "shared", found))
    return differ & ~most_agree
