"""An incident as the JSON object that is stored, shown and sent (design §3.5)."""

from __future__ import annotations

from typing import Any

import msgspec

from trainwarden.record import encode_numbers
from trainwarden.rules.core.counted import counted

from .postmortem import post_mortem
from .reasoning import Reasoned, as_row, tried
from .state import Incident

#: How far a request to lower the rate went, where the records show that it was lowered.
LOWERED = ("lowered", "returned", "not_returned")


def row(incident: Incident) -> dict[str, Any]:
    """Return the incident's row: plain data that any JSON encoder takes, non-finite numbers as their words."""
    data: dict[str, Any] = {
        "id": incident.id,
        "run": incident.run,
        "run_uid": incident.run_uid,
        "attempt": incident.attempt,
        "start_id": incident.start_id,
        "onset_step": incident.onset,
        "onset_uncertainty": incident.uncertainty,
        "opened_step": incident.opened_step,
        "confirmed_step": incident.confirmed_step,
        "closed_step": incident.closed_step,
        "state": incident.state,
        "severity": incident.severity,
        "verdict": incident.verdict,
        "action": incident.action,
        "plan": None if incident.plan is None else msgspec.to_builtins(incident.plan),
        "advice": list(incident.advice),
        "held_by": incident.held_by,
        "gates": [msgspec.to_builtins(one) for one in incident.gates],
        "done": incident.done,
        "webhook_id": incident.webhook_id,
        "follows": incident.follows,
        "acknowledged_by": incident.acknowledged_by,
        "approved_by": incident.approved_by,
        "cause": {
            "name": incident.cause,
            "confidence": incident.confidence,
            "scores": dict(incident.scores),
            "explained": incident.reasoned.explained,
        },
        "scope": {
            "ranks": list(incident.ranks),
            "groups": list(incident.groups),
            "modules": list(incident.modules),
            "hosts": list(incident.hosts),
        },
        "alerts": list(incident.rules),
        "rules": alerts(incident),
        "suspect_samples": [[first, end] for first, end in incident.suspect_samples],
        "suspect_epoch": incident.suspect_epoch,
        "summary": incident.summary,
        "cheapest_test": _cheapest_test(incident),
        "post_mortem": post_mortem(incident),
        "evidence": weighed(incident),
        **as_row(_with_trial(incident)),
        "verification": _verification(incident),
        "timeline": [
            {"time": entry.time, "step": entry.step, "state": entry.state, "says": entry.says}
            for entry in incident.timeline
        ],
    }
    found: dict[str, Any] = encode_numbers(data)
    return found


def _cheapest_test(incident: Incident) -> str | None:
    """Return what would tell more: the probe that is planned, as long as it has not begun, else what the evidence asks for."""
    plan = incident.plan
    if plan is not None and plan.probe is not None and incident.verification is None:
        return plan.reasons.get("probe")
    return incident.cheapest_test or None


def alerts(incident: Incident) -> list[dict[str, Any]]:
    """Return what each rule saw, the first one first. What a rule says in words is filled in where effects leave the core."""
    return [
        {"alert": name, "since": seen.since, "step": seen.fired_step, "value": _short(seen.value)}
        for name, seen in incident.rules.items()
    ]


def _short(value: float | None) -> float | None:
    """Return a number for people: what differs beyond the sixth digit says nothing."""
    return None if value is None else float(f"{value:.6g}")


def evidence(incident: Incident) -> list[dict[str, Any]]:
    """Return each observation once: one that speaks for two causes is two findings."""
    seen = dict.fromkeys((one.kind, one.step, one.says) for one in incident.findings)
    return [{"kind": kind, "step": step, "says": says} for kind, step, says in seen]


def _with_trial(incident: Incident) -> Reasoned:
    """Return what is told of an incident; a rate that was lowered for a while was a trial of it."""
    plan = incident.plan
    if plan is None or incident.action != "lower_lr" or incident.done not in LOWERED:
        return incident.reasoned
    return tried(incident.reasoned, plan.lr_factor, incident.state)


def weighed(incident: Incident) -> list[dict[str, Any]]:
    """Return each observation once, with what it speaks for (and against, below 0) by cause."""
    speaks: dict[tuple[str, int | None, str], dict[str, float]] = {}
    for one in incident.findings:
        causes = speaks.setdefault((one.kind, one.step, one.says), {})
        if one.cause and one.weight:
            causes[one.cause] = one.weight
    return [{"kind": kind, "step": step, "says": says, "speaks": of} for (kind, step, says), of in speaks.items()]


def _verification(incident: Incident) -> dict[str, Any] | None:
    verification = incident.verification
    if verification is None:
        return None
    result = verification.result
    return {
        "attempt": verification.attempt,
        "answer": verification.answer,
        "checks": {name: {"ok": check.ok, "says": check.says} for name, check in verification.checks.items()},
        "windows": [
            {"first": verification.first_step, "end": verification.onset_step, "says": verification.first_window},
            {"first": verification.onset_step, "end": verification.skip_end, "says": verification.second_window},
            {
                "first": verification.after_from,
                "end": None,
                "says": None
                if result is None
                else f"{result.excess:+.3g} against the trend, standard error {result.error:.2g}, {counted(result.n, 'record')}",
            },
        ],
    }
