"""What follows from a probe's answer: it is evidence, and the plan that it asks for (design §4.8).

Where it passed, the attempt goes on, and is verified as any rollback is: it began before the onset, and differs by what was tried. Where it came
again, nothing of it is kept: the plan follows from the cause as it is known now. An answer that is none is said, and nobody asks again.
"""

from __future__ import annotations

from msgspec import structs

from trainwarden.record import Step

from .acting import escalate, past, roll_back
from .attribution import weigh
from .attribution.probe_answer import outweigh
from .facts import Finding
from .incidents import close, conclude, facts_of, new_incident, open_incident, place
from .persistence import MENDED
from .policy import Decision
from .probed import Probed
from .probing import Answered, answer
from .reasoning import answered
from .state import Alive, Incident, RuleSeen, Run
from .turn import Turn

#: Probes of a run that are remembered.
REMEMBERED = 32
#: The rule that stands for a probe that came again where no alert says so.
STANDS_FOR = "TrainingNotRecovered"


def waits(incident: Incident) -> bool:
    """Say whether an incident waits for the answer of the probe that it is verified by."""
    verification = incident.verification
    return (
        incident.state == "verifying"
        and verification is not None
        and verification.plan.probe is not None
        and verification.answer is None
    )


def listen(turn: Turn, run: Run, alive: Alive, incident: Incident, record: Step, alarm: str | None) -> None:
    """Look for the answer in the newest record, and take it."""
    verification = incident.verification
    if verification is None:
        return
    found = answer(incident, verification, alive, run.traces.get(verification.parent_attempt), alarm)
    if found is None:
        return
    verification.answer = found.answer
    _remember(run, alive, incident, found)
    _weigh(incident, found)
    if found.answer == "passed":
        plan_id = verification.plan.plan_id
        run.executed = [structs.replace(one, probe=False) if one.plan_id == plan_id else one for one in run.executed]
        says = f"The probe passed. {found.says} The attempt goes on."
        turn.note(incident, record.time, record.step, says)
    elif found.answer == "unclear":
        turn.note(incident, record.time, record.step, f"The probe does not tell. {found.says}")
    else:
        close(turn, incident, record.time, record.step, "not_recovered", f"The probe tells: {found.says}")
        _follow(turn, run, alive, incident, found, record.time)


def _remember(run: Run, alive: Alive, incident: Incident, found: Answered) -> None:
    verification = incident.verification
    assert verification is not None
    probe = verification.plan.probe
    assert probe is not None
    run.probed.append(
        Probed(
            incident=incident.id,
            plan_id=verification.plan.plan_id,
            kind=probe.kind,
            onset=incident.onset,
            attempt=alive.start.attempt,
            answer=found.answer,
            says=found.says,
            weights=found.weights,
        )
    )
    del run.probed[:-REMEMBERED]


def _weigh(incident: Incident, found: Answered) -> None:
    """Add the answer to what is known of the incident that asked."""
    told = [
        Finding(kind="probe", step=incident.onset, cause=cause, weight=weight, says=found.says)
        for cause, weight in found.weights.items()
    ] or [Finding(kind="probe", step=incident.onset, says=found.says)]
    cause = weigh(outweigh([*incident.findings, *told]), incident.onset)
    incident.cause, incident.confidence, incident.scores = cause.name, cause.confidence, cause.scores
    incident.findings = cause.findings
    outcome = "not_possible" if found.answer == "unclear" else "found"
    incident.reasoned = answered(incident.reasoned, "probe_answer", outcome, found.says, cause.explained)
    incident.cheapest_test = "" if found.weights else cause.cheapest_test
    if found.weights.get("data", 0.0) < 0:
        incident.suspect_samples = []
    words = incident.verdict.replace("_", " ").capitalize()
    named = "" if cause.name == "undetermined" else f" (confidence {cause.confidence:.2f})"
    incident.summary = f"{words} from step {incident.onset}. {found.says} Cause {cause.name.replace('_', ' ')}{named}."


def _follow(turn: Turn, run: Run, alive: Alive, before: Incident, found: Answered, time: float) -> None:
    """Make the plan that the answer asks for, in the incident that alerts opened meanwhile or in one of its own."""
    now = int(alive.trace.steps[-1])
    following = open_incident(run, alive.start.start_id)
    if following is None:
        following = new_incident(run, alive, now, time, onset=before.onset)
        following.severity, following.verdict = before.severity, before.verdict
        following.rules[STANDS_FOR] = RuleSeen(before.onset, now, before.severity, before.verdict, firing=False)
        place(following, alive)
        following.onset, following.uncertainty = before.onset, before.uncertainty
        following.trend, following.usual = before.trend, before.usual
    following.follows = before.id
    if following.state == "acting":  # its own policy was quicker
        turn.touch(following)
        return
    facts = facts_of(following, alive, run)
    cause = conclude(following, facts, turn.settings.persist_steps)
    if following.confirmed_step is None:
        following.confirmed_step = now
    turn.note(following, time, now, f"A probe was made. {found.says}", "confirmed")
    history = past(run, alive, now)
    if history.rollbacks >= turn.settings.max_rollbacks:
        says = f"{found.says} {history.rollbacks} rollbacks were made already: a person must look."
        escalate(turn, following, time, now, says)
    elif cause.name not in MENDED:
        says = f"{found.says} Going back once more would repeat it. {cause.cheapest_test}".rstrip()
        escalate(turn, following, time, now, says)
    else:
        unsure = cause.confidence < turn.settings.confidence
        decision = Decision("rollback", "The cause is known now.", needs_approval=unsure)
        roll_back(turn, run, alive, following, facts, decision, time)
