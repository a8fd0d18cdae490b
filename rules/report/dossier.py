"""One incident, laid out as its report: the same parts in HTML and in Markdown. It arranges and words what the row holds.

Nothing is concluded here. A row of another version lacks some of it: what is not there is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from . import words
from .scale import short, whole

#: Ranges of samples that are listed, and commands that are given for them.
MOST_RANGES, MOST_COMMANDS = 12, 3
#: What stands for a number that nobody measured.
UNKNOWN = "unknown"
OUTCOMES = {"found": "found", "ruled_out": "ruled out", "not_possible": "not possible"}
ANSWERS = {"allow": "allows", "hold": "holds", "deny": "denies"}
#: What the numbers of a post-mortem are called.
_NUMBERS = (
    ("loss_before", "loss before", "mean of 50 steps"),
    ("loss_onset", "loss at the onset", ""),
    ("loss_peak", "largest loss", "loss_peak_step"),
    ("loss_after", "loss 50 steps behind it", "loss_after_step"),
    ("first_nonfinite_step", "first loss that is not finite", ""),
    ("grad_norm", "gradient norm at the onset", "before clipping"),
    ("grad_norm_peak", "largest gradient norm", "grad_norm_peak_step"),
    ("clip_ratio", "norm over the clipping threshold", ""),
    ("lr", "learning rate", ""),
    ("loss_scale", "loss scale", ""),
    ("precision", "precision", ""),
)
_PREVENTION = {
    "clipping": "clipping threshold",
    "warm_up": "warm-up",
    "checkpoints": "cadence of checkpoints",
    "embedding_shrink": "gradient shrink of the embedding",
    "loss_scaler": "loss scaler",
}
_WINDOWS = ("from the target to the onset", "from the onset to the end of the skip", "behind skip and ramp")


@dataclass(frozen=True, slots=True)
class Weighed:
    """One cause with its score and the sentences for it and against it, each with its weight."""

    name: str
    score: float
    speaks_for: list[tuple[str, float]]
    against: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Checked:
    """One check of the triage."""

    name: str
    outcome: str
    words: str
    says: str


@dataclass(slots=True)
class Dossier:
    """The parts of a report. Texts are plain: whoever writes them escapes them."""

    sentence: str
    decision: str
    todo: str
    head: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, str, str]] = field(default_factory=list)
    unknown: str = ""
    order: str = ""
    causes: list[Weighed] = field(default_factory=list)
    explained: str = ""
    test: str = ""
    seen: list[tuple[Any, str]] = field(default_factory=list)
    triage: list[tuple[str, list[Checked]]] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    plan: list[tuple[str, str, str]] = field(default_factory=list)
    gates: list[tuple[str, str, str]] = field(default_factory=list)
    open_gates: str = ""
    windows: list[tuple[str, str, str]] = field(default_factory=list)
    checks: list[tuple[str, str, str]] = field(default_factory=list)
    verified: str = ""
    cost: list[str] = field(default_factory=list)
    prevention: list[tuple[str, str]] = field(default_factory=list)
    timeline: list[tuple[str, str, str, str]] = field(default_factory=list)


def dossier(row: dict[str, Any]) -> Dossier:
    """Return the parts of the report of an incident's row."""
    found = Dossier(words.sentence(row), words.decision(row), words.todo(row))
    found.head = _head(row)
    numbers = _numbers(_object(row.get("post_mortem")))
    found.numbers = [one for one in numbers if one[1] != UNKNOWN]
    found.unknown = _listed("Unknown", [name for name, value, _ in numbers if value == UNKNOWN])
    found.order = str(_object(row.get("order")).get("says") or "")
    found.explained = str(_object(row.get("cause")).get("explained") or "")
    found.test = str(row.get("cheapest_test") or "")
    _evidence(found, row)
    _triage(found, row)
    _samples(found, row)
    found.plan = _plan(_object(row.get("plan")))
    found.gates = [
        (_said(one.get("gate")), ANSWERS.get(str(one.get("answer")), str(one.get("answer"))), _why(one))
        for one in _objects(row.get("gates"))
    ]
    allowing = [name for name, answer, why in found.gates if answer == ANSWERS["allow"] and not why]
    found.gates = [one for one in found.gates if one[0] not in allowing]
    found.open_gates = _listed("These allow it" if found.gates else "All gates allow it", allowing)
    _verified(found, row)
    found.cost = _cost(_object(row.get("cost")))
    found.prevention = [
        (_PREVENTION.get(str(one.get("what")), _said(one.get("what"))), str(one.get("says") or ""))
        for one in _objects(row.get("prevention"))
    ]
    found.prevention += [(_PREVENTION["checkpoints"], str(says)) for says in row.get("advice") or []]
    found.timeline = [
        (moment(one.get("time")), words.step(one.get("step")), _said(one.get("state")), str(one.get("says") or ""))
        for one in _objects(row.get("timeline"))
    ]
    return found


def moment(time: Any) -> str:
    """Return Unix seconds as a time of day in UTC with its date; an empty text where the time is not known."""
    if not isinstance(time, int | float) or not math.isfinite(time) or not 0 < time < 253_402_300_800:
        return ""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: Any) -> str:
    """Return seconds in the unit that people would use; an empty text where they are not known."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _head(row: dict[str, Any]) -> list[tuple[str, str]]:
    scope = _object(row.get("scope"))
    found = [
        ("run", str(row.get("run") or "")),
        ("attempt", str(row.get("attempt", ""))),
        ("severity", str(row.get("severity") or "")),
        ("state", _said(row.get("state"))),
        ("steps", words.steps_of(row)),
        ("follows", str(row.get("follows") or "")),
        ("acknowledged by", str(row.get("acknowledged_by") or "")),
        ("approved by", str(row.get("approved_by") or "")),
    ]
    for name in ("ranks", "hosts", "groups", "modules"):
        found.append((name, ", ".join(map(str, scope.get(name) or []))))
    return [(name, text) for name, text in found if text]


def _numbers(told: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the numbers of a post-mortem: name, value, and where or what of; what nobody measured is unknown."""
    if not told:
        return []
    found = []
    for key, name, of in _NUMBERS:
        value = told.get(key)
        at = (
            f"step {words.step(told[of])}"
            if of.endswith("_step") and told.get(of) is not None
            else of.replace("_", " ")
        )
        if of.endswith("_step") and told.get(of) is None:
            at = ""
        text = UNKNOWN if value is None else words.step(value) if key.endswith("_step") else _number(value)
        found.append((name, text, at if value is not None else ""))
    good = _object(told.get("last_good"))
    if good:
        found.append(("last good checkpoint", f"step {words.step(good.get('step'))}", str(good.get("path") or "")))
    for name, one in _object(told.get("unusual")).items():
        unusual = _object(one)
        found.append((f"unusual: {name}", _number(unusual.get("value")), f"usually {_number(unusual.get('usual'))}"))
    return found


def _evidence(found: Dossier, row: dict[str, Any]) -> None:
    scores = _object(_object(row.get("cause")).get("scores"))
    by_cause: dict[str, Weighed] = {
        str(name): Weighed(words.CAUSES.get(str(name), str(name)), float(score) if _is(score) else 0.0, [], [])
        for name, score in scores.items()
    }
    for one in _objects(row.get("evidence")):
        says, speaks = str(one.get("says") or ""), _object(one.get("speaks"))
        at = f"step {words.step(one['step'])}: " if one.get("step") is not None else ""
        for cause, weight in speaks.items():
            if not _is(weight):
                continue
            into = by_cause.setdefault(str(cause), Weighed(words.CAUSES.get(str(cause), str(cause)), 0.0, [], []))
            (into.speaks_for if weight > 0 else into.against).append((f"{at}{says}", abs(float(weight))))
        if not speaks:
            found.seen.append((one.get("step"), says))
    found.causes = sorted(by_cause.values(), key=lambda one: (-one.score, one.name))
    for weighed in found.causes:
        for side in (weighed.speaks_for, weighed.against):
            side.sort(key=lambda one: -one[1])


def _triage(found: Dossier, row: dict[str, Any]) -> None:
    stages: dict[str, list[Checked]] = {}
    for one in _objects(row.get("triage")):
        outcome = str(one.get("outcome"))
        check = Checked(_said(one.get("check")), outcome, OUTCOMES.get(outcome, outcome), str(one.get("says") or ""))
        stages.setdefault(str(one.get("stage")), []).append(check)
    found.triage = list(stages.items())


def _samples(found: Dossier, row: dict[str, Any]) -> None:
    ranges = [one for one in row.get("suspect_samples") or [] if isinstance(one, list | tuple) and len(one) == 2]
    epoch = f" of epoch {row['suspect_epoch']}" if row.get("suspect_epoch") is not None else ""
    if ranges:
        told = ", ".join(f"[{whole(first)}, {whole(end)})" for first, end in ranges[:MOST_RANGES])
        more = f" and {len(ranges) - MOST_RANGES} more ranges" if len(ranges) > MOST_RANGES else ""
        count = sum(end - first for first, end in ranges)
        found.samples.append(f"Positions {told}{more}{epoch}: {whole(count)} sample{'' if count == 1 else 's'}.")
        onset = row.get("onset_step")
        if onset is not None:
            attempt = f" --attempt {row['attempt']}" if isinstance(row.get("attempt"), int) else ""
            found.commands.append(f"trainwarden data show --run {quoted(row.get('run'))} --step {onset}{attempt}")
    for one in _objects(row.get("suspect_shards")):
        found.samples.append(
            f"Shard {one.get('name')}: positions {whole(one.get('first', 0))} to {whole(one.get('end', 0))}."
        )


def quoted(text: Any) -> str:
    """Return a word for a shell."""
    import shlex

    return shlex.quote(str(text or "RUN"))


def _plan(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what the plan changes: field, value and the reason. What has a reason and no value here is told as well."""
    if not plan:
        return []
    target, reasons = _object(plan.get("target")), _object(plan.get("reasons"))
    skips = plan.get("skip_samples") or []
    told = ", ".join(f"[{whole(first)}, {whole(end)})" for first, end in skips[:MOST_RANGES])
    if len(skips) > MOST_RANGES:
        told += f" and {len(skips) - MOST_RANGES} more ranges"
    factor = plan.get("lr_factor")
    values = {
        "target": f"step {words.step(target.get('step'))} of attempt {target.get('attempt')}: {target.get('path')}"
        if target
        else "",
        "fallback_targets": ", ".join(
            f"step {words.step(one.get('step'))}" for one in _objects(plan.get("fallback_targets"))
        ),
        "skip_samples": told,
        "skip_mode": str(plan.get("skip_mode") or "") if skips else "",
        "exclude": ", ".join(f"{one.get('dataset')}: {one.get('shard')}" for one in _objects(plan.get("exclude"))),
        "exclude_hosts": ", ".join(map(str, plan.get("exclude_hosts") or [])),
        "reset_optimizer": "" if plan.get("reset_optimizer") is None else "yes" if plan["reset_optimizer"] else "no",
        "lr_factor": "" if factor is None else "unchanged" if factor == 1 else f"× {_number(factor)}",
        "rewarmup_steps": f"{plan['rewarmup_steps']} steps" if plan.get("rewarmup_steps") else "",
        "probe": words.probe_of(plan),
    }
    names = [*values, *(name for name in reasons if name not in values)]
    return [
        (_said(name), values.get(name, ""), str(reasons.get(name) or ""))
        for name in names
        if values.get(name) or reasons.get(name)
    ]


def _why(one: dict[str, Any]) -> str:
    until = moment(one.get("until"))
    return f"{one.get('why') or ''}{f' Until {until} UTC.' if until else ''}".strip()


def _verified(found: Dossier, row: dict[str, Any]) -> None:
    told = _object(row.get("verification"))
    if not told:
        return
    answer = words.PROBED.get(str(told.get("answer")), "")
    found.verified = f"Attempt {told.get('attempt')} ran under the plan.{answer and f' {answer}'} {words.state_of(row)}"
    for name, one in zip(_WINDOWS, _objects(told.get("windows")), strict=False):
        end = one.get("end")
        where = f"from step {words.step(one.get('first'))}" + (f" to {words.step(end)}" if end is not None else "")
        found.windows.append((name, where, str(one.get("says") or "not told yet")))
    for name, one in _object(told.get("checks")).items():
        check = _object(one)
        ok = "not seen yet" if check.get("ok") is None else "yes" if check["ok"] else "no"
        found.checks.append((_said(name), ok, str(check.get("says") or "")))


def _cost(cost: dict[str, Any]) -> list[str]:
    if not cost:
        return []
    steps, took, idle = cost.get("steps") or 0, duration(cost.get("seconds")), duration(cost.get("idle"))
    count = f"{whole(steps)} step{'' if steps == 1 else 's'}"
    if not cost.get("thrown"):
        if not steps:
            return ["No step was thrown away, and none had a loss above its trend."]
        return [f"No step was thrown away. {count} had a loss above its trend{f', over {took}' if took else ''}."]
    found = [f"{count} were thrown away{f', which had taken {took}' if took else '; how long they took is not known'}."]
    if idle:
        found.append(f"The run stood for {idle} until the next attempt began.")
    if took and idle:
        found.append(f"In all {duration(float(cost['seconds']) + float(cost['idle']))}, on all of the run's devices.")
    return found


def _listed(head: str, names: list[str]) -> str:
    return f"{head}: {', '.join(names)}." if names else ""


def _number(value: Any) -> str:
    return short(float(value)) if _is(value) else str(value)


def _is(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _said(name: Any) -> str:
    return str(name or "").replace("_", " ")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list | tuple) else []
