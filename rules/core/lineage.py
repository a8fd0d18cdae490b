"""Which start follows from which: a new start takes over from the last one of its run.

Windows and rules begin anew with it. What it inherits is memory for comparison: the parent's records up to the checkpoint it
resumed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from trainwarden.plan import Applied, Plan, PlanError, check_plan
from trainwarden.record import Event

from .block import Block
from .inputs import Start
from .lowered import cut_off, inherited
from .makeup import after
from .planned import configure, inherit, next_step, of_settings
from .resumed import RANKS, Planned, departed, last_compared, parent_of, restore_check
from .settings import Settings
from .state import Alive, Executed, Rules, Run
from .stream import Line, widen
from .trace import Trace, joined

#: Start ids of a run that are remembered as over.
REMEMBERED = 64
#: Rows of the parent's line that a resumed start inherits.
INHERITED = 1000
#: Steps behind a resume within which a value that disagrees is the resume's fault; a record may cover several.
NEAR_RESUME = 200
#: Records that were made twice of which the differences are told.
MADE_TWICE = 200
#: Steps and counts that a start event tells are below this; a float is exact up to here.
LARGEST = 2**53
#: Attempts whose planned changes are remembered.
PLANS = 8
#: Ways to leave data out that a plan can ask for.
CAN_SKIP = ("substitute", "shift", "exclude")
#: Characters of a name or a path that is remembered.
LONGEST = 4096


def follows(run: Run, start: Start) -> bool:
    """Say whether lines of ``start`` may still be evaluated: it is the live one, or newer than it."""
    if start.start_id in run.past_starts:
        return False
    return run.alive is None or start.attempt >= run.alive.start.attempt


def take_over(run: Run, start: Start, settings: Settings, rules: Rules) -> Alive:
    """Make ``start`` the run's live start and return it; the trace of the one before is kept for its attempt."""
    before = run.alive
    if before is not None:
        run.past_starts.append(before.start.start_id)
        del run.past_starts[:-REMEMBERED]
        run.traces[before.start.attempt] = _line_of(before)
        run.worlds[before.start.attempt] = before.line.world_size
        run.changes[before.start.attempt] = before.changes
        for forgotten in sorted(run.changes)[:-PLANS]:
            del run.changes[forgotten]
    run.alive = Alive(start=start, line=Line(), trace=Trace(limit=settings.history_steps), rules=rules)
    if before is not None:
        run.alive.makeup = after(before.makeup)
        run.alive.ranks.parted_before = before.ranks.said and not before.ranks.whole
        run.alive.lowered = list(before.lowered)
    configured(run, settings)
    return run.alive


def configured(run: Run, settings: Settings) -> None:
    """Give the live start what the configuration plans for its run, now that it may say something else than before."""
    alive = run.alive
    if alive is not None:
        configure(alive.changes, of_settings(settings, alive.start.run))
        alive.next_change = next_step(alive.changes)


def describe(run: Run, alive: Alive, event: Event) -> None:
    """Take from a start event what judgement needs; several ranks send one each and the first counts."""
    fields = event.fields
    widen(alive.line, _whole(fields.get("world_size")) or 1)
    if alive.described:
        return
    alive.described = True
    can_skip = fields.get("can_skip")
    alive.can_skip = [mode for mode in CAN_SKIP if mode in can_skip] if isinstance(can_skip, list) else []
    dataset = fields.get("dataset")
    alive.dataset = dataset if isinstance(dataset, str) and len(dataset) <= LONGEST else None
    alive.beta2 = _beta2(fields)
    source = fields.get("resumed_from")
    if isinstance(source, Mapping):
        alive.resumed_from = _whole(source.get("step"))
        alive.resumed_attempt = _whole(source.get("attempt"))
    if alive.resumed_from is not None:
        # The attempt that wrote the checkpoint; where it is not remembered, the newest one that is.
        attempt = alive.resumed_attempt if alive.resumed_attempt is not None else -1
        if attempt not in run.traces and run.traces:
            attempt = max(run.traces)
        parent = run.traces.get(attempt)
        if parent is not None:
            _inherit(alive, parent, alive.resumed_from)
            alive.ranks_before = run.worlds.get(attempt)
        planned = run.changes.get(alive.resumed_attempt if alive.resumed_attempt is not None else -1)
        if planned is None and run.changes:
            planned = run.changes[max(run.changes)]
        inherit(alive.changes, planned or [], alive.resumed_from)
        alive.next_change = next_step(alive.changes)
    report = applied_plan(event)
    if report is not None:
        parts = {
            "reset": report.reset_optimizer,
            "ramp": report.rewarmup_steps > 0,
            "factor": report.lr_factor != 1.0,
            "skip": bool(report.skip_samples or report.exclude),
        }
        alive.planned = Planned(report.lr_factor, tuple(word for word, is_so in parts.items() if is_so))
    if alive.ranks_before is not None and alive.ranks_before != alive.line.world_size:
        pace = max(1.0, alive.line.world_size / alive.ranks_before)
        alive.planned = Planned(alive.planned.lr_factor, (*alive.planned.changed, RANKS), pace)
    if cut_off(alive.lowered, alive.resumed_from):  # at the same steps the rate was another before
        alive.planned = structs.replace(alive.planned, changed=(*alive.planned.changed, "lr_phase"))
    alive.lowered = inherited(alive.lowered, alive.resumed_from)


def resumed_within(alive: Alive, event: Event) -> bool:
    """Take a ``resume`` event behind the first record: the start goes on from a checkpoint, by its own records before it."""
    step = event.step
    if step is None or not len(alive.trace) or alive.resumed_from is not None:
        return False
    alive.resumed_from, alive.resumed_attempt = step, alive.start.attempt
    _inherit(alive, alive.trace, step)
    return True


def announced(alive: Alive, kind: str) -> None:
    """Take an event that makes a change of this start planned: what it changes is no longer compared with the parent."""
    if alive.compared and alive.resumed_from is not None and kind not in alive.planned.changed:
        alive.planned = structs.replace(alive.planned, changed=(*alive.planned.changed, kind))
        alive.rules.parent = None


def with_parent(alive: Alive, block: Block) -> Block:
    """Return the block with the line that its start is compared with, for as long as anything can be asked of it."""
    source, inherited, rules = alive.resumed_from, alive.inherited, alive.rules
    if source is None or inherited is None or not len(inherited) or not alive.compared or not len(block):
        return block
    if int(block.step[0]) > last_compared(inherited, alive.beyond, source):
        alive.compared, alive.beyond, rules.parent = False, None, None
        return block
    if rules.parent is None:
        rules.parent = parent_of(inherited, alive.beyond, source, alive.planned)
    return replace(block, parent=rules.parent)


def doubt(alive: Alive, step: int, severity: str, verdict: str) -> None:
    """Remember that a rule found this start to go on otherwise than its parent left off: it resumed wrongly."""
    near = alive.resumed_from is not None and step - alive.resumed_from <= NEAR_RESUME * alive.trace.stride()
    if not near or verdict != "mismatch":
        return
    if alive.mismatch != "critical":
        alive.mismatch = severity
    if alive.inherited is not None and alive.resumed_from is not None:
        found = departed(alive.inherited, alive.trace, alive.resumed_from)
        alive.below = alive.below or (found is not None and found.off and found.shift.excess < 0)


def restored(alive: Alive, over: bool = False) -> tuple[int, str] | None:
    """Return once what a comparison of the steps that were made twice says; ``over``: no more of them will come."""
    beyond, trace = alive.beyond, alive.trace
    if beyond is None or alive.repeated or alive.plan_id is not None or not len(beyond) or not len(trace):
        return None
    end = int(beyond.steps[min(len(beyond), MADE_TWICE) - 1])
    if int(trace.steps[-1]) < end and not over:
        return None
    alive.repeated = True
    return restore_check(trace, until(beyond, end))


def _inherit(alive: Alive, parent: Trace, step: int) -> None:
    alive.inherited = until(parent, step)
    # What begins before the parent's first record goes on from nothing that it did: a counter that was reset, another run.
    behind = len(parent) - parent.row(step + 1) if len(alive.inherited) else 0
    last = int(parent.steps[min(len(parent), parent.row(step + 1) + INHERITED) - 1]) if behind else step
    alive.beyond = until(parent, last, min(behind, INHERITED)) if behind else None
    alive.compared, alive.repeated, alive.rules.parent = True, False, None


def _line_of(alive: Alive) -> Trace:
    """Return a start's trace, preceded by what it inherited where it is short: its line is also its parent's."""
    own, older = alive.trace, alive.inherited
    if older is None or not len(own) or len(own) >= INHERITED:
        return own
    return joined(until(older, int(own.steps[0]) - 1, INHERITED - len(own)), own)


def until(trace: Trace, step: int, rows: int = INHERITED) -> Trace:
    """Return a copy of the newest ``rows`` rows up to and including ``step``."""
    end = trace.row(step + 1)
    kept = slice(max(0, end - rows), end)
    return Trace(
        limit=trace.limit,
        n=kept.stop - kept.start,
        step_column=trace.step_column[kept].copy(),
        time_column=trace.time_column[kept].copy(),
        stride_column=trace.stride_column[kept].copy(),
        values={name: values[kept].copy() for name, values in trace.values.items()},
        present={name: flags[kept].copy() for name, flags in trace.present.items()},
        sample_first=trace.sample_first[kept].copy(),
        sample_end=trace.sample_end[kept].copy(),
        more_samples={at: ranges for at, ranges in trace.more_samples.items() if at <= step},
        shard_of=trace.shard_of[kept].copy(),
        more_shards={at: places for at, places in trace.more_shards.items() if at <= step},
        spans=list(trace.spans),
    )


def applied_plan(event: Event) -> Applied | None:
    """Return what a start event says was applied, or None; a report that cannot be meant counts as none."""
    report = event.fields.get("plan_applied")
    if not isinstance(report, Mapping):
        return None
    try:
        applied = msgspec.convert(report, Applied)
        check_plan(plan_of(applied, "", 0))
    except (msgspec.ValidationError, PlanError):
        return None
    return applied if 0 <= applied.start_step < LARGEST else None


def executed(report: Applied, attempt: int) -> Executed | None:
    """Return what the ledger rule needs of an applied plan, or None where it had no target."""
    if report.target is None:
        return None
    probe = report.probe is not None
    return Executed(plan_id=report.plan_id, for_attempt=attempt, target_step=report.target.step, probe=probe)


def plan_of(report: Applied, run_uid: str, attempt: int) -> Plan:
    """Return a plan with the contents of the report: what was applied though this daemon did not ask for it."""
    return Plan(
        plan_id=report.plan_id,
        run_uid=run_uid,
        for_attempt=attempt,
        action="rollback" if report.probe is None else "probe",
        target=report.target,
        reset_optimizer=report.reset_optimizer,
        lr_factor=report.lr_factor,
        rewarmup_steps=report.rewarmup_steps,
        skip_samples=list(report.skip_samples),
        exclude=list(report.exclude),
        probe=report.probe,
    )


def _whole(value: Any) -> int | None:
    """Return a whole number that a peer told, or None for what is none or beyond what a step can be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        return None
    return int(value)


def _beta2(fields: Mapping[str, Any]) -> float | None:
    betas = fields.get("betas")
    told = [fields.get("beta2"), betas[1] if isinstance(betas, list | tuple) and len(betas) == 2 else None]
    for value in told:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
    return None
