"""The life of an incident until it is decided: opened by the first alert, joined by others, confirmed, healed, closed.

One event is one incident: whatever fires while one is open, or within its healing time, joins it; a thousand NaN records are one.
"""

from __future__ import annotations

import numpy as np

from trainwarden.record import Step
from trainwarden.rules.core.counted import counted

from . import broken, damaged, devices, looked
from .attribution import Cause, attribute
from .baseline import Baseline
from .delivery import rank
from .events import begun
from .facts import Earlier, Facts, before_onset, dirty_rows, high_gradient, high_loss
from .healing import high_now, level
from .makeup import moved
from .meetings import near as met_near
from .ongoing import ongoing
from .onset import WINDOW, onset, shifted, uncertainty
from .onset_numbers import numbers
from .planned import near, parted
from .reasoning import reasoned
from .resumed import line_of
from .scope import in_words, tell, whose_of
from .seeing import Change
from .state import Alive, Incident, IncidentState, RuleSeen, Run
from .suspects import suspects
from .trend import Trend
from .turn import Turn, digest
from .verdict import LEVEL_CLAIMS, STANDING, held_back, lasting, shape

#: Steps with a firing alert after which an incident is confirmed without the loss.
PERSISTS = 20
#: Newest records over which a rule's word on the level is checked against the trend.
LEVEL_RECORDS = 20
#: Verdicts of rules that are information alone where the loss stays within its noise: a ratio of losses near zero is large by nothing.
SPIKE_CLAIMS = ("transient_spike",)
#: Deviations up to which a loss that was high before a rule held is a bump of its own, such as that of a resume; more is told in any case.
BUMP_SDS = 20.0
#: Steps without an alert after which a piece of information is over: the next odd batch is another one.
INFO_HEALS = 10
#: Steps after a piece of information was opened from which what befalls one rank is another event.
RANK_STEPS = 2
#: Verdicts of rules that compare long windows: they hold long after what they see began.
OF_WINDOWS = ("level_shift", "drift")
#: Findings that stand in the summary.
IN_WORDS = ("after_event", "period", "first_module", "close_look", "damaged_rows", "device_error")
#: Closed incidents that a run remembers.
REMEMBERED = 20
#: Records after its opening at which an incident is judged one by one; later, every eighth.
CLOSELY, THEN_EVERY = 64, 8


def open_incident(run: Run, start_id: str) -> Incident | None:
    """Return the incident of a start that still gathers alerts."""
    for incident in run.incidents.values():
        if incident.open and incident.start_id == start_id:
            return incident
    return None


def fired(turn: Turn, run: Run, alive: Alive, record: Step, change: Change, withheld: bool = False) -> None:
    """Let a firing alert open an incident or join the open one. ``withheld``: a planned change excuses it, so it only informs."""
    severity, offered = change.labels.get("severity", "warning"), change.labels.get("verdict", "")
    if withheld:
        severity = "info"
    incident = open_incident(run, alive.start.start_id)
    if incident is not None and incident.excused and not withheld:
        says = "An alert that the planned change does not excuse opened an incident of its own."
        close(turn, incident, record.time, record.step, "inconclusive", says)
        incident = None
    if incident is not None and _outgrown(incident, severity, change, turn.settings.heal_steps):
        close(turn, incident, record.time, record.step, "recovered", "A graver alert opened an incident of its own.")
        incident = None
    fresh = incident is None
    if incident is None:
        known_already, graver_than = ongoing(run, alive, change, turn.settings) if not withheld else (None, None)
        if known_already is not None:
            _goes_on(turn, known_already, record, change)
            return
        incident = _open(turn, run, alive, record, change, severity)
        if graver_than is not None and graver_than.state != "inconclusive":
            incident.further_than = graver_than.onset  # what was saved since may hold the first fault
    known = incident.rules.get(change.rule)
    if known is None:
        cause = change.labels.get("cause", "")
        seen = RuleSeen(
            change.since, record.step, severity, offered, value=change.value, cause=cause, withheld=withheld
        )
        incident.rules[change.rule] = seen
        if not fresh:
            turn.note(incident, record.time, record.step, f"{change.rule} joins (since step {change.since}).")
    else:
        known.firing = True
    incident.last_active_step = record.step
    if fresh or known is None:
        place(incident, alive)
        if rank(severity):
            begun(run.events, incident.id, incident.onset, alive.trace.stride())
    if fresh:
        uncertain = f" (uncertain by {incident.uncertainty})" if incident.uncertainty > 1 else ""
        turn.note(
            incident, record.time, record.step, f"{change.rule} fires; it began at step {incident.onset}{uncertain}."
        )
    turn.touch(incident)


def _goes_on(turn: Turn, incident: Incident, record: Step, change: Change) -> None:
    """Let an alert join an incident that has ended while its fault goes on: it is written down, and nobody is told again."""
    incident.last_active_step = record.step
    if change.rule in incident.rules:
        return
    severity, offered = change.labels.get("severity", "warning"), change.labels.get("verdict", "")
    cause = change.labels.get("cause", "")
    incident.rules[change.rule] = RuleSeen(
        change.since, record.step, severity, offered, firing=False, over=True, value=change.value, cause=cause
    )
    says = f"{change.rule} joins (since step {change.since}): the same event goes on."
    turn.note(incident, record.time, record.step, says)


def resolved(turn: Turn, run: Run, alive: Alive, record: Step, change: Change) -> None:
    """Note that an alert is over."""
    incident = open_incident(run, alive.start.start_id)
    if incident is not None and change.rule in incident.rules and incident.rules[change.rule].firing:
        seen = incident.rules[change.rule]
        seen.firing = False
        if seen.over:  # a rule on the edge comes and goes: said once
            return
        seen.over = True
        unknown = " (its signals are unknown)" if change.state == "unknown" else ""
        turn.note(incident, record.time, record.step, f"{change.rule} is over{unknown}.")


def _outgrown(incident: Incident, severity: str, change: Change, heal_steps: int) -> bool:
    """Say whether a graver alert is another event than a piece of information before it.

    It is if the information was over when it began, or had lasted for long: a rule that always fires must not swallow it.
    The same holds for what a run has for ever, a period or a drift; and what befalls one rank does not begin with a hard batch of all.
    """
    since = change.since
    if rank(severity) <= rank(incident.severity):
        return False
    if incident.severity != "info":
        firing = [seen.verdict for seen in incident.rules.values() if seen.firing]
        return bool(firing) and all(verdict in STANDING for verdict in firing) and since > incident.opened_step
    if change.labels.get("scope") == "ranks" and since > incident.opened_step + RANK_STEPS:
        return True
    return since > incident.last_active_step + INFO_HEALS or since - incident.opened_step > heal_steps


def _open(turn: Turn, run: Run, alive: Alive, record: Step, change: Change, severity: str) -> Incident:
    incident = new_incident(run, alive, record.step, record.time, onset=change.since)
    incident.severity = _opening(alive, change, severity)
    incident.verdict = change.labels.get("verdict", "other") or "other"
    incident.follows = predecessor(run, alive.start.attempt)
    return incident


def new_incident(run: Run, alive: Alive, step: int, time: float, onset: int) -> Incident:
    """Return a new incident of the live start, opened at ``step``; the run remembers it. Its id counts those of the start."""
    start = alive.start
    alive.incidents += 1
    incident = Incident(
        id=f"inc_{digest(start.run_uid, str(start.attempt), start.start_id, str(step), str(alive.incidents))}",
        run_uid=start.run_uid,
        run=start.run,
        attempt=start.attempt,
        start_id=start.start_id,
        onset=onset,
        opened_step=step,
        opened_time=time,
        last_active_step=step,
    )
    remember(run, incident)
    return incident


def _opening(alive: Alive, change: Change, severity: str) -> str:
    """Return the severity to open with: nobody is told of what a change of unit, or a resume, would explain before it is decided."""
    offered = change.labels.get("verdict", "")
    if held_back(alive.unit_doubted, offered) or held_back(alive.below, offered):
        return "info"
    return believed(severity, offered, None)


def remember(run: Run, incident: Incident) -> None:
    """Add an incident to the run and forget the oldest closed ones beyond the limit."""
    run.incidents[incident.id] = incident
    over = [one.id for one in run.incidents.values() if one.ended]
    for gone in over[: max(0, len(over) - REMEMBERED)]:
        del run.incidents[gone]


def predecessor(run: Run, attempt: int) -> str | None:
    """Return the incident of the newest earlier attempt that had one which did not simply heal."""
    found = [
        incident
        for incident in run.incidents.values()
        if incident.attempt < attempt and (incident.state != "recovered" or incident.action != "none")
    ]
    return max(found, key=lambda one: (one.attempt, one.opened_step)).id if found else None


def place(incident: Incident, alive: Alive) -> None:
    """Find the onset and what was usual before it, from all rules that joined so far."""
    since = min(seen.since for seen in incident.rules.values())
    trend, usual = _usual(alive, since)
    incident.onset = onset(alive.trace, since, trend, usual)
    if incident.onset < since:  # what led up to it is no baseline
        trend, usual = _usual(alive, incident.onset)
    incident.trend, incident.usual = trend, usual
    incident.uncertainty = uncertainty(alive.trace, incident.onset, trend, usual)
    if incident.onset == since and all(
        seen.verdict in OF_WINDOWS for seen in incident.rules.values() if seen.since == since
    ):
        told = shifted(alive.trace, since, _usual(alive, since - WINDOW * alive.trace.stride())[0])
        if told is not None:
            incident.onset, incident.uncertainty = told
            incident.trend, incident.usual = _usual(alive, incident.onset)
    incident.since_start = None if alive.first_step is None else incident.onset - alive.first_step


def _usual(alive: Alive, step: int) -> tuple[Trend | None, dict[str, Baseline]]:
    """Return trend and baselines before ``step``.

    What was too good since a wrong resume is no trend: where the attempt before led is (case A09).
    """
    trend, usual = before_onset(alive.trace, alive.inherited, step, alive.changes)
    source = alive.resumed_from
    if (
        alive.below
        and alive.inherited is not None
        and source is not None
        and parted(alive.changes, source, step) is None
    ):
        trend = line_of(alive.inherited, source)
    return trend, usual


def facts_of(incident: Incident, alive: Alive, run: Run) -> Facts:
    """Return the incident's numbers as of the newest record."""
    trace = alive.trace
    rows = slice(trace.row(incident.onset), len(trace))
    now = int(trace.steps[-1]) if len(trace) else incident.onset
    trend, usual = incident.trend, incident.usual
    if parted(alive.changes, incident.onset, now) is not None:
        trend, usual = None, {}  # what was usual before a planned change says nothing of what is behind it
    excess, loss_high, nonfinite = high_loss(trace, rows, trend)
    return Facts(
        trace=trace,
        onset=incident.onset,
        uncertainty=incident.uncertainty,
        opened=incident.opened_step,
        now=now,
        trend=trend,
        usual=usual,
        steps=trace.steps[rows],
        loss=trace.column("loss")[rows],
        loss_measured=trace.measured("loss")[rows],
        excess=excess,
        loss_high=loss_high,
        nonfinite=nonfinite,
        grad_high=high_gradient(trace, rows, usual),
        dirty=dirty_rows(trace, rows, usual),
        first_step=alive.first_step,
        resumed_from=alive.resumed_from,
        beta2=beta2_of(alive),
        earlier=_earlier(run, incident),
        rules=tuple(incident.rules),
        blamed=tuple((name, seen.cause, seen.since, seen.value) for name, seen in incident.rules.items() if seen.cause),
        offered=tuple(dict.fromkeys(seen.verdict for seen in incident.rules.values() if seen.verdict)),
        inherited=alive.inherited,
        planned=alive.planned,
        moved=() if alive.resumed_from is None else moved(alive.makeup, len(trace)),
        devices=devices.near(alive.devices, incident.onset, now, trace.stride()),
        broken=broken.first(alive.broken, incident.onset - incident.uncertainty, now),
        looked=looked.first(alive.looked, incident.onset - incident.uncertainty, now),
        damaged=damaged.first(alive.damaged, incident.onset - incident.uncertainty - damaged.LOOK, now),
        below=alive.below,
        environment=alive.environment,
        exit_code=alive.exit_code,
        probed=tuple(run.probed),
        doubted=alive.unit_doubted,
        whose=whose_of(incident, alive),
        versions=alive.machines.versions,
        traces=run.traces,
        events=run.events,
        periodic=_periodic(incident),
        samples=tuple(trace.samples(rows.start)) if rows.start < len(trace) else (),
        changes=near(alive.changes, incident.onset),
        known=met_near(alive, incident.onset - incident.uncertainty, incident.onset),
        run_uid=run.run_uid,
    )


def _periodic(incident: Incident) -> tuple[int, float] | None:
    """Return where a rule saw a period, and the period that it saw."""
    for seen in incident.rules.values():
        if seen.verdict == "periodic_spikes" and seen.value is not None and 1 < seen.value < float("inf"):
            return seen.since, seen.value
    return None


def beta2_of(alive: Alive) -> float | None:
    """Return the decay rate of the second moment that the newest record tells, else the start event."""
    values = alive.trace.column("beta2")
    known = values[(values >= 0) & (values < 1)]
    return float(known[-1]) if len(known) else alive.beta2


def _earlier(run: Run, incident: Incident) -> tuple[Earlier, ...]:
    found = []
    for one in run.incidents.values():
        if one.attempt < incident.attempt and one.severity != "info":
            where = (tuple(one.ranks), tuple(one.hosts), tuple(one.domains), tuple(one.onset_samples))
            found.append(Earlier(one.id, one.attempt, one.onset, one.since_start, one.cause, *where))
    return tuple(found)


def due(incident: Incident) -> bool:
    """Say whether the incident is judged at this record: depends on the count of its records alone."""
    return incident.records <= CLOSELY or incident.records % THEN_EVERY == 0


def conclude(
    incident: Incident, facts: Facts, persist_steps: int, healed: bool = False, settled: bool = False
) -> Cause:
    """Write cause, verdict, suspects and summary from the facts."""
    cause = attribute(facts)
    incident.cause, incident.confidence, incident.scores = cause.name, cause.confidence, cause.scores
    incident.findings, incident.cheapest_test = cause.findings, cause.cheapest_test
    incident.onset_samples = list(facts.samples)
    incident.numbers = numbers(incident.numbers, facts)
    tell(incident, facts)
    incident.verdict = shape(facts, healed, settled, persist_steps)
    incident.reasoned = reasoned(incident.reasoned, facts, cause, incident.verdict)
    finite = facts.excess[facts.excess == facts.excess]
    if len(finite):
        incident.worst_excess = max(incident.worst_excess, float(finite.max()))
    found = suspects(facts)
    incident.suspect_samples, incident.suspect_epoch = found.ranges, found.epoch
    incident.suspect_shards = [span.name for span in found.shards]
    incident.summary = _summary(incident, facts)
    return cause


def _summary(incident: Incident, facts: Facts) -> str:
    lasted = lasting(facts)
    words = incident.verdict.replace("_", " ")
    said = [f"{words} from step {incident.onset}{in_words(incident)}"]
    if facts.trend is not None and len(facts.loss):
        most = float(np.nanmax(facts.loss, initial=-np.inf))
        usual = float(facts.trend.at(facts.steps[:1])[0])
        if lasted and most > usual:  # where the loss is NaN what is left of it may be usual
            said.append(f"loss up to {most:.4g} against {usual:.4g}, high over {counted(lasted, 'step')}")
    told = [one.says for one in incident.findings if one.kind in IN_WORDS]
    said += [f"{says[0].lower()}{says[1:-1]}" for says in dict.fromkeys(told)]
    if incident.cause == "undetermined":
        said.append("cause undetermined")
    else:
        said.append(f"cause {incident.cause.replace('_', ' ')} (confidence {incident.confidence:.2f})")
    text = ", ".join(said) + "."
    return text[0].upper() + text[1:]


def confirm(turn: Turn, incident: Incident, facts: Facts, time: float) -> None:
    """Confirm a watched incident: by the loss, by a value that is not finite, by a critical rule, or by persistence."""
    if incident.state != "watching":
        return
    need = max(1, turn.settings.confirm_steps // facts.trace.stride())
    high = int(facts.loss_high[-max(10, need) :].sum())
    if facts.nonfinite.any():
        why = "the loss is not finite"
    elif high >= need:
        why = f"the loss is above its trend in {counted(high, 'record')}"
    elif any(
        seen.firing and believed(seen.severity, seen.verdict, facts) == "critical" for seen in incident.rules.values()
    ):
        why = "a critical rule fires"
    elif (lasted := _fired_for(incident)) >= PERSISTS:
        why = f"it has lasted {counted(lasted, 'step')}"
    else:
        return
    incident.confirmed_step = facts.now
    turn.note(incident, time, facts.now, f"{why[0].upper()}{why[1:]}: confirmed.", "confirmed")


def _fired_for(incident: Incident) -> int:
    """Return the steps since the first alert held, 0 where none fires any more. The onset may lie long before."""
    if not any(seen.firing for seen in incident.rules.values()):
        return 0
    return incident.last_active_step - min(seen.since for seen in incident.rules.values())


def believed(severity: str, offered: str, facts: Facts | None, since: int | None = None) -> str:
    """Return the severity that counts of a rule which offers this verdict.

    A critical rule that speaks of the loss's level is a claim, and judgement looks for itself: until the level is seen to be high it
    counts as a warning. A mean over a window stays high long after a spike is over (case A01). A loss that comes back to where the
    attempt before led, behind a resume since which it was too good, is not worth a word (case A09). ``since`` is the step from which a rule
    held that joined later: what was before it is not what it speaks of, such as the bump of a resume that is over (case A07).
    """
    if facts is not None and held_back(facts.below, offered) and not high_now(facts, LEVEL_RECORDS):
        return "info"
    if severity == "warning" and offered in SPIKE_CLAIMS and (facts is None or _within_noise(facts, since)):
        return "info"
    if severity != "critical" or offered not in LEVEL_CLAIMS:
        return severity
    return "critical" if facts is not None and high_now(facts, LEVEL_RECORDS) else "warning"


def _within_noise(facts: Facts, since: int | None = None) -> bool:
    """Say whether the loss since the onset left its trend by more than its noise at one step at most, as far as there is a trend."""
    known = bool(np.isfinite(facts.excess).any()) and not bool(facts.nonfinite.any())
    high = facts.loss_high
    if (
        since is not None and float(np.nanmax(facts.excess, initial=0.0)) < BUMP_SDS
    ):  # an expression may count two records before it holds
        high = high[facts.steps >= since - 2 * facts.trace.stride()]
    return known and int(high.sum()) * facts.trace.stride() < 2


def raise_severity(turn: Turn, incident: Incident, severity: str) -> None:
    """Raise the severity to at least ``severity``; it never falls."""
    if rank(severity) > rank(incident.severity):
        incident.severity = severity
        turn.touch(incident)


def heal(turn: Turn, incident: Incident, facts: Facts, time: float) -> bool:
    """Close an incident whose alerts are over: healed, or hand on (True) one whose level has settled high."""
    settings = turn.settings
    quiet = facts.now - incident.last_active_step
    needed = settings.heal_steps if rank(incident.severity) else min(INFO_HEALS, settings.heal_steps)
    if any(seen.firing for seen in incident.rules.values()) or quiet < needed:
        return False
    found = level(facts, incident.last_active_step, settings.level_steps)
    if found == "settled":
        return True
    if found == "high":
        return False
    conclude(incident, facts, settings.persist_steps, healed=True)
    says = f"No alert for {counted(quiet, 'step')} and the loss is back on its trend."
    if found == "unknown":
        says = f"No alert for {counted(quiet, 'step')}; there is no trend to compare the loss with."
    if incident.plan is not None and incident.webhook_id is None:
        says += " It healed before anything was done."
    close(turn, incident, time, facts.now, "recovered", says)
    return False


def close(turn: Turn, incident: Incident, time: float, step: int | None, state: IncidentState, says: str) -> None:
    """End an incident; where no step is told, at the newest record of its start."""
    run = turn.memory.runs.get(incident.run_uid)
    alive = None if run is None else run.alive
    if step is None and alive is not None and alive.start.start_id == incident.start_id and len(alive.trace):
        step = int(alive.trace.steps[-1])
    incident.closed_step = step
    for seen in incident.rules.values():
        seen.firing = False
    turn.note(incident, time, step, says, state)
