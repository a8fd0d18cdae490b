"""A run meets what other runs, its own earlier attempts or its earlier epochs remember of its data (see :mod:`.sightings`).

At its start it is told which remembered samples its data set has. Where its order is known their steps are said ahead, else as it eats
them; what then spikes is evidence, and what passes unharmed is cleared. All that a run knows of others it was told by an input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from trainwarden.plan import Exclusion, merge_ranges
from trainwarden.ranges import length, shared, without
from trainwarden.record import Event, Ranges, Step
from trainwarden.rules.core.counted import counted

from .effects import Save
from .inputs import Command, Observation
from .ordering import Layout, Order, as_ranges, layout_of
from .sightings import (
    MOST_RANGES,
    WHOLE_SHARD,
    Known,
    Met,
    Passing,
    Sighting,
    answer,
    inside,
    matching,
    put,
    question,
    relation,
    row,
    told_in,
    where,
    withdraw,
)
from .state import Alive, Incident, Run, State
from .turn import Turn, digest

#: The kind of the notice that a run eats what is remembered.
NOTICE = "known_suspect"
#: Notices of a start; what is met beyond them is evidence all the same.
MOST_NOTICES = 20
#: Ranges of positions that a start looks out for.
MOST_EXPECTED = 8192
#: Positions of one sighting that are mapped to rows.
MOST_POSITIONS = 1 << 14
#: Meetings that a start remembers.
MOST_MET = 256
#: Steps behind a meeting within which an incident is its; a record may cover several.
BEHIND = 20
#: Share of a step's samples from which their passing clears them: fewer may have been diluted.
CLEARS = 0.5
#: Verdicts of one odd step whose undetermined incident is remembered all the same, as a weak one.
PASSING = ("outlier", "transient_spike", "grad_surge")
#: Answers for starts that have not begun yet, of a daemon's journal that is replayed.
EARLY = 64


def begin(turn: Turn, run: Run, alive: Alive, event: Event) -> None:
    """Take from a start event what the data is, and ask what is remembered of it."""
    alive.recalled.layout = layout_of(event.fields, run.run_uid)
    start = alive.start
    early = turn.memory.told.pop(start.start_id, None)
    if early is not None:
        _learn(alive, early)
    if alive.recalled.layout is not None:
        found = matching(turn.memory.suspects, alive.recalled.layout, but=start.start_id)
        if found:
            turn.effects.append(question(start.start_id, run.run_uid, found))


def observed(turn: Turn, value: Observation) -> None:
    """Take the answer to what :func:`begin` asked."""
    told = told_in(value)
    if told is None:
        return
    start_id, run_uid, entries = told
    run = turn.memory.runs.get(run_uid)
    alive = None if run is None else run.alive
    if alive is not None and alive.start.start_id == start_id and alive.recalled.layout is not None:
        _learn(alive, entries)
    elif run is None or start_id not in run.past_starts:
        turn.memory.told[start_id] = entries
        for oldest in list(turn.memory.told)[:-EARLY]:
            del turn.memory.told[oldest]


def _learn(alive: Alive, entries: Sequence[Sighting]) -> None:
    own = [one for one in alive.recalled.known if one.start_id == alive.start.start_id]
    alive.recalled.known = [one for one in entries if one.start_id != alive.start.start_id] + own
    alive.recalled.epoch = -1


def look(turn: Turn, alive: Alive, records: Sequence[Step]) -> None:
    """Go through records in order: what they eat of the remembered, and whether what was eaten before has passed."""
    if not alive.recalled.known:
        return
    for record in records:
        epoch = _epoch(record)
        if epoch != alive.recalled.epoch:
            _expect(turn.state, alive, epoch)
            _say_ahead(turn, alive, record)
        _settle(turn, alive, record)
        if record.samples and (alive.recalled.expected or alive.recalled.by_name):
            _meet(turn, alive, record, epoch)


def _epoch(record: Step) -> int:
    value = record.value("epoch")
    return int(value) if value is not None and 0 <= value < 2**53 else 0


def _expect(state: State, alive: Alive, epoch: int) -> None:
    """Work out at which positions of an epoch remembered samples lie."""
    recalled = alive.recalled
    recalled.expected, recalled.by_name, recalled.throughout, recalled.passed = {}, {}, [], {}
    recalled.epoch = epoch
    layout = alive.recalled.layout
    if layout is None:
        return
    order = state.orders.of(layout) if layout.computed else None
    hidden = layout.skipped(epoch)
    room = MOST_EXPECTED
    for one in sorted(alive.recalled.known, key=lambda one: not one.solid):
        if one.start_id == alive.start.start_id and one.epoch == epoch:
            continue  # what this very epoch showed
        places: Ranges | None = []
        if order is not None and one.rows:
            places = _places(order, layout, one.rows, epoch)
        elif one.order == layout.order_name and one.epoch == epoch:
            places = one.positions or one.samples
        else:
            for shard, ranges in one.rows.items():
                if shard and ranges[0][0] == 0 and ranges[-1][1] >= WHOLE_SHARD:
                    alive.recalled.by_name.setdefault(shard, one.id)
        if places is None:
            alive.recalled.throughout.append(one.id)
            continue
        places = without(places, hidden)
        if places and len(places) <= room:
            room -= len(places)
            alive.recalled.expected[one.id] = places


def _places(order: Order, layout: Layout, rows: Mapping[str, Ranges], epoch: int) -> Ranges | None:
    """Return the positions of rows in an epoch, without those that the run leaves out; None where they are all over it."""
    found: Ranges = []
    removed = merge_ranges(
        [span for shard, first, end in layout.excluded for span in _of(order, layout, shard, first, end)]
    )
    for shard, ranges in rows.items():
        spans = [span for first, end in ranges for span in _of(order, layout, shard, first, end)]
        for first, end in without(spans, removed):
            places = order.spread(epoch, first, end)
            if places is None:
                return None
            found += places
    return merge_ranges(found)


def _of(order: Order, layout: Layout, shard: str, first: int, end: int) -> Ranges:
    """Return rows of a shard as rows of the data set."""
    if not shard:
        return [(first, min(end, layout.size))]
    named = next((one for one in order.shards if one.name == shard), None)
    return [] if named is None else [(named.first + first, min(named.first + end, named.end))]


def _say_ahead(turn: Turn, alive: Alive, record: Step) -> None:
    """Say of what lies ahead in this epoch at about which step it will be eaten."""
    read, at = length(record.samples), max((end for _, end in record.samples), default=0)
    for one in alive.recalled.known:
        if one.id in alive.recalled.throughout:
            says = f"{where(one)} lie all over the order of epoch {alive.recalled.epoch}, which reads"
            _say(turn, alive, one, record.step, says)
        ahead = [first for first, _ in alive.recalled.expected.get(one.id, []) if first >= at]
        met = shared(record.samples, alive.recalled.expected.get(one.id, []))
        if ahead and not met and read:
            step = record.step + math.ceil((ahead[0] - at + 1) / read) * record.stride
            _say(turn, alive, one, step, f"About step {step} of epoch {alive.recalled.epoch} reads")


def _say(turn: Turn, alive: Alive, one: Sighting, step: int, says: str) -> None:
    """Say once a start that it eats what is remembered."""
    if one.id in alive.recalled.said or len(alive.recalled.said) > MOST_NOTICES:
        return
    alive.recalled.said.append(one.id)
    if len(alive.recalled.said) > MOST_NOTICES:
        more = f"More than {MOST_NOTICES} remembered suspects are met: `trainwarden incidents suspects` lists them."
        turn.notice(alive.start, NOTICE, step, more)
        return
    cause = one.verdict.replace("_", " ")
    cause += (
        ", cause undetermined" if one.cause == "undetermined" else f", cause {one.cause} (confidence {one.sure:.2f})"
    )
    whose = "this run" if one.run_uid == alive.start.run_uid else f"run {one.run}"
    again = f", and in {counted(len(one.again), 'other incident')}" if one.again else ""
    says = f"{says} {where(one)}: the same samples spiked in {whose}, attempt {one.attempt}, at step {one.step}{again} ({cause})."
    turn.notice(alive.start, NOTICE, step, says, about=one.id)


def _meet(turn: Turn, alive: Alive, record: Step, epoch: int) -> None:
    samples = merge_ranges(record.samples)
    read = length(samples)
    found = [(sighting, shared(samples, places)) for sighting, places in alive.recalled.expected.items()]
    for span in record.shards:
        if span.name in alive.recalled.by_name:
            found.append((alive.recalled.by_name[span.name], shared(samples, [(span.first, span.end)])))
    known = {one.id: one for one in alive.recalled.known}
    for sighting, places in found:
        if places and sighting in known:
            _say(turn, alive, known[sighting], record.step, f"Step {record.step} reads")
            share = length(places) / read
            clears = sighting in alive.recalled.expected
            met = Met(sighting, record.step, epoch, places, share, _chance(alive, read), waits=clears)
            alive.recalled.met = [*alive.recalled.met, met][-MOST_MET:]


def _chance(alive: Alive, read: int) -> float:
    """Return the share of the epoch's steps, of so many samples each, that meet anything of what is looked out for."""
    total = alive.recalled.layout.size if alive.recalled.layout is not None else 0
    places = merge_ranges([span for ranges in alive.recalled.expected.values() for span in ranges])
    steps = length(merge_ranges([(first // read, (end - 1) // read + 1) for first, end in places]))
    if not steps or not total:
        return 1.0
    return round(min(1.0, steps * read / total), 6)


def _settle(turn: Turn, alive: Alive, record: Step) -> None:
    """Clear what was eaten long enough ago without an incident."""
    run = turn.memory.runs[alive.start.run_uid]
    for met in alive.recalled.met:
        if met.waits and record.step > met.step + BEHIND * record.stride:
            met.waits = False
            if not _harmed(run, alive, met, record.stride):
                _unharmed(turn, alive, met, record)


def _harmed(run: Run, alive: Alive, met: Met, stride: int) -> bool:
    last = met.step + BEHIND * stride
    return any(
        one.start_id == alive.start.start_id
        and one.onset - one.uncertainty <= last
        and (one.closed_step is None or one.closed_step >= met.step)
        for one in run.incidents.values()
    )


def _unharmed(turn: Turn, alive: Alive, met: Met, record: Step) -> None:
    """Count what passed; a sighting all of whose samples did, most of them undiluted, is cleared."""
    one = turn.memory.suspects.get(met.sighting)
    if one is None or not one.standing or met.epoch != alive.recalled.epoch:
        return
    before = alive.recalled.passed.get(one.id, Passing())
    alive.recalled.passed[one.id] = now = Passing(
        places=merge_ranges([*before.places, *met.positions]),
        dense=before.dense + (length(met.positions) if met.share >= CLEARS else 0),
    )
    expected = alive.recalled.expected.get(one.id, [])
    if not expected or without(expected, now.places):
        return
    start = alive.start
    one.passes += 1
    one.last_seen = max(one.last_seen, record.time)
    if now.dense >= CLEARS * length(expected):
        one.state, one.by = "cleared", f"run {start.run}, attempt {start.attempt}: passed unharmed at step {met.step}"
        alive.recalled.known = [known for known in alive.recalled.known if known.id != one.id]
        del alive.recalled.expected[one.id]
    _save(turn, [one])


def _rows(order: Order, epoch: int, positions: Ranges) -> dict[str, Ranges]:
    """Return the rows at positions by shard. Rows held in reserve between those of a forward order count as read."""
    left = MOST_POSITIONS
    whole: Ranges = []
    for first, end in positions:
        taken = np.arange(first, min(end, first + left))
        left -= len(taken)
        numbers = order.rows(epoch, taken)
        if order.forward and len(numbers):
            whole.append((int(numbers[0]), int(numbers[-1]) + 1))
        else:
            whole += as_ranges(numbers)
        if left <= 0:
            break
    by_shard: dict[str, Ranges] = {}
    for first, end in merge_ranges(whole):
        for name, low, high in order.split(first, end):
            by_shard.setdefault(name, []).append((low, high))
    return {name: merge_ranges(ranges) for name, ranges in by_shard.items()}


def note(turn: Turn, alive: Alive, incident: Incident) -> None:
    """Remember what an incident blames, as far as it blames the data; take it back where it no longer does."""
    layout = alive.recalled.layout
    if layout is None or incident.start_id != alive.start.start_id:
        return
    book = turn.memory.suspects
    identity = f"sus_{digest(incident.id)}"
    before = book.get(identity)
    strong = incident.cause == "data"
    young = incident.since_start is not None and incident.since_start < turn.settings.warmup_steps
    weak = incident.cause == "undetermined" and incident.verdict in PASSING and incident.ended and not young
    samples = (incident.suspect_samples if strong else incident.onset_samples)[:MOST_RANGES]
    if incident.excused or not samples or not (strong or weak):
        if before is not None and before.standing:
            _save(turn, withdraw(book, before))
            alive.recalled.known = [one for one in alive.recalled.known if one.id != identity]
        return
    as_before = before is not None and before.samples == samples and before.weak == weak
    if before is not None and (as_before or not before.standing):
        now = (_confidence(incident), incident.verdict, incident.ended)
        if before.standing and (before.confidence, before.verdict, before.ended) != now:
            ended = before.ended
            before.confidence, before.verdict, before.ended = now
            _save(turn, [before])
            if incident.ended and not ended:
                _tell(turn, before)
        return
    one = _sighting(turn, alive, layout, incident, identity, samples, weak)
    if before is not None:
        one.first_seen = before.first_seen
    _save(turn, put(book, one))
    _own(alive, one)
    if before is None or one.ended:
        _tell(turn, one)


def _confidence(incident: Incident) -> float:
    return incident.confidence if incident.cause == "data" else incident.scores.get("data", 0.0)


def _sighting(
    turn: Turn, alive: Alive, layout: Layout, incident: Incident, identity: str, samples: Ranges, weak: bool
) -> Sighting:
    start, epoch = alive.start, incident.suspect_epoch
    rows: dict[str, Ranges] = {}
    if not weak:
        rows = {shard: [(0, WHOLE_SHARD)] for shard in incident.suspect_shards}
    if layout.computed:
        order = turn.state.orders.of(layout)
        read = without(samples, layout.skipped(epoch))
        for shard, ranges in _rows(order, epoch, read).items():
            rows.setdefault(shard, ranges)
    partial = len(samples) >= MOST_RANGES or length(samples) > MOST_POSITIONS
    kept: dict[str, Ranges] = {}
    room = MOST_RANGES
    for shard, ranges in rows.items():
        if room > 0:
            kept[shard] = ranges[:room]
        partial = partial or len(ranges) > room
        room -= len(ranges)
    time = incident.timeline[-1].time if incident.timeline else incident.opened_time
    return Sighting(
        id=identity,
        incident=incident.id,
        run=start.run,
        run_uid=start.run_uid,
        attempt=start.attempt,
        start_id=start.start_id,
        step=incident.onset,
        dataset=layout.dataset,
        version=layout.version,
        order=layout.order_name,
        epoch=epoch,
        samples=list(samples),
        rows=kept,
        positions=[] if kept else list(samples),
        cause=incident.cause,
        verdict=incident.verdict,
        confidence=_confidence(incident),
        weak=weak,
        first_seen=incident.opened_time,
        last_seen=time,
        partial=partial,
        ended=incident.ended,
    )


def _own(alive: Alive, one: Sighting) -> None:
    """Let the run's own later epochs know."""
    alive.recalled.known = [known for known in alive.recalled.known if known.id != one.id] + [replace(one)]
    if one.epoch != alive.recalled.epoch:
        alive.recalled.epoch = -1


def _tell(turn: Turn, one: Sighting) -> None:
    """Tell the other runs that train on the same data now."""
    for run in turn.memory.runs.values():
        alive = run.alive
        if (
            alive is None
            or alive.recalled.layout is None
            or alive.ended is not None
            or alive.start.start_id == one.start_id
        ):
            continue
        if alive.recalled.layout.dataset == one.dataset and alive.recalled.layout.version == one.version:
            found = matching(turn.memory.suspects, alive.recalled.layout, but=alive.start.start_id)
            turn.effects.append(question(alive.start.start_id, run.run_uid, found))


def _save(turn: Turn, changed: Sequence[Sighting]) -> None:
    turn.effects += [Save("suspect", one.id, row(one)) for one in changed]


def near(alive: Alive, first: int, last: int) -> tuple[Known, ...] | None:
    """Return what the steps ``first`` to ``last`` met, one for each sighting; None where nothing tells the data."""
    if alive.recalled.layout is None:
        return None
    known = {one.id: one for one in alive.recalled.known}
    layout = alive.recalled.layout
    found: dict[str, Known] = {}
    for met in alive.recalled.met:
        if layout is not None and first <= met.step <= last and met.sighting in known:
            one = known[met.sighting]
            how = relation(alive.start.run_uid, layout.order_name, met.epoch, met.step, one)
            found[one.id] = Known(one, met, how)
    return tuple(found.values())


def in_skip(alive: Alive, skip: Ranges, epoch: int) -> list[Exclusion]:
    """Return the exclusions of remembered suspects that lie in what a plan skips of an epoch anyway."""
    return inside(alive.recalled.known, alive.recalled.expected, skip) if epoch == alive.recalled.epoch else []


def commanded(turn: Turn, command: Command) -> None:
    """Let go of suspects whose incident a person dismisses, or that a person wants forgotten."""
    wanted = command.matchers
    changed = []
    for one in turn.memory.suspects.values():
        if command.name == "dismiss":
            named = one.incident == command.incident
        else:
            told = {"id": one.id, "run": one.run, "dataset": one.dataset or ""}
            named = bool(wanted) and all(told.get(name) == value for name, value in wanted.items() if name != "all")
        if named and one.standing:
            one.state = "dismissed" if command.name == "dismiss" else "forgotten"
            one.by, one.comment = command.author, command.comment
            one.last_seen = max(one.last_seen, command.time)
            changed.append(one)
    _save(turn, changed)
    gone = {one.id for one in changed}
    for run in turn.memory.runs.values() if gone else ():
        if run.alive is not None and any(one.id in gone for one in run.alive.recalled.known):
            run.alive.recalled.known = [one for one in run.alive.recalled.known if one.id not in gone]
            run.alive.recalled.epoch = -1


__all__ = ["answer", "begin", "commanded", "in_skip", "look", "near", "note", "observed"]
