"""The core's one entry: an input goes in, effects come out. Called by the live and the replay driver and nobody else.

Pure: it reads no clock and does no I/O. The same inputs give the same effects, and a state that was stored and read back
anywhere in between makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainwarden.record import Event, purpose_of
from trainwarden.rules.core.counted import counted

from . import (
    acting,
    aftermath,
    broken,
    damaged,
    devices,
    devices_told,
    environment,
    failing,
    looked,
    machines,
    meetings,
    probing,
    progress,
    standstill,
)
from .curves import keep_curves
from .delivery import announce
from .effects import Effect, Save
from .events import remember
from .fault_exit import exited
from .inputs import Command, Happened, Input, Observation, Receipt, SourceSeen, Start, Steps, Tick
from .judging import judge, say_restored
from .language import Evaluator
from .lineage import LONGEST, announced, configured, describe, follows, resumed_within, take_over
from .preflight import described, told
from .rerun import KIND as RERUN
from .rerun import heard as made_again
from .resumed import ANNOUNCING
from .rows import row
from .seeing import AlertEngine, AlertSource
from .settings import Settings
from .settling import hear
from .soft import KIND as LOWER_LR
from .soft import heard
from .state import Alive, Checkpoint, Memory, Run, Silence, State, StateError, Window, dump_memory, load_memory
from .stream import Cursor, Gap, admit, flush, pass_time, take, take_row
from .turn import Turn

#: Checkpoints of a run that are remembered.
CHECKPOINTS = 512


class Language:
    """The rule language as the source of evaluators."""

    def fresh(self, pack: Any) -> AlertEngine:
        """Return an evaluator of the pack without history."""
        return Evaluator(pack)

    def revive(self, pack: Any, stored: Any) -> AlertEngine:
        """Return the evaluator that was stored."""
        return Evaluator.load(pack, stored)


def new_state(settings: Settings, pack: Any, engines: AlertSource | None = None) -> State:
    """Return the state before any input. ``engines`` makes the rules' evaluators; the rule language's by default."""
    return State(settings, pack, engines or Language(), Memory())


def dump(state: State, runs: Iterable[str] | None = None) -> dict[str, bytes]:
    """Return what the core remembers, without settings and rules: a part for each run, and one that is about no run.

    ``runs`` (by ``run_uid``) are those whose part is wanted, all by default; the other part always is. Runs share nothing but
    what is remembered of their data, which is noted again under the same names, so parts of different moments make a state: in it each
    run is as it was at its own.
    """
    return dump_memory(state.memory, runs)


def load(parts: Mapping[str, bytes], settings: Settings, pack: Any, engines: AlertSource | None = None) -> State:
    """Return a state that goes on where ``dump`` left off, under these settings and rules.

    Raises:
        StateError: the data was written by another version or is damaged.
    """
    source = engines or Language()
    try:
        memory = load_memory(parts, pack, source)
    except StateError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # An operator's stored form is known to it alone: that of another version is whatever it is.
        says = f"stored state of the rules: {type(error).__name__}: {error}"
        raise StateError(f"{says}; it is of another version or damaged: delete it to begin anew") from None
    for run in memory.runs.values():
        configured(run, settings)
    return State(settings, pack, source, memory)


def feed(state: State, value: Input) -> list[Effect]:
    """Take one input, change the state, and return the effects in order."""
    turn = Turn(state)
    with np.errstate(all="ignore"):  # infinities and NaN are values here, and what comes of them is looked at
        _take(turn, value)
    for incident in turn.touched.values():
        announce(turn, incident, incident.timeline[-1].time if incident.timeline else turn.memory.now)
        if incident.run_uid in turn.memory.runs:
            keep_curves(turn, turn.memory.runs[incident.run_uid], incident)
    saved: list[Effect] = [Save("incident", incident.id, row(incident)) for incident in turn.touched.values()]
    return saved + turn.effects


def _take(turn: Turn, value: Input) -> None:
    if isinstance(value, Steps):
        _steps(turn, value)
    elif isinstance(value, Happened):
        _happened(turn, value)
    elif isinstance(value, SourceSeen):
        _source_seen(turn, value)
    elif isinstance(value, Tick):
        _tick(turn, value.time)
    elif isinstance(value, Command):
        _command(turn, value)
    elif isinstance(value, Receipt):
        _now(turn, value.time)
        acting.received(turn, value)
    elif isinstance(value, Observation):
        _now(turn, value.time)
        meetings.observed(turn, value)


def _now(turn: Turn, time: float) -> None:
    if time > turn.memory.now:
        turn.memory.now = time


def _alive(turn: Turn, start: Start) -> tuple[Run, Alive] | None:
    """Return run and live start of ``start``, taking over from the start before; None for a start that is over."""
    run = turn.memory.runs.setdefault(start.run_uid, Run(start.run_uid, start.run))
    if run.alive is not None and run.alive.start.start_id == start.start_id:
        return run, run.alive
    if not follows(run, start):
        run.stale_lines += 1
        return None
    if run.alive is not None:
        judge(turn, run, run.alive, flush(run.alive.line))
        say_restored(turn, run.alive, over=True)
    return run, take_over(run, start, turn.settings, turn.state.fresh_rules())


def _steps(turn: Turn, value: Steps) -> None:
    found = _alive(turn, value.start)
    if found is None:
        return
    run, alive = found
    settings = turn.settings
    leads = value.rank == min(alive.line.cursors, default=value.rank)
    released = take_row(alive.line, value.rank, value.records)
    if released is not None:
        progress.stepped(alive.progress, value.records, leads=leads)
        judge(turn, run, alive, released)
        return
    released, admitted = [], []
    for record in value.records:
        if _admitted(turn, alive, value.rank, record.seq, record.step):
            admitted.append(record)
            unordered = alive.line.unordered
            released += take(alive.line, value.rank, record, settings.watermark_steps, settings.watermark_seconds)
            if alive.line.unordered > unordered:
                _unordered(turn, alive, value.rank, record.step)
    progress.stepped(alive.progress, admitted, leads=leads)
    judge(turn, run, alive, released)


def _unordered(turn: Turn, alive: Alive, rank: int, step: int) -> None:
    """Say that a rank's steps go backwards within a start: at the first such record, and whenever their number has doubled."""
    line = alive.line
    count = line.unordered
    if count & (count - 1) == 0:
        newest = line.cursors[rank].last_step
        says = f"Rank {rank}: step {step} came after step {newest} of the same start"
        says += ": it is left out." if count == 1 else f": it is left out, as {count - 1} before it."
        turn.notice(alive.start, "unordered", line.first_unordered, says)


def _admitted(turn: Turn, alive: Alive, rank: int, seq: int, step: int | None) -> bool:
    answer = admit(alive.line, rank, seq)
    if isinstance(answer, Gap):
        first = answer.seq == answer.missed + 1
        says = f"Rank {rank}: {counted(answer.missed, 'line')} {'before the first one read' if first else 'in between'} {'is' if answer.missed == 1 else 'are'} missing."
        turn.notice(alive.start, "gap", step, says)
        return True
    return answer


def _happened(turn: Turn, value: Happened) -> None:
    found = _alive(turn, value.start)
    if found is None:
        return
    run, alive = found
    event = value.event
    if not _admitted(turn, alive, value.rank, event.seq, event.step):
        return
    cursors = alive.line.cursors
    if value.rank == min(cursors):
        progress.happened(alive.progress, event, cursors[value.rank].last_time)
        remember(run.events, event)
        probing.happened(alive, event)
    if event.kind == "start":
        first = not alive.described
        machines.describe(alive.machines, value.rank, event.fields)
        describe(run, alive, event)
        if first:
            meetings.begin(turn, run, alive, event)
            aftermath.started(turn, run, alive, event)
            described(turn, alive, event)
            environment.look(turn, run, alive, event)
            if alive.resumed_from is not None:
                says = f"Attempt {alive.start.attempt} resumed from step {alive.resumed_from}{_other_ranks(alive)}."
                turn.notice(alive.start, "resume", alive.resumed_from, says)
    elif event.kind in ANNOUNCING:
        announced(alive, event.kind)
        hear(turn, alive, value.rank, event)
    elif event.kind == "resume":
        judge(turn, run, alive, flush(alive.line))
        if resumed_within(alive, event):
            turn.notice(alive.start, "resume", event.step, f"The start goes on from a checkpoint of step {event.step}.")
    elif event.kind == "nonfinite":
        broken.take(alive.broken, value.rank, event)
    elif event.kind == "anomaly":
        looked.take(alive.looked, value.rank, event)
    elif event.kind == "embedding_rows":
        damaged.take(alive.damaged, value.rank, event)
    elif event.kind == devices.KIND and devices.take(alive.devices, value.rank, event, alive.machines.hosts):
        devices_told.device_failed(turn, run, alive)
    elif event.kind == "checkpoint":
        _checkpoint(run, alive, event)
    elif event.kind == LOWER_LR:
        heard(turn, run, alive, value.rank, event)
        hear(turn, alive, value.rank, event)
    elif event.kind == RERUN:
        made_again(alive, event)
    elif event.kind == "preflight":
        told(turn, alive, event)
    elif event.kind == "exit" and value.rank == min(alive.line.cursors):
        judge(turn, run, alive, flush(alive.line))
        say_restored(turn, alive, over=True)
        standstill.exited(turn, run, alive, event)
        exited(turn, run, alive, event)
        aftermath.ended(turn, run, alive, event, event.time, event.step)
    else:
        hear(turn, alive, value.rank, event)
    if machines.failed(alive.machines, value.rank, event):
        failing.failed(turn, run, alive, event)


def _other_ranks(alive: Alive) -> str:
    before, now = alive.ranks_before, alive.line.world_size
    return "" if before in (None, now) else f" with {counted(now, 'rank')} in place of {before}"


def _checkpoint(run: Run, alive: Alive, event: Event) -> None:
    """Remember what an event says of a checkpoint; later events of the same path add to it."""
    fields = event.fields
    path, step = fields.get("path"), fields.get("step", event.step)
    if not isinstance(path, str) or len(path) > LONGEST:
        return
    known = next((one for one in run.checkpoints if one.path == path and (one.step == step or step is None)), None)
    if known is None:
        if not isinstance(step, int):
            return
        known = Checkpoint(attempt=alive.start.attempt, step=step, path=path)
        run.checkpoints.append(known)
        del run.checkpoints[:-CHECKPOINTS]
    elif isinstance(fields.get("complete"), bool) and known.attempt != alive.start.attempt and "deleted" not in fields:
        known.attempt = alive.start.attempt  # written anew by a later attempt
        known.deleted = known.abandoned = False
    for name in ("complete", "finite"):
        if isinstance(fields.get(name), bool):
            setattr(known, name, fields[name])
    for name in ("deleted", "pinned", "abandoned", "quarantined"):
        if fields.get(name) is True:
            setattr(known, name, True)
    purpose = purpose_of(event)
    known.quarantined, known.emergency = (
        known.quarantined or purpose == "forensic",
        known.emergency or purpose == "emergency",
    )
    incident = run.incidents.get(str(fields.get("incident"))) if known.quarantined else None
    if incident is not None:
        incident.evidence_until = None  # the copy is made, or will not be


def _source_seen(turn: Turn, value: SourceSeen) -> None:
    _now(turn, value.time)
    found = _alive(turn, value.start)
    if found is None:
        return
    run, alive = found
    alive.sources[value.rank] = value
    alive.line.cursors.setdefault(value.rank, Cursor()).behind = value.reachable and not value.caught_up
    acting.deliver(turn, run)


def _tick(turn: Turn, time: float) -> None:
    _now(turn, time)
    for run in turn.memory.runs.values():
        alive = run.alive
        if alive is not None and alive.line.pending:
            released = pass_time(alive.line, time - 3 * turn.settings.watermark_seconds)
            judge(turn, run, alive, released)
        if alive is not None:
            standstill.look(turn, run, alive, time)
            aftermath.gone(turn, run, alive, time)
        acting.overdue(turn, run)
        acting.deliver(turn, run)


def _window(turn: Turn, command: Command) -> None:
    """Take a maintenance window that has opened; without an end: there is none open but those that are told from here on."""
    memory = turn.memory
    if command.until is None:
        memory.maintenance = []
        return
    window = Window(command.matchers.get("run", "*"), command.until, command.comment)
    memory.maintenance = [one for one in memory.maintenance if one.until > memory.now and one != window]
    if window.until > memory.now:
        memory.maintenance.append(window)


def _command(turn: Turn, command: Command) -> None:
    _now(turn, command.time)
    if command.name == "silence":
        memory = turn.memory
        memory.silences = [
            one
            for one in memory.silences
            if one.matchers != command.matchers and (one.until is None or one.until > memory.now)
        ]
        if command.until is None or command.until > memory.now:
            memory.silences.append(Silence(dict(command.matchers), command.until, command.author, command.comment))
        return
    if command.name == "maintenance":
        _window(turn, command)
        return
    if command.name in ("dismiss", "forget"):
        meetings.commanded(turn, command)
    acting.commanded(turn, command)


__all__ = ["dump", "feed", "load", "new_state"]
