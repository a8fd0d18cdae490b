"""Sentences about incidents for people: what it was, why, what was decided, what to do next.

The same words at a terminal and on a page. They say what a row holds and conclude nothing of their own.
"""

from __future__ import annotations

from typing import Any

from .scale import whole

#: What a verdict means, as a clause that follows "at step N" or "from step N".
CLAUSES = {
    "outlier": "a single loss stood out and the next one was back to normal",
    "transient_spike": "the loss spiked and came back to its trend",
    "slow_recovery": "the loss spiked and came back to its trend only slowly",
    "level_shift": "the loss rose and stayed at a higher level",
    "divergence": "the loss ran away from its trend",
    "nonfinite": "numbers became NaN or infinite",
    "grad_surge": "the gradient norm surged while the loss showed nothing",
    "grad_collapse": "the gradient collapsed while the loss rose: training stopped learning",
    "recurring_spikes": "the loss spiked again and again",
    "periodic_spikes": "the loss spiked at regular distances",
    "drift": "a value moved out of its range and stayed there",
    "scale_collapse": "the loss scale kept falling: gradients overflow time and again",
    "stall": "steps stopped coming",
    "mismatch": "two values that must agree did not",
    "other": "something unusual was seen",
}
#: What is said of verdicts that tell of a return while nobody has seen one.
UNFINISHED = {
    "outlier": "a loss stood out",
    "transient_spike": "the loss spiked",
    "slow_recovery": "the loss spiked",
}
#: What a cause is called in a sentence.
CAUSES = {
    "data": "the data",
    "learning_rate": "the learning rate",
    "numeric": "numerics",
    "optimizer_state": "the optimizer's state",
    "distributed": "one rank or the communication",
    "hardware": "hardware",
    "model": "the model",
    "instrument": "the measurement itself",
    "planned_change": "a planned change",
    "undetermined": "undetermined",
}
UNDETERMINED = "What caused it is not determined."
#: An outlier is no beginning of what came so many times its uncertainty behind it.
LONG_BEFORE = 20
SEVERITIES = ("critical", "warning", "info")
#: Names of columns that a sentence lists at most.
MOST_COLUMNS = 12


def sentence(row: dict[str, Any]) -> str:
    """Return the verdict as a sentence."""
    onset, closed = row.get("onset_step"), row.get("closed_step")
    verdict = str(row.get("verdict"))
    clause = CLAUSES.get(verdict, verdict.replace("_", " "))
    if verdict in UNFINISHED and not came_back(row):
        clause = f"{UNFINISHED[verdict]}, and was not seen to come back"
        clause += "" if closed is None else f" up to step {step(closed)}"
    where = f"At step {step(onset)}"
    if verdict != "outlier" and closed is not None and onset is not None and closed > onset:
        where = f"From step {step(onset)}"
    return f"{where} {clause}. {because(row)}"


def came_back(row: dict[str, Any]) -> bool:
    """Say whether the row says that what was seen is over: it closed, and not into the hands of a person."""
    return row.get("closed_step") is not None and row.get("state") in ("recovered", "dismissed", None)


def graver(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the incident of graver severity that opened where this one closed: this one was its beginning.

    A single loss that stood out long before, as long as its onset may be wrong by many times over, was none.
    """
    lasted = (row.get("closed_step") or 0) - (row.get("onset_step") or 0)
    if row.get("verdict") == "outlier" and lasted > LONG_BEFORE * max(1, row.get("onset_uncertainty") or 1):
        return None
    rank = {name: place for place, name in enumerate(SEVERITIES)}
    for other in rows:
        if (
            other is not row
            and row.get("closed_step") is not None
            and other.get("opened_step") == row["closed_step"]
            and other.get("start_id") == row.get("start_id")
            and rank.get(str(other.get("severity")), 9) < rank.get(str(row.get("severity")), 9)
        ):
            return other
    return None


def because(row: dict[str, Any]) -> str:
    """Return a sentence about the cause."""
    cause = row.get("cause") or {}
    name = str(cause.get("name") or "undetermined")
    if name == "undetermined":
        return UNDETERMINED
    confidence = cause.get("confidence")
    sure = f" (confidence {confidence:.2f})" if isinstance(confidence, int | float) else ""
    return f"The likely cause is {CAUSES.get(name, name)}{sure}."


def decision(row: dict[str, Any]) -> str:
    """Return a sentence about what was decided, or was held back, and by what."""
    action = str(row.get("action") or "none")
    plan = row.get("plan") if isinstance(row.get("plan"), dict) else {}
    assert isinstance(plan, dict)
    target = plan.get("target") if isinstance(plan.get("target"), dict) else {}
    assert isinstance(target, dict)
    if action == "none":
        says = f"No action was decided: {_why_none(row)}."
    elif action == "rollback":
        says = "Decided: roll back"
        if target.get("step") is not None:
            says += f" to the checkpoint of step {step(target['step'])}"
        says += "".join(f", {one}" for one in _changes(plan)) + "."
    elif action == "probe":
        says = "Decided: a probe"
        if target.get("step") is not None:
            says += f" from the checkpoint of step {step(target['step'])}"
        says += f": {probe_of(plan)}." if probe_of(plan) else "."
        reason = (plan.get("reasons") or {}).get("probe")
        says += f" {reason}" if reason else ""
    elif action == "stop":
        why = (plan.get("reasons") or {}).get("action")
        says = "Decided: stop the run." + (f" {why}" if why else "")
    elif action == "escalate":
        reasons = [str(item.get("says")) for item in row.get("timeline") or [] if item.get("state") == "escalated"]
        says = "Decided: hand over to a person." + (
            f" {reasons[0].removesuffix(' Handed over to a person.')}" if reasons else ""
        )
    elif action == "lower_lr":
        says = f"Decided: lower the learning rate (factor {plan.get('lr_factor', '?')})."
    else:
        says = f"Decided: {action.replace('_', ' ')}."
    held = row.get("held_by")
    if held and action not in ("none", "escalate"):
        name = str(held)
        says += f" Held back ({name.replace('_', ' ')}): {HELD.get(name, name.replace('_', ' '))}."
    return says


#: What keeps a decision from being made or carried out, in words; see ``Decision.held_by`` and the gates.
HELD = {
    "warm_up": "nothing is done within the attempt's warm-up",
    "cool_down": "the last rollback is too recent",
    "mode": "the policy is to observe only",
    "approval": "a person must approve it",
    "no_receiver": "there is no receiver that could carry it out",
    "silenced": "a silence covers it",
    "acknowledged": "a person looks after it",
    "maintenance": "a maintenance window is open",
    "rerun": "the framework is making the step again by itself",
    "run_limit": "as much was done to the run as it may have",
    "day_limit": "the run was restarted as often today as it may be",
    "fleet_limit": "as many runs were restarted today as may be",
    "expired": "it was decided too long ago",
    "start_ended": "the start that it is about has ended",
    "not_live": "the records come from a file, of a run that nobody polls",
    "unauthenticated": "its source is not authenticated",
    "not_allowed": "its source may not be acted upon",
    "catching_up": "not all records are read yet",
    "stale": "the newest record is too old to act on",
    "evidence": "a copy of the damaged state is being made",
}
#: Why the policy wants nothing of an open incident, by what was seen; only what persists justifies going back.
NOT_ENOUGH = {
    "outlier": "a loss that stood out is not worth a rollback unless it stays high",
    "transient_spike": "a spike is not worth a rollback unless the loss stays high",
    "slow_recovery": "a spike is not worth a rollback unless the loss stays high",
    "level_shift": "a rollback takes a loss that is high for longer and not on its way back",
    "divergence": "a rollback takes a loss that is high for longer",
    "nonfinite": "a rollback takes a loss that is not finite for several records in a row",
    "grad_surge": "a gradient alone is not worth a rollback",
    "grad_collapse": "a rollback takes a loss that is high for longer",
    "recurring_spikes": "spikes that come again are by themselves not worth a rollback",
    "periodic_spikes": "spikes that come again are by themselves not worth a rollback",
    "drift": "a value out of its range is by itself not worth a rollback",
    "scale_collapse": "a loss scale that falls is by itself not worth a rollback",
    "stall": "a run that stands still has no state to go back from",
    "mismatch": "two numbers that must agree do not, which going back does not mend",
}
#: Of these it cannot be said that they were over before they had persisted: their clause says that they did.
LASTED = (
    "slow_recovery",
    "level_shift",
    "divergence",
    "grad_collapse",
    "recurring_spikes",
    "periodic_spikes",
    "drift",
    "scale_collapse",
)


def _why_none(row: dict[str, Any]) -> str:
    """Return why the policy wants nothing (see :mod:`trainwarden.rules.core.policy`): what the row says, and nothing against its verdict."""
    held, state, verdict = str(row.get("held_by") or ""), str(row.get("state") or ""), str(row.get("verdict") or "")
    if held in HELD:
        return HELD[held]
    if state == "dismissed":
        return "it was dismissed"
    if row.get("severity") == "info":
        return "it only informs"
    if state == "recovered" and verdict in LASTED:
        return "the run recovered without one"
    if state == "recovered":
        return "it was over before it had persisted for as long as a rollback takes to be worth it"
    if state == "escalated":
        return "it is for a person to decide"
    return NOT_ENOUGH.get(verdict, "what was seen is by itself not worth a rollback")


#: What a probe answered, in words.
PROBED = {
    "again": "The probe's answer: it came again.",
    "passed": "The probe's answer: it passed.",
    "unclear": "The probe does not tell.",
}
_TRIED = {
    "replay": "the same samples again",
    "without_evaluation": "the same samples again without any evaluation",
    "other_host": "the same samples again on other hosts",
}


def probe_of(plan: dict[str, Any]) -> str:
    """Return what a plan's probe tries, and in which steps; an empty text where it has none."""
    probe = plan.get("probe")
    if not isinstance(probe, dict):
        return ""
    first, count, kind = probe.get("first_step"), probe.get("steps"), str(probe.get("kind"))
    says = _TRIED.get(kind, kind.replace("_", " "))
    if isinstance(first, int) and isinstance(count, int):
        says += f", steps {step(first)} to {step(first + count - 1)}"
    return says


def _changes(plan: dict[str, Any]) -> list[str]:
    found = []
    skipped = plan.get("skip_samples") or []
    if skipped:
        count = sum(end - first for first, end in skipped)
        found.append(f"skip {whole(count)} sample{'' if count == 1 else 's'}")
    if plan.get("reset_optimizer"):
        found.append("reset the optimizer")
    factor = plan.get("lr_factor")
    if isinstance(factor, int | float) and factor != 1:
        found.append(f"learning rate × {factor:g}")
    if plan.get("rewarmup_steps"):
        found.append(f"warm up over {whole(plan['rewarmup_steps'])} steps")
    look = plan.get("anomaly")
    if isinstance(look, dict) and isinstance(look.get("first_step"), int) and isinstance(look.get("steps"), int):
        found.append(
            f"look closely at steps {step(look['first_step'])} to {step(look['first_step'] + look['steps'] - 1)}"
        )
    if plan.get("exclude_hosts"):
        found.append(f"leave out {', '.join(map(str, plan['exclude_hosts']))}")
    return found


def todo(row: dict[str, Any]) -> str:
    """Return what a person should do next, or an empty text where nothing is to be done."""
    state, action = str(row.get("state")), str(row.get("action") or "none")
    if state == "not_recovered":
        return "It did not recover: look at it now."
    if action == "escalate" and state == "recovered":
        return "It is over: find out what it was before it comes again."
    if state == "escalated" or (action == "escalate" and state not in ("dismissed", "inconclusive")):
        return "Look at it now."
    if state == "awaiting_approval":
        return f"Approve or dismiss it: trainwarden incidents show {row.get('id', 'ID')}."
    if state == "inconclusive":
        return "The records do not say whether it recovered: look at the curve."
    if row.get("severity") == "critical" and state not in ("recovered", "dismissed"):
        if action == "none":
            return "It is critical and nothing was decided: look at it now."
        return "A daemon under policy act asks for this; without one, do it by hand."
    if row.get("severity") == "warning" and state != "recovered":
        return "Watch whether it comes back."
    return ""


def steps_of(row: dict[str, Any]) -> str:
    """Return the incident's steps in one line."""
    parts = [f"onset {step(row.get('onset_step'))}"]
    uncertainty = row.get("onset_uncertainty")
    if uncertainty:
        parts[0] += f" ± {whole(uncertainty)}"
    for name in ("opened", "confirmed", "closed"):
        if row.get(f"{name}_step") is not None:
            parts.append(f"{name} {step(row[f'{name}_step'])}")
    return ", ".join(parts)


def step(value: Any) -> str:
    """Return a step number, or a dash where there is none."""
    return whole(value) if isinstance(value, int | float) else "–"


def title(row: dict[str, Any]) -> str:
    """Return the verdict as a heading."""
    verdict = str(row.get("verdict") or "incident")
    return "Non-finite" if verdict == "nonfinite" else verdict.replace("_", " ").capitalize()


def counts(report: dict[str, Any]) -> dict[str, int]:
    """Return how many incidents of each severity a report has."""
    rows = report.get("incidents") or []
    return {name: sum(1 for row in rows if row.get("severity") == name) for name in SEVERITIES}


def tally(report: dict[str, Any]) -> str:
    """Return the numbers of incidents in words."""
    found = [f"{number} {name}" for name, number in counts(report).items() if number]
    total = len(report.get("incidents") or [])
    if not total:
        return "no incident"
    return f"{total} incident{'s' if total > 1 else ''}: {', '.join(found)}"


def verdict_of_run(report: dict[str, Any]) -> str:
    """Return the run as a whole in a sentence."""
    rows = report.get("incidents") or []
    critical = [row for row in rows if row.get("severity") == "critical"]
    if not rows:
        return unjudged(report) or "Nothing unusual was found."
    if not critical:
        warnings = [row for row in rows if row.get("severity") == "warning"]
        if not warnings:
            return "Nothing to act on: what was noted is worth a line and no more."
        more = f" {len(warnings) - 1} more of severity warning." if len(warnings) > 1 else ""
        return f"Nothing critical. {_headline(warnings[0])}{more}"
    open_ones = [row for row in critical if row.get("state") not in ("recovered", "dismissed")]
    worst = (open_ones or critical)[0]
    more = f" {len(critical) - 1} more critical." if len(critical) > 1 else ""
    return f"{_headline(worst)} {state_of(worst)}{more}"


def unjudged(report: dict[str, Any]) -> str:
    """Return what to say of records without a loss in which nothing was found, or an empty text."""
    judged = report.get("judged")
    if judged is None or "loss" in judged or not report.get("records"):
        return ""
    kind = "columns" if report.get("columns") else "signals"
    there = [str(name) for name in report.get("columns") or report.get("signals") or []]
    more = f" and {len(there) - MOST_COLUMNS} more" if len(there) > MOST_COLUMNS else ""
    listed = f"{kind}: {', '.join(there[:MOST_COLUMNS]) or 'none'}{more}"
    name_it = "; name it with --map loss=COLUMN" if report.get("columns") else ""
    if not judged:
        return f"Not judged: no loss was found ({listed}){name_it}."
    what = ", ".join(map(str, judged[:MOST_COLUMNS]))
    return f"Only {what} could be judged, and nothing unusual was found there: no loss was found ({listed}){name_it}."


def _headline(row: dict[str, Any]) -> str:
    """Return the verdict as a sentence, with the cause where one is known."""
    return sentence(row).removesuffix(UNDETERMINED).rstrip()


def cause_of(row: dict[str, Any]) -> str:
    """Return the cause with its confidence, short."""
    cause = row.get("cause") or {}
    name = str(cause.get("name") or "").replace("_", " ")
    confidence = cause.get("confidence")
    return f"{name} {confidence:.2f}" if name != "undetermined" and isinstance(confidence, int | float) else name


def state_of(row: dict[str, Any]) -> str:
    """Return where the incident stands in a sentence."""
    return {
        "watching": "It was being watched when the records ended.",
        "confirmed": "It is confirmed.",
        "awaiting_approval": "It waits for approval.",
        "acting": "The action was under way when the records ended.",
        "verifying": "It was being verified when the records ended.",
        "recovered": "The run recovered.",
        "not_recovered": "The run did not recover.",
        "inconclusive": "Whether it recovered cannot be told from the records.",
        "escalated": "It is for a person to decide.",
        "dismissed": "It was dismissed.",
    }.get(str(row.get("state")), f"State: {row.get('state')}.")


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return incidents by attempt and onset."""
    return sorted(rows, key=lambda row: (row.get("attempt") or 0, row.get("onset_step") or 0))
