"""The memory of suspect samples: what spiked, named by the data set's own rows, so that a later run that meets them is told.

One sighting is what one incident blames. Its rows are counted within their shards, or within the data set where there are no shards; where
they cannot be told from the records, the positions of that epoch's order stand for them, and only a run with the same order can meet
those. Another version of the data set (another size, other shards) never matches. A sighting is suspect until the same samples spike again
(confirmed), pass unharmed (cleared), or a person dismisses the incident or has it forgotten. The memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from trainwarden.plan import Exclusion
from trainwarden.ranges import length, shared, without
from trainwarden.record import Ranges

from .effects import Query
from .inputs import Observation
from .ordering import Layout

#: Sightings that are remembered; of those beyond, what counts least and is oldest goes first.
MOST = 256
#: Ranges of a sighting that are kept: 12 steps of 20 scattered rows.
MOST_RANGES = 256
#: An end beyond a shard's last row means the rest of it.
WHOLE_SHARD = 1 << 40
#: Other incidents of the same samples that a sighting names.
MOST_AGAIN = 8
#: Steps by which two incidents may differ and still be of the same step of one order.
NEAR = 3
#: How sure an incident without a cause counts at least, where the same samples spiked again.
LEAST = 0.3
#: The kind of query by which a run is told of suspects, so that what it learns of other runs is an input like any other.
TOLD = "suspects"

Standing = Literal["suspect", "confirmed", "cleared", "dismissed", "forgotten", "withdrawn"]


class Again(Struct, frozen=True, kw_only=True):
    """Another incident of some of the same samples.

    ``how``: ``run`` (in another run, or in another epoch or order), ``replay`` (a later attempt made the step again) or ``twin``:
    another run at the same step of the same order, where the recipe may be what both have in common.
    """

    incident: str
    run: str
    attempt: int
    step: int
    how: Literal["run", "replay", "twin"]


class Sighting(Struct, kw_only=True):
    """What one incident blames. ``samples`` are positions of ``epoch`` in ``order``, as they were noted.

    ``rows`` are the suspect rows, by shard (``""``: the data set has none), ``positions`` where rows cannot be told. ``weak``:
    nothing but the place speaks for the data. ``partial``: there was more than is kept. Times are Unix seconds.
    """

    id: str
    incident: str
    run: str
    run_uid: str
    attempt: int
    start_id: str
    step: int
    dataset: str | None
    version: str
    order: str
    epoch: int
    samples: Ranges
    rows: dict[str, Ranges]
    positions: Ranges
    cause: str
    verdict: str
    confidence: float
    weak: bool
    first_seen: float
    last_seen: float
    partial: bool = False
    ended: bool = False  #: the incident's
    state: Standing = "suspect"
    again: list[Again] = field(default_factory=list)
    passes: int = 0
    by: str = ""
    comment: str = ""

    @property
    def standing(self) -> bool:
        """Whether it is still suspect."""
        return self.state in ("suspect", "confirmed")

    @property
    def solid(self) -> bool:
        """Whether more than one odd step speaks for it."""
        return not self.weak or self.state == "confirmed"

    @property
    def sure(self) -> float:
        """How sure it is that the samples are at fault, from 0 to 1: independent witnesses are added up."""
        doubt = 1.0 - self.confidence
        for other in self.again:
            doubt *= 1.0 - (LEAST if other.how == "run" else LEAST / 2)
        return round(1.0 - doubt, 3)


class Met(Struct):
    """A step that read samples of a sighting. ``positions`` are those it read, ``share`` their part of the step's samples.

    ``chance``: how likely a step of this size meets any remembered sample by chance. ``waits``: whether it passed is still to be seen.
    """

    sighting: str
    step: int
    epoch: int
    positions: Ranges
    share: float
    chance: float
    waits: bool = True


class Passing(Struct):
    """What of a sighting a run has eaten unharmed in this epoch; ``dense`` samples of it in steps that read hardly anything else."""

    places: Ranges = field(default_factory=list)
    dense: int = 0


class Recalled(Struct):
    """What a start knows of its data: its layout, the sightings that it was told of and made itself, and how it met them.

    ``expected`` are the positions of ``epoch`` at which known samples lie, by sighting; ``throughout`` the sightings that lie all over
    it; ``by_name`` those of whole shards in an order that cannot be computed, by shard; ``said`` the sightings that a notice told of.
    """

    layout: Layout | None = None
    known: list[Sighting] = field(default_factory=list)
    epoch: int = -1
    expected: dict[str, Ranges] = field(default_factory=dict)
    by_name: dict[str, str] = field(default_factory=dict)
    throughout: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    met: list[Met] = field(default_factory=list)
    passed: dict[str, Passing] = field(default_factory=dict)


class Known(Struct, frozen=True):
    """A sighting that the steps around an incident's onset met."""

    seen: Sighting
    met: Met
    how: Literal["run", "replay", "twin"]


Book = dict[str, Sighting]


def put(book: Book, sighting: Sighting) -> list[Sighting]:
    """Add or replace a sighting, tie it to those of the same samples, and return all that changed."""
    changed = {sighting.id: sighting}
    for other in _unlink(book, sighting.incident):
        changed[other.id] = other
    book[sighting.id] = sighting
    for other in book.values():
        if other.incident == sighting.incident or not other.standing or not overlap(sighting, other):
            continue
        _tie(sighting, other)
        _tie(other, sighting)
        other.last_seen = max(other.last_seen, sighting.last_seen)
        changed[other.id] = other
    for gone in sorted(book.values(), key=_worth)[: max(0, len(book) - MOST)]:
        del book[gone.id]
        if gone.standing:
            gone.state, gone.by, gone.comment = "forgotten", "trainwarden", f"more than {MOST} are remembered"
            changed[gone.id] = gone
    return list(changed.values())


def withdraw(book: Book, sighting: Sighting) -> list[Sighting]:
    """Take a sighting back whose incident turned out to be about something else; return all that changed."""
    sighting.state = "withdrawn"
    del book[sighting.id]
    return [sighting, *_unlink(book, sighting.incident)]


def _unlink(book: Book, incident: str) -> list[Sighting]:
    found = []
    for other in book.values():
        kept = [one for one in other.again if one.incident != incident]
        if len(kept) != len(other.again):
            other.again = kept
            _stand(other)
            found.append(other)
    return found


def _tie(one: Sighting, other: Sighting) -> None:
    how = relation(one.run_uid, one.order, one.epoch, one.step, other)
    again = Again(incident=other.incident, run=other.run, attempt=other.attempt, step=other.step, how=how)
    if all(known.incident != again.incident for known in one.again):
        one.again = [*one.again, again][-MOST_AGAIN:]
    _stand(one)


def _stand(one: Sighting) -> None:
    if one.standing:
        one.state = "confirmed" if any(again.how != "twin" for again in one.again) else "suspect"


def relation(run_uid: str, order: str, epoch: int, step: int, other: Sighting) -> Literal["run", "replay", "twin"]:
    """Say what a step of one run has in common with a sighting besides the samples."""
    same_place = order == other.order and epoch == other.epoch and abs(step - other.step) <= NEAR
    if run_uid == other.run_uid:
        return "replay" if order == other.order and epoch == other.epoch else "run"
    return "twin" if same_place else "run"


def _worth(one: Sighting) -> tuple[bool, bool, float]:
    return (one.standing, one.solid, one.last_seen)


def overlap(one: Sighting, other: Sighting) -> bool:
    """Say whether two sightings name some of the same samples."""
    if one.dataset != other.dataset or one.version != other.version:
        return False
    if any(shared(ranges, other.rows.get(shard, [])) for shard, ranges in one.rows.items()):
        return True
    return one.order == other.order and one.epoch == other.epoch and bool(shared(one.samples, other.samples))


def matching(book: Mapping[str, Sighting], layout: Layout, but: str = "") -> list[Sighting]:
    """Return the standing sightings that a run with this layout may meet, apart from those of start ``but``."""
    version = layout.version
    return [
        one
        for one in book.values()
        if one.standing and one.start_id != but and one.dataset == layout.dataset and one.version == version
    ]


def exclusions(one: Sighting) -> list[Exclusion]:
    """Return what is suspect as an exporter leaves it out; nothing where the data set has no name or rows cannot be told."""
    if one.dataset is None:
        return []
    return [
        Exclusion(dataset=one.dataset, shard=shard, first=first, end=end)
        for shard, ranges in one.rows.items()
        for first, end in ranges
    ]


def inside(known: Iterable[Sighting], expected: Mapping[str, Ranges], skip: Ranges) -> list[Exclusion]:
    """Return the exclusions of known suspects that lie in positions which are to be skipped, and of no other."""
    found: list[Exclusion] = []
    for one in known:
        places = expected.get(one.id, [])
        if places and one.solid and not without(places, skip):
            found += exclusions(one)
    return found


def where(one: Sighting) -> str:
    """Say in words which samples a sighting names."""
    parts = []
    for shard, ranges in list(one.rows.items())[:3]:
        first, end = ranges[0][0], ranges[-1][1]
        rows = f"row {first}" if end - first == 1 else f"rows {first} to {end - 1}"
        if len(ranges) > 1:
            rows = f"{length(ranges)} of {rows}"
        named = f"{shard}, " if shard else ""
        parts.append(f"all of {shard}" if shard and first == 0 and end >= WHOLE_SHARD else f"{named}{rows}")
    if len(one.rows) > 3:
        parts.append(f"{len(one.rows) - 3} more shards")
    if not parts and one.positions:
        parts = [f"positions {one.positions[0][0]} to {one.positions[-1][1] - 1} of epoch {one.epoch}"]
    return "; ".join(parts)


def row(one: Sighting) -> dict[str, Any]:
    """Return the JSON object of a sighting, as it is stored and shown."""
    data = msgspec.to_builtins(one)
    left_out = ("rows", "positions", "samples", "start_id", "ended")
    kept: dict[str, Any] = {name: value for name, value in data.items() if name not in left_out}
    kept["confidence"] = one.sure
    kept["seen"] = 1 + len(one.again)
    kept["shards"] = [{"shard": shard, "rows": [list(pair) for pair in ranges]} for shard, ranges in one.rows.items()]
    kept["positions"] = [list(pair) for pair in one.positions]
    kept["exclude"] = [msgspec.to_builtins(item) for item in exclusions(one)]
    kept["where"] = where(one)
    return kept


def question(start_id: str, run_uid: str, found: Sequence[Sighting]) -> Query:
    """Return the query by which a start is told of ``found``: it carries the answer, which the driver hands back and journals."""
    entries = [msgspec.to_builtins(one) for one in found]
    return Query(f"{TOLD}:{start_id}", TOLD, {"start_id": start_id, "run_uid": run_uid, "entries": entries})


def answer(query: Query, time: float) -> Observation | None:
    """Return a driver's answer to a query for suspects, None for any other query. ``time`` is Unix seconds."""
    if query.kind != TOLD:
        return None
    return Observation(query.query_id, time, values=query.arguments)


def told_in(value: Observation) -> tuple[str, str, list[Sighting]] | None:
    """Return start, run and sightings of an answer; None for any other observation."""
    if not value.query_id.startswith(f"{TOLD}:") or value.error:
        return None
    values = value.values
    found = msgspec.convert(values.get("entries", []), list[Sighting])
    return str(values.get("start_id", "")), str(values.get("run_uid", "")), found
