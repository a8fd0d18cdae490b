"""What became of an incident: the next attempt begins, is verified, ends.

A start event that carries an applied plan counts as its execution, whoever asked for it. Records then decide whether it was
applied and whether it helped.
"""

from __future__ import annotations

from msgspec import structs

from trainwarden.plan import Applied
from trainwarden.record import Event, Step

from . import answers
from .acting import escalate, past, roll_back
from .cost import of_rollback
from .delivery import rank
from .incidents import close, conclude, facts_of, new_incident, open_incident, place
from .lineage import applied_plan, executed, plan_of
from .planned import parted
from .planning import of_fallback
from .policy import Decision
from .reasoning import tried
from .recovery import Judged, begin, cut_short, finish_early, go_on, observe
from .replaying import expect
from .standstill import words
from .state import Alive, Incident, RuleSeen, Run
from .targets import abandoned
from .turn import Turn

#: Fields of a plan that only look: without them the run is the same.
BESIDE = ("anomaly",)
#: How a verification that was not applied is closed.
MISMATCH = "mismatch"
#: Characters of a start's reason to end that are remembered.
LONGEST_REASON = 200


def started(turn: Turn, run: Run, alive: Alive, event: Event) -> None:
    """Take what a start means for the incidents of the starts before it."""
    report = applied_plan(event)
    attempt = alive.start.attempt
    if report is not None:
        alive.plan_id, alive.ramp_steps, alive.probe = report.plan_id, report.rewarmup_steps, report.probe
        plan = executed(report, attempt)
        if plan is not None and all(one.plan_id != plan.plan_id or one.for_attempt != attempt for one in run.executed):
            run.executed.append(plan)
    for incident in list(run.incidents.values()):
        if incident.state == "verifying":
            _carried_on(turn, run, alive, incident, report, event)
    waiting = [one for one in run.incidents.values() if one.open and one.start_id != alive.start.start_id]
    acted = None if report is None else _whose(waiting, report, run)
    for incident in waiting:
        if incident is acted and report is not None:
            _executed(turn, run, alive, incident, report, event)
        else:
            _left_behind(turn, alive, incident, event)
    _forget_traces(run)
    if alive.probe is None:  # what a probe repeats is judged by its answer
        expect(run, alive, report)


def _whose(waiting: list[Incident], report: Applied, run: Run) -> Incident | None:
    """Return the incident that a newly applied plan belongs to: the one with that plan, else the newest open one."""
    known = {incident.verification.plan.plan_id for incident in run.incidents.values() if incident.verification}
    if report.plan_id in known:
        return None
    exact = [one for one in waiting if one.plan is not None and one.plan.plan_id == report.plan_id]
    return max(exact or waiting, key=lambda one: (one.attempt, one.opened_step), default=None)


def _executed(turn: Turn, run: Run, alive: Alive, incident: Incident, report: Applied, event: Event) -> None:
    plan = incident.plan
    if plan is None or plan.plan_id != report.plan_id:
        plan = plan_of(report, alive.start.run_uid, alive.start.attempt)
        turn.note(incident, event.time, event.step, f"Attempt {alive.start.attempt} began with a plan of other origin.")
    incident.action, incident.plan, incident.held_by, incident.done = plan.action, plan, None, "executed"
    if plan.probe is None:
        incident.severity = "critical"
    parent = run.traces.get(incident.attempt)
    refused = {name: why for name, why in report.not_applied.items() if name not in BESIDE}
    first = report.start_step
    if report.target is not None and report.target in plan.fallback_targets:
        refused.pop("target", None)
        plan = incident.plan = of_fallback(plan, report.target, parent)
        says = f"Its target could not be loaded: it goes back to step {report.target.step}, which the plan names beside it."
        turn.note(incident, event.time, event.step, says)
    incident.verification = begin(incident, plan, alive.start.attempt, alive.start.start_id, first, parent)
    incident.closed_step = None
    thrown = of_rollback(parent, None if report.target is None else report.target.step, event.time)
    incident.reasoned = structs.replace(incident.reasoned, cost=thrown or incident.reasoned.cost)
    where = "" if report.target is None else f" from step {report.target.step}"
    turn.note(
        incident,
        event.time,
        event.step,
        f"Attempt {alive.start.attempt} runs under the plan{where}; it is verified by its records.",
        "verifying",
    )
    for name in BESIDE:
        if name in report.not_applied:
            turn.note(incident, event.time, event.step, f"Not applied: {name}: {report.not_applied[name]}.")
    if refused:
        missing = "; ".join(f"{name}: {why}" for name, why in sorted(refused.items()))
        _settle(
            turn, run, alive, incident, Judged(f"Plan was not applied: {missing}.", "mismatch"), event.time, event.step
        )


def _left_behind(turn: Turn, alive: Alive, incident: Incident, event: Event) -> None:
    """Close an incident whose attempt ended otherwise than by its plan."""
    began = f"Attempt {alive.start.attempt}"
    if incident.state == "acting" and alive.start.attempt == incident.attempt:
        turn.note(incident, event.time, event.step, f"{began} restarted in place; the requested rollback is still due.")
        return
    if incident.state == "acting" and incident.plan is not None and incident.plan.action == "stop":
        escalate(turn, incident, event.time, event.step, f"{began} began, though the run was to be stopped.")
        return
    if incident.state == "acting":
        incident.verdict = MISMATCH
        escalate(turn, incident, event.time, event.step, f"Plan was not applied: {began} began without it.")
        return
    source = alive.resumed_from
    if source is None:
        says = f"{began} began; it says nothing of a checkpoint that it resumed from."
    elif source < incident.onset:
        says = f"{began} resumed from step {source}, before the onset: what happened is undone unless it comes again."
    else:
        says = f"{began} resumed from step {source}, after the onset: what happened may be in its state."
    close(turn, incident, event.time, event.step, "inconclusive", says)


def _carried_on(turn: Turn, run: Run, alive: Alive, incident: Incident, report: Applied | None, event: Event) -> None:
    """Go on verifying in a restart of the verified line, or settle where it is another line."""
    verification = incident.verification
    if verification is None or verification.start_id == alive.start.start_id:
        return
    if report is not None and report.plan_id != verification.plan.plan_id:
        says = f"Attempt {alive.start.attempt} was rolled back again before this one was verified."
        _settle(turn, run, None, incident, Judged(says, "not_recovered"), event.time, event.step)
        return
    source, of = alive.resumed_from, alive.resumed_attempt
    wrong = any(
        checkpoint.step == source and checkpoint.attempt == of and abandoned(checkpoint, run.executed)
        for checkpoint in run.checkpoints
    )
    if wrong:
        says = f"Plan was not applied: attempt {alive.start.attempt} loaded the abandoned checkpoint of step {source}."
        _settle(turn, run, alive, incident, Judged(says, "mismatch"), event.time, event.step)
        return
    first = (source or 0) + 1
    go_on(verification, alive.start.start_id, alive.start.attempt, first)
    turn.note(
        incident, event.time, event.step, f"Attempt {alive.start.attempt} goes on from step {source}; verification too."
    )


def _forget_traces(run: Run) -> None:
    """Keep the traces that a verification compares with, and the newest."""
    needed = {
        one.verification.parent_attempt
        for one in run.incidents.values()
        if one.state == "verifying" and one.verification
    }
    needed.update(sorted(run.traces)[-2:])
    run.traces = {attempt: trace for attempt, trace in run.traces.items() if attempt in needed}
    run.worlds = {attempt: world for attempt, world in run.worlds.items() if attempt in needed}


def verify(turn: Turn, run: Run, alive: Alive, record: Step) -> None:
    """Let the records of the live start speak for the incidents that it verifies."""
    for incident in list(run.incidents.values()):
        verification = incident.verification
        if incident.state != "verifying" or verification is None or verification.start_id != alive.start.start_id:
            continue
        again = _again(turn, alive, incident, record)
        if answers.waits(incident):
            answers.listen(turn, run, alive, incident, record, None if again is None else again.says.rstrip("."))
            again = None
            if incident.ended:
                continue
        if again is not None:
            _settle(turn, run, alive, incident, again, record.time, record.step)
            continue
        change = parted(alive.changes, incident.onset, record.step)
        if change is not None:
            judged = cut_short(verification, change, incident.trend, turn.settings)
            _settle(turn, run, alive, incident, judged, record.time, record.step)
            continue
        parent = run.traces.get(verification.parent_attempt)
        for judged in observe(verification, record, parent, incident.trend, turn.settings):
            _settle(turn, run, alive, incident, judged, record.time, record.step)
            if judged.outcome is not None:
                break


def _again(turn: Turn, alive: Alive, incident: Incident, record: Step) -> Judged | None:
    """Say whether an alert fires between the onset and the end of the skip: it did not help.

    Rules that have hardly begun are believed only where the loss is above the parent's trend as well.
    """
    verification = incident.verification
    if verification is None or not verification.onset_step <= record.step < verification.skip_end:
        return None
    loss = record.value("loss")
    high = loss is not None and (
        loss != loss
        or (
            incident.trend is not None
            and loss > float(incident.trend.at(alive.trace.steps[-1:])[0]) + 4 * incident.trend.noise
        )
    )
    young = record.step - (alive.first_step or record.step) < turn.settings.warmup_steps
    for name, seen in alive.firing.items():
        if rank(seen.severity) > 0 and seen.since >= verification.onset_step and (high or not young):
            return Judged(f"{name} fires at step {record.step}, before the skip ends.", "not_recovered")
    return None


def ended(turn: Turn, run: Run, alive: Alive, event: Event, time: float, step: int | None) -> None:
    """Take the end of a start. A finished run settles what is open; after any other end the next start does."""
    alive.ended = str(event.fields.get("reason") or "exit")[:LONGEST_REASON]
    if alive.ended != "finished":
        return
    for incident in list(run.incidents.values()):
        verification = incident.verification
        if incident.state == "verifying" and verification is not None:
            last = alive.line.released
            judged = finish_early(verification, last, incident.trend, turn.settings)
            _settle(turn, run, None, incident, judged, time, step)
        elif incident.open and incident.start_id == alive.start.start_id:
            _finished(turn, run, alive, incident, time, step)


def gone(turn: Turn, run: Run, alive: Alive, time: float) -> None:
    """Close what a run left open that ended, or cannot be seen, for so long that no next start is awaited.

    A requested rollback has its own end (:func:`.acting.overdue`).
    """
    unseen = alive.progress.unseen
    if alive.ended is None and unseen is None:
        alive.gone = None
        return
    if alive.gone is None:
        alive.gone = time
    waited = time - alive.gone
    if waited < turn.settings.gone_seconds:
        return
    what = f"ended ({alive.ended}) and no other began" if alive.ended is not None else "could not be read"
    says = f"Attempt {alive.start.attempt} {what} for {words(waited)}."
    for incident in list(run.incidents.values()):
        verified = incident.state == "verifying" and incident.verification is not None
        start_id = incident.verification.start_id if verified and incident.verification else incident.start_id
        if start_id == alive.start.start_id and (verified or (incident.open and incident.state != "acting")):
            close(turn, incident, time, None, "inconclusive", says)


def _finished(turn: Turn, run: Run, alive: Alive, incident: Incident, time: float, step: int | None) -> None:
    facts = facts_of(incident, alive, run)
    conclude(incident, facts, turn.settings.persist_steps)
    recent = facts.loss_high[-10:]
    if not len(recent) or facts.trend is None:
        close(turn, incident, time, step, "inconclusive", "The run finished before it could be judged.")
    elif recent.all() or facts.nonfinite[-1:].any():
        close(turn, incident, time, step, "not_recovered", "The run finished with the loss above its trend.")
    elif recent.any() or any(seen.firing for seen in incident.rules.values()):
        close(turn, incident, time, step, "inconclusive", "The run finished before it could be judged.")
    else:
        conclude(incident, facts, turn.settings.persist_steps, healed=True)
        close(turn, incident, time, step, "recovered", "The run finished with the loss back on its trend.")


def _settle(
    turn: Turn, run: Run, alive: Alive | None, incident: Incident, judged: Judged, time: float, step: int | None
) -> None:
    if judged.outcome is None:
        turn.note(incident, time, step, judged.says)
    elif judged.outcome == "mismatch":
        incident.verdict = MISMATCH
        escalate(turn, incident, time, step, judged.says)
    else:
        if incident.plan is not None:
            incident.reasoned = tried(incident.reasoned, incident.plan.lr_factor, judged.outcome)
        close(turn, incident, time, step, judged.outcome, judged.says)
        if judged.outcome == "not_recovered" and alive is not None:
            _go_further(turn, run, alive, incident, time, step)


def _go_further(turn: Turn, run: Run, alive: Alive, before: Incident, time: float, step: int | None) -> None:
    """After a rollback that did not help: the next one goes further back, or a person takes over.

    Where alerts opened an incident of the new attempt, its own policy decides, bound to an older target. Where only the level
    tells, an incident is opened here and decided at once.
    """
    target = before.plan.target if before.plan is not None else None
    following = open_incident(run, alive.start.start_id)
    if following is not None:
        following.follows = before.id
        following.further_than = None if target is None else target.step
        turn.touch(following)
        return
    if not len(alive.trace):
        return
    now = int(alive.trace.steps[-1])
    following = new_incident(run, alive, now, time, onset=before.onset)
    following.severity, following.verdict = "critical", "level_shift"
    following.follows = before.id
    following.further_than = None if target is None else target.step
    verification = before.verification
    onset = max(before.onset, alive.first_step or before.onset)
    if verification is not None and verification.after_steps:
        onset = verification.after_steps[0]
    following.rules["TrainingNotRecovered"] = RuleSeen(onset, now, "critical", "level_shift", firing=False)
    place(following, alive)
    following.onset = onset
    following.trend = before.trend
    facts = facts_of(following, alive, run)
    conclude(following, facts, turn.settings.persist_steps, settled=True)
    following.cause, following.confidence, following.scores = before.cause, before.confidence, dict(before.scores)
    following.confirmed_step = now
    turn.note(following, time, now, f"The rollback of attempt {before.attempt} did not help.", "confirmed")
    history = past(run, alive, now)
    if history.rollbacks >= turn.settings.max_rollbacks:
        escalate(turn, following, time, now, f"{history.rollbacks} rollbacks did not help.")
        return
    roll_back(turn, run, alive, following, facts, Decision("rollback", "The next one goes further back."), time)
