"""One record after another: remember it, apply its alert changes, judge what is open. The order of these steps is the core's order."""

from __future__ import annotations

from collections.abc import Sequence

from trainwarden.record import Step

from . import soft
from .acting import consider, escalate
from .aftermath import verify
from .block import Block, Bools, from_steps
from .curves import keep_curves
from .delivery import announce, rank
from .environment import say_levels
from .facts import Facts
from .groups import DRIFTS, KEPT, finding, split, where
from .incidents import (
    believed,
    close,
    conclude,
    confirm,
    due,
    facts_of,
    fired,
    heal,
    open_incident,
    raise_severity,
    resolved,
)
from .instrument import VARYING, look, look_at_all
from .instrument_scale import COMPARED, ENOUGH, SOONEST, coarse, rescaled, rounded
from .instrument_screen import screen
from .keeping import keep_damage, keep_target
from .lineage import announced, doubt, restored, with_parent
from .makeup import look as look_at_batches
from .meetings import look as look_for_suspects
from .meetings import note
from .planned import parted
from .preflight import say_once
from .ranks import Rows, advance, first_whole, scan
from .replaying import awaited
from .replaying import look as look_again
from .rescaling import look_at_units, relearn, whole_norm
from .scaler_skips import look as look_at_skips
from .scope import attend
from .seeing import Change
from .settling import cross, withheld
from .standstill import stepped_again
from .state import Alive, Incident, Rules, RuleSeen, Run
from .stream import Released
from .turn import Turn
from .verdict import PERSISTENT, RECURRING, held_back, mostly_high, persisted

#: The mark of a start of whose loss it was said that it is rounded.
ROUNDED = "quantised_loss"
#: Records in which ranks agree from which a norm is no longer that of a shard.
WHOLE = 5


def judge(turn: Turn, run: Run, alive: Alive, released: Sequence[Released]) -> None:
    """Evaluate released records in order. How they are cut into calls makes no difference."""
    if not released:
        return
    if alive.next_change is not None and released[-1].record.step > alive.next_change:
        first = next(place for place, one in enumerate(released) if one.record.step > alive.next_change)
        judge(turn, run, alive, released[:first])
        cross(turn, run, alive, released[first].record)
        judge(turn, run, alive, released[first:])
        return
    until = COMPARED - len(alive.trace)
    if alive.inherited is not None and 0 < until < len(released):
        # What follows is judged in the unit that is then known.
        judge(turn, run, alive, released[:until])
        judge(turn, run, alive, released[until:])
        return
    several = alive.line.world_size > 1
    records = [one.record for one in released]
    block = from_steps(records, [one.by_rank for one in released] if several else None)
    whole = first_whole(alive.ranks, block) if several else None
    if whole is not None:
        judge(turn, run, alive, released[:whole])
        whole_norm(turn, alive, records[whole].step)
        judge(turn, run, alive, released[whole:])
        return
    shown, faults = screen(alive.watches, block, turn.settings.dead_records)
    for row, fault in faults:
        turn.notice(alive.start, fault.kind, records[row].step, fault.says, fault.signal)
    skips = look_at_skips(alive.watches, block)
    if skips is not None:
        turn.notice(alive.start, "skipped_steps", skips[0], skips[1], "skipped")
    shown = with_parent(alive, shown)
    look_at_batches(alive.makeup, block)
    seen = len(alive.trace)
    first, size = 0, len(released)
    while first < size:
        rest = shown.rows(first, size) if first else shown
        units = look_at_units(alive, rest)
        end = first + units.rows
        parts = (shown, block) if units.rows == size else (shown.rows(first, end), block.rows(first, end))
        _judge(turn, run, alive, *parts, released[first:end], units.held)
        if units.ruling is not None:
            relearn(turn, run, alive, units.name, units.ruling, records[end - 1])
            shown = with_parent(alive, shown)
        first = end
    _look_at_scale(turn, alive, seen)
    say_restored(turn, alive)


def say_restored(turn: Turn, alive: Alive, over: bool = False) -> None:
    """Say once how the steps that a resume made again compare with the first time; ``over``: no more will come."""
    found = restored(alive, over)
    if found is not None:
        turn.notice(alive.start, "steps_repeated", found[0], found[1], "loss")


def _judge(
    turn: Turn, run: Run, alive: Alive, shown: Block, block: Block, released: Sequence[Released], held: Bools | None
) -> None:
    """Evaluate records under one set of rules. ``held``: the rows at which a signal may have changed its unit."""
    records = [one.record for one in released]
    rules: Rules = alive.rules
    ranks = scan(block)
    changes = list(rules.engine.feed(shown))
    place = row = 0
    while row < len(released):
        quiet = changes[place].row if place < len(changes) else len(released)
        if row < quiet and not _watched(run, alive):
            _look_at_ranks(turn, alive, ranks, records, row, quiet)
            _remember(turn, alive, block, records, row, quiet)
            look_for_suspects(turn, alive, records[row:quiet])
            row = quiet
            continue
        one = released[row]
        _look_at_ranks(turn, alive, ranks, records, row, row + 1)
        mine = []
        while place < len(changes) and changes[place].row <= row:
            mine.append(changes[place])
            place += 1
        mine.sort(key=lambda change: change.labels.get("scope") != "ranks")  # these say best what the others are about
        alive.unit_doubted = held is not None and bool(held[row])
        _one(turn, run, alive, one, mine)
        row += 1
    alive.unit_doubted = held is not None and bool(held[-1])


def _watched(run: Run, alive: Alive) -> bool:
    """Say whether an incident needs the records one by one."""
    start_id = alive.start.start_id
    return (
        awaited(run, start_id)
        or soft.awaited(run, start_id)
        or any(
            (one.open and one.start_id == start_id)
            or (one.state == "verifying" and one.verification is not None and one.verification.start_id == start_id)
            for one in run.incidents.values()
        )
    )


def _remember(turn: Turn, alive: Alive, block: Block, records: Sequence[Step], first: int, end: int) -> None:
    """Take records at which no alert changes and no incident looks: all of them at once."""
    alive.trace.extend(block, records, first, end)
    alive.groups.extend(records[max(first, end - KEPT) : end])
    if alive.first_step is None:
        alive.first_step = records[first].step - records[first].stride + 1
    plain = []
    for name in VARYING:
        column = block.columns.get((name,)) or block.columns.get((name, "all"))
        if column is not None and column.present[first:end].any():
            values = column.values[first:end][column.present[first:end]]
            if not look_at_all(alive.watches, name, values, turn.settings.dead_records):
                plain.append(name)
    for record in records[first:end] if plain else ():
        _look_at_instruments(turn, alive, record, plain)


def _one(turn: Turn, run: Run, alive: Alive, released: Released, changes: Sequence[Change]) -> None:
    record = released.record
    alive.trace.append(record)
    alive.groups.extend((record,))
    if alive.first_step is None:
        alive.first_step = record.step - record.stride + 1
    _look_at_instruments(turn, alive, record)
    look_for_suspects(turn, alive, (record,))
    for change in changes:
        if change.state == "firing":
            severity, offered = change.labels.get("severity", "warning"), change.labels.get("verdict", "")
            excused = withheld(alive, change.rule, change.labels)
            alive.firing[change.rule] = RuleSeen(change.since, record.step, "info" if excused else severity, offered)
            say_once(turn, alive, change)
            among_ranks = change.labels.get("scope") == "ranks"  # ranks that disagree say nothing of the attempt before
            if not among_ranks and not excused:
                doubt(alive, record.step, severity, offered)
            fired(turn, run, alive, record, change, excused)
        elif change.state in ("resolved", "unknown"):
            alive.firing.pop(change.rule, None)
            resolved(turn, run, alive, record, change)
    incident = open_incident(run, alive.start.start_id)
    if incident is not None and incident.stood is not None:
        stepped_again(turn, incident, record)
    if incident is not None and incident.open:
        _judge_incident(turn, run, alive, incident, released, bool(changes))
        keep_target(turn, run, incident, record.time)
        keep_damage(turn, run, alive, incident, record.time)
        note(turn, alive, incident)
    soft.observe(turn, run, alive, released)
    verify(turn, run, alive, record)
    look_again(turn, run, alive, record.step, record.time)
    for touched in list(turn.touched.values()):
        if touched.run_uid == run.run_uid:
            announce(turn, touched, record.time)
            keep_curves(turn, run, touched)


def _judge_incident(turn: Turn, run: Run, alive: Alive, incident: Incident, released: Released, changed: bool) -> None:
    record, settings = released.record, turn.settings
    incident.records += 1
    if any(seen.firing for seen in incident.rules.values()):
        incident.last_active_step = record.step
    attend(incident, alive)
    if not (due(incident) or changed):
        return
    if incident.plan is not None and parted(alive.changes, incident.onset, record.step) is not None:
        if record.step - incident.opened_step > settings.open_steps:
            says = f"Nobody decided about its plan in {settings.open_steps} steps."
            escalate(turn, incident, record.time, record.step, says)
        return  # the plan was made of what was comparable; a planned change does not speak against it
    facts = facts_of(incident, alive, run)
    cause = conclude(incident, facts, settings.persist_steps)
    if not facts.broken:  # whose modules are known
        _place_in_groups(alive, incident)
    if incident.excused:
        turn.touch(incident)
        heal(turn, incident, facts, record.time)
        return
    for seen in incident.rules.values():
        if not held_back(alive.unit_doubted, seen.verdict):
            raise_severity(turn, incident, believed(seen.severity, seen.verdict, facts, seen.since))
    confirm(turn, incident, facts, record.time)
    if held_back(alive.unit_doubted, incident.verdict):
        turn.touch(incident)
        return
    if incident.verdict in PERSISTENT and persisted(facts, settings.persist_steps):
        raise_severity(turn, incident, "critical")
    turn.touch(incident)
    consider(turn, run, alive, incident, facts, cause, record.time)
    if not incident.open or incident.state == "acting" or soft.in_force(run, incident):
        return
    if heal(turn, incident, facts, record.time):
        conclude(incident, facts, settings.persist_steps, settled=True)
        escalate(turn, incident, record.time, record.step, "The alerts are over, but the loss settled above its trend.")
    elif incident.open and record.step - incident.opened_step > settings.open_steps:
        _too_long(turn, incident, facts, record)


def _place_in_groups(alive: Alive, incident: Incident) -> None:
    drifts = incident.verdict in DRIFTS
    named = where(alive.groups, incident.onset, drifts)
    if named:
        incident.groups, incident.modules = split(named)
        incident.findings.append(finding(named, incident.onset, drifts))


def _too_long(turn: Turn, incident: Incident, facts: Facts, record: Step) -> None:
    """End an incident that neither heals nor settles: a person must look where the loss is high, and need not where it is not.

    Spikes at a period go on as one incident for as long as their rule fires.
    """
    steps = turn.settings.open_steps
    if rank(incident.severity) < rank("critical") and not mostly_high(facts):
        if any(seen.firing and seen.verdict in RECURRING for seen in incident.rules.values()):
            return
        says = f"It has gone on for {steps} steps and does the loss no harm: it is only written down."
        close(turn, incident, record.time, record.step, "inconclusive", says)
        return
    escalate(turn, incident, record.time, record.step, f"It has neither healed nor settled in {steps} steps.")


def _look_at_instruments(turn: Turn, alive: Alive, record: Step, names: Sequence[str] = VARYING) -> None:
    for name in names:
        fault = look(alive.watches, name, record.value(name), turn.settings.dead_records)
        if fault is not None:
            turn.notice(alive.start, fault.kind, record.step, fault.says, fault.signal)


def _look_at_ranks(turn: Turn, alive: Alive, ranks: Rows | None, records: Sequence[Step], first: int, end: int) -> None:
    """Remember which ranks stand out, and say once that each of them logs the gradient norm of its own shard."""
    if ranks is None:
        return
    said = alive.ranks.said
    advance(alive.ranks, ranks, first, end)
    if alive.ranks.said and not said:
        says = (
            "grad_norm has differed between all ranks since the start: each logs that of its own shard, too small by about "
            "the root of their number."
        )
        begin = alive.first_step if alive.first_step is not None else records[first].step - records[first].stride + 1
        turn.notice(alive.start, "metric_scope", begin, says, "grad_norm")
    if alive.ranks.parted_before and alive.ranks.agreed >= WHOLE:
        alive.ranks.parted_before = False
        says = "grad_norm is one number on all ranks, and was that of each rank's own shard in the attempt before: it is another measure."
        begin = alive.first_step if alive.first_step is not None else records[first].step - records[first].stride + 1
        turn.notice(alive.start, "metric_scope", begin, says, "grad_norm")


def _look_at_rounding(turn: Turn, alive: Alive, seen: int) -> None:
    """Say once, as early as a few values show it, that the loss was rounded to bfloat16."""
    if seen >= ENOUGH or ROUNDED in alive.noticed:
        return
    losses, steps = alive.trace.column("loss"), alive.trace.steps
    for end in range(max(seen + 1, SOONEST), min(len(steps), ENOUGH - 1) + 1):
        step_of_loss = rounded(losses[:end])
        if step_of_loss > 0:
            alive.noticed.append(ROUNDED)
            says = f"The loss moves in steps of {step_of_loss:.4g}: it is rounded to bfloat16 before it is logged."
            turn.notice(alive.start, "quantised_loss", int(steps[end - 1]), says, "loss")
            return


def _look_at_scale(turn: Turn, alive: Alive, seen: int) -> None:
    """Say once that the loss is coarse, and that a start logs a multiple of what the start before it did."""
    trace = alive.trace
    say_levels(turn, alive, seen)
    _look_at_rounding(turn, alive, seen)
    if seen < ENOUGH <= len(trace) and ROUNDED not in alive.noticed:
        step_of_loss = coarse(trace.column("loss")[:ENOUGH])
        if step_of_loss > 0:
            says = f"The loss moves in steps of {step_of_loss:.4g}: it is rounded before it is logged."
            turn.notice(alive.start, "quantised_loss", int(trace.steps[ENOUGH - 1]), says, "loss")
    before = alive.inherited
    if before is None or not seen < COMPARED <= len(trace):
        return
    for name in ("loss", "grad_norm"):
        older = before.column(name)[: before.row(int(trace.steps[0]))]
        factor = rescaled(older, trace.column(name)[:COMPARED])
        if factor is not None:
            says = f"{name} is {factor:.4g} times what it was before the restart, and as noisy: it is logged in another unit."
            turn.notice(alive.start, "logging_scale_change", int(trace.steps[0]), says, name)
            announced(alive, f"unit of {name}")
