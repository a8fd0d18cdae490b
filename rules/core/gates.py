"""Whether what is wanted may be done now (design §3.6): an ordered list of gates, each of which allows, holds or denies.

The first two look at the run's own steps: while they are shut nothing is decided, live and in a replay alike. The others look at the
present: at the source's polls, the clock of the inputs, what was done before and people's words. They never change what was decided.
Every decision stores the answers of all gates that its action has to pass; ``held_by`` is the first that is shut.
docs/decisions.md shows the list, and a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from .grounds import Past
from .policy import Wanted
from .rerun import going_on
from .settings import Settings
from .state import Alive, GateAnswer, Incident, Memory, Run, Silence

#: Usual record intervals after which the newest record is too old to act on.
INTERVALS = 3
#: Seconds over which requests are counted for the limits of a day.
DAY = 86_400.0
#: Actions that leave for the receiver, and those of them that end an attempt.
DELIVERED: tuple[Wanted, ...] = ("lower_lr", "probe", "rollback", "stop")
ENDING: tuple[Wanted, ...] = ("probe", "rollback", "stop")


@dataclass(frozen=True, slots=True)
class Present:
    """What gates look at. ``alive`` is the run's newest start, ``past`` what was done to it up to its newest record."""

    incident: Incident
    run: Run
    alive: Alive | None
    memory: Memory
    settings: Settings
    past: Past

    @property
    def live(self) -> Alive | None:
        """The start that the incident is about, None where it is over."""
        alive = self.alive
        if alive is None or alive.start.start_id != self.incident.start_id or alive.ended is not None:
            return None
        return alive


@dataclass(frozen=True, slots=True)
class Answer:
    """A gate's answer: see :class:`.state.GateAnswer`."""

    answer: Literal["allow", "hold", "deny"]
    why: str = ""
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate: its name in ``held_by``, the actions that must pass it, what it asks and how it is opened, in words."""

    name: str
    of: tuple[Wanted, ...]
    question: str
    opens: str
    ask: Callable[[Wanted, Present, float], Answer]


ALLOW = Answer("allow")


def _warm_up(wanted: Wanted, present: Present, now: float) -> Answer:
    first = present.settings.warmup_steps + present.past.ramp_steps
    if present.past.answered or present.past.steps_run > first:
        return ALLOW
    return Answer("hold", f"The attempt has run {present.past.steps_run} steps of its warm-up of {first}.")


def _cool_down(wanted: Wanted, present: Present, now: float) -> Answer:
    past, steps = present.past, present.settings.cooldown_steps
    if past.rolled_back and past.steps_run <= steps:
        return Answer("hold", f"The last rollback is {past.steps_run} steps ago, of {steps}.")
    return ALLOW


def _mode(wanted: Wanted, present: Present, now: float) -> Answer:
    if present.settings.mode == "observe":
        return Answer("deny", "policy.mode is observe: it is only said.")
    return ALLOW


def _silenced(wanted: Wanted, present: Present, now: float) -> Answer:
    found = _silences(present.incident, present.memory.silences, now)
    if not found:
        return ALLOW
    ends = [one.until for one in found if one.until is not None]
    names = ", ".join(dict.fromkeys(one.author for one in found))
    return Answer("hold", f"Silenced by {names}.", max(ends) if len(ends) == len(found) else None)


def _acknowledged(wanted: Wanted, present: Present, now: float) -> Answer:
    incident = present.incident
    if incident.acknowledged_by is None or _approved(incident):
        return ALLOW
    return Answer("hold", f"{incident.acknowledged_by} looks after it: nothing is done over a person's head.")


def _maintenance(wanted: Wanted, present: Present, now: float) -> Answer:
    found = [
        one for one in present.memory.maintenance if one.until > now and fnmatchcase(present.incident.run, one.run)
    ]
    if not found:
        return ALLOW
    last = max(found, key=lambda one: one.until)
    return Answer("hold", f"A maintenance window is open{': ' + last.note if last.note else '.'}", last.until)


def _start_ended(wanted: Wanted, present: Present, now: float) -> Answer:
    return ALLOW if present.live is not None else Answer("deny", "The start that it is about has ended.")


def _rerun(wanted: Wanted, present: Present, now: float) -> Answer:
    alive = present.live
    if alive is None or not going_on(alive):
        return ALLOW
    return Answer("hold", f"The framework is making the step behind {alive.rerun} again by itself.")


def _run_limit(wanted: Wanted, present: Present, now: float) -> Answer:
    past, settings = present.past, present.settings
    done, most, what = past.rollbacks, settings.max_rollbacks, "rollbacks of the run"
    if wanted == "lower_lr":
        done, most, what = past.lowered, settings.max_lower_lr, "lowerings of the attempt's learning rate"
    elif wanted == "probe":
        done, most, what = past.probed, settings.max_probes, "probes of the run"
    if wanted == "stop" or done < most:
        return ALLOW
    return Answer("deny", f"{done} {what} were made, of {most}.")


def _day_limit(wanted: Wanted, present: Present, now: float) -> Answer:
    times = [one.time for one in present.memory.requested if one.run_uid == present.incident.run_uid]
    return _of_a_day(times, present.settings.max_rollbacks_per_day, "of this run", now)


def _fleet_limit(wanted: Wanted, present: Present, now: float) -> Answer:
    times = [one.time for one in present.memory.requested]
    return _of_a_day(times, present.settings.max_actions_per_day, "of all runs", now)


def _of_a_day(times: Sequence[float], most: int, of: str, now: float) -> Answer:
    recent = sorted(time for time in times if time > now - DAY)
    if len(recent) < most:
        return ALLOW
    until = recent[-most] + DAY if most else None
    return Answer("hold", f"{len(recent)} requests {of} ended an attempt within a day, of {most}.", until)


def _approval(wanted: Wanted, present: Present, now: float) -> Answer:
    incident = present.incident
    if (present.settings.mode != "approve" and not incident.needs_approval) or _approved(incident):
        return ALLOW
    plan = "its plan" if incident.plan is None else incident.plan.plan_id
    why = (
        "policy.mode is approve" if present.settings.mode == "approve" else "the cause is not clear enough to act alone"
    )
    return Answer("hold", f"A person must approve {plan}: {why}.")


def _approved(incident: Incident) -> bool:
    return incident.plan is not None and incident.approved_plan == incident.plan.plan_id


def _expired(wanted: Wanted, present: Present, now: float) -> Answer:
    decided, most = present.incident.decided_time, present.settings.decision_ttl
    if decided is None or now - decided <= most:
        return ALLOW
    return Answer("deny", f"It was decided more than {most:g} s ago: what was true then need not be true now.")


def _no_receiver(wanted: Wanted, present: Present, now: float) -> Answer:
    return ALLOW if present.settings.receiver else Answer("deny", "No receiver is configured.")


def _not_live(wanted: Wanted, present: Present, now: float) -> Answer:
    if present.live is not None and present.live.sources:
        return ALLOW
    return Answer("deny", "Nobody polls this run: its records come from a file, or it is over.")


def _unauthenticated(wanted: Wanted, present: Present, now: float) -> Answer:
    return _source(present, lambda alive, rank: alive.sources[rank].authenticated, "Its source has not proved itself.")


def _not_allowed(wanted: Wanted, present: Present, now: float) -> Answer:
    return _source(
        present, lambda alive, rank: alive.sources[rank].may_act, "Its source is configured with act: false."
    )


def _source(present: Present, good: Callable[[Alive, int], bool], why: str) -> Answer:
    alive = present.live
    if alive is None or not alive.sources:
        return Answer("deny", "No poll has said so.")
    return ALLOW if good(alive, min(alive.sources)) else Answer("deny", why)


def _catching_up(wanted: Wanted, present: Present, now: float) -> Answer:
    alive = present.live
    if alive is None or not alive.sources:
        return Answer("hold", "No poll has said so.")
    rank = min(alive.sources)
    seen, cursor = alive.sources[rank], alive.line.cursors.get(rank)
    if not seen.reachable:
        return Answer("hold", "The exporter does not answer.")
    if not seen.caught_up or cursor is None or cursor.last_seq < seen.last_seq:
        return Answer("hold", "Not all of its records are read yet.")
    return ALLOW


def _stale(wanted: Wanted, present: Present, now: float) -> Answer:
    alive = present.live
    if alive is None or not alive.sources:
        return Answer("hold", "No poll has said so.")
    most = max(present.settings.max_action_age, INTERVALS * (alive.trace.interval() or 0.0))
    if math.isnan(alive.line.newest_time) or alive.line.newest_time < now - most:
        return Answer("hold", f"The newest record is older than {most:.0f} s.")
    return ALLOW


def _evidence(wanted: Wanted, present: Present, now: float) -> Answer:
    until = present.incident.evidence_until
    if until is None or now >= until:
        return ALLOW
    return Answer("hold", "A copy of the damaged state is being made.", until)


#: Actions that wait for the run's own steps: handing over does, stopping a run that never learned does not (case C06).
_IN_TIME: tuple[Wanted, ...] = ("lower_lr", "probe", "rollback", "escalate")

GATES: tuple[Gate, ...] = (
    Gate(
        "warm_up",
        _IN_TIME,
        "Has the attempt run more than `warmup_steps`, and any ramp of its plan? Or was it a probe whose answer asks for the next plan?",
        "By itself. Early steps are noisy in every run, and there is no trend yet to judge by (case E07).",
        _warm_up,
    ),
    Gate(
        "cool_down",
        _IN_TIME,
        "Has an attempt that began with a plan run more than `cooldown_steps`?",
        "By itself. What was done last needs its time to show.",
        _cool_down,
    ),
    Gate(
        "mode",
        DELIVERED,
        "Is `policy.mode` more than `observe`?",
        "Set `policy: {mode: approve}` or `act` in the configuration and restart the daemon.",
        _mode,
    ),
    Gate(
        "silenced",
        DELIVERED,
        "Is there no silence in force that matches run, run_uid, severity or incident?",
        "It ends by itself at its time; a new silence with the same matchers that ends at once lifts it.",
        _silenced,
    ),
    Gate(
        "acknowledged",
        DELIVERED,
        "Has nobody taken the incident over, or has a person approved this very plan?",
        "`trainwarden incidents approve ID --plan PLAN_ID` lets the plan go on; `dismiss` ends it. A person who looks after a run is not "
        "surprised by a restart.",
        _acknowledged,
    ),
    Gate(
        "maintenance",
        DELIVERED,
        "Is no window of `maintenance` open that names the run?",
        "By itself at the end of the window; `until` says when.",
        _maintenance,
    ),
    Gate(
        "start_ended",
        DELIVERED,
        "Does the start still live that the incident is about?",
        "It never opens: the next start is judged by its own records.",
        _start_ended,
    ),
    Gate(
        "rerun",
        DELIVERED,
        "Is the framework not making a step again by itself?",
        "By itself with the event `rerun` that says it is over, or with the record of a later step. Two systems that mend one fault undo each "
        "other (case E10).",
        _rerun,
    ),
    Gate(
        "run_limit",
        DELIVERED,
        "Was less done than `max_rollbacks` of the run, `max_lower_lr` of the attempt or `max_probes` of the run allow?",
        "It does not: a person takes over. Raise the number and restart the daemon, if you must.",
        _run_limit,
    ),
    Gate(
        "day_limit",
        ENDING,
        "Did fewer than `max_rollbacks_per_day` requests end an attempt of this run in 24 hours?",
        "By itself, 24 hours after the oldest of them; `until` says when.",
        _day_limit,
    ),
    Gate(
        "fleet_limit",
        ENDING,
        "Did fewer than `max_actions_per_day` requests of this daemon end an attempt of any run in 24 hours?",
        "By itself, 24 hours after the oldest of them. Look first for what befalls many runs at once: a library, a file system, a network.",
        _fleet_limit,
    ),
    Gate(
        "approval",
        DELIVERED,
        "Does nobody need to approve it, or has a person approved this very plan? It is needed in mode `approve`, where the cause is unclear, "
        "and after a rollback that went wrong and nobody acknowledged.",
        "`trainwarden incidents approve ID --plan PLAN_ID`; it fails if the plan has changed since it was shown.",
        _approval,
    ),
    Gate(
        "expired",
        DELIVERED,
        "Was it decided at most `decision_ttl` seconds ago?",
        "It does not: the incident is handed to a person.",
        _expired,
    ),
    Gate(
        "no_receiver",
        DELIVERED,
        "Is a receiver configured?",
        "Configure `receiver` and restart the daemon.",
        _no_receiver,
    ),
    Gate(
        "not_live",
        DELIVERED,
        "Does the daemon poll the run's exporter?",
        "Add the exporter to `sources`; what is read from a file or followed with `--follow` is never acted upon.",
        _not_live,
    ),
    Gate(
        "unauthenticated",
        DELIVERED,
        "Has the source proved itself by its token or its certificate?",
        "Give the source its `token_file`.",
        _unauthenticated,
    ),
    Gate(
        "not_allowed",
        DELIVERED,
        "May this source be acted upon?",
        "Take `act: false` from the source.",
        _not_allowed,
    ),
    Gate(
        "catching_up",
        DELIVERED,
        "Does the exporter answer, and are all of its records read?",
        "By itself, with the next poll.",
        _catching_up,
    ),
    Gate(
        "stale",
        DELIVERED,
        "Is the newest record younger than `max_action_age` seconds and three usual record intervals?",
        "By itself with the next record. A run that makes none has another fault than the one that was decided about.",
        _stale,
    ),
    Gate(
        "evidence",
        ENDING,
        "Is no copy of the damaged state being made?",
        "By itself once it is made, at the latest after `quarantine_seconds`.",
        _evidence,
    ),
)
#: Gates that look at the run's own steps alone: while one is shut nothing is decided.
DECIDING = ("warm_up", "cool_down")


def answers(wanted: Wanted, present: Present, now: float) -> list[GateAnswer]:
    """Return the answers of all gates that ``wanted`` has to pass, in their order. ``now`` is Unix seconds by the inputs' clock."""
    found = []
    for gate in GATES:
        if wanted in gate.of:
            said = gate.ask(wanted, present, now)
            found.append(GateAnswer(gate.name, said.answer, said.until, said.why))
    return found


def held_by(given: Sequence[GateAnswer], of: Sequence[str] | None = None) -> str | None:
    """Return the name of the first gate that is shut, among those named ``of`` where given; None where all are open."""
    shut = [one.gate for one in given if one.answer != "allow" and (of is None or one.gate in of)]
    return shut[0] if shut else None


def silenced(incident: Incident, silences: Sequence[Silence], now: float) -> bool:
    """Say whether a silence in force matches the incident."""
    return bool(_silences(incident, silences, now))


def _silences(incident: Incident, silences: Sequence[Silence], now: float) -> list[Silence]:
    facts = {"run": incident.run, "run_uid": incident.run_uid, "severity": incident.severity, "incident": incident.id}
    return [one for one in silences if (one.until is None or one.until > now) and _matches(one.matchers, facts)]


def _matches(matchers: Mapping[str, str], facts: Mapping[str, str]) -> bool:
    return all(facts.get(name) == value for name, value in matchers.items())
