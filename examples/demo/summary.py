"""What came of the demo: ``summary.json``, and whether it is what the demo promises.

Every number is measured: losses on the held-out text by the training runs themselves, the rest from the run's journals
and plans and the daemon's incidents, compared with the answer that only the demo's main process knew.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from trainwarden.plan import Applied, Plan, merge_ranges
from trainwarden.record import Event, Ranges

from .follow import Journals
from .layout import DemoError, Layout
from .poison import Answer

#: What the demo promises (each is checked, and the exit code tells).
TREATED_WITHIN = 0.02
UNTREATED_ABOVE = 0.05
ONSET_WITHIN = 3
MOST_SKIPPED = 4


def summarise(layout: Layout, answer: Answer, incidents: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the contents of ``summary.json``.

    Losses are means over the held-out rows at the same global step, in nats a byte. ``skip_samples`` and
    ``poison_samples`` count sample positions, ``skip_ranges`` and ``poison_ranges`` name them.

    Raises:
        DemoError: a run left no held-out loss, or the runs did not end at the same step.
    """
    ends = {arm: _held_out(layout, arm) for arm in ("clean", "untreated", "treated")}
    if len({end["step"] for end in ends.values()}) != 1:
        raise DemoError(f"the runs ended at different steps: {ends}")
    ledger = layout.run_folder("treated").ledger()
    rollbacks = len(ledger.entries) if ledger else 0
    incident = _the_one(incidents)
    plan = _plan(incident)
    skipped = merge_ranges(plan.skip_samples) if plan else []
    summary = {
        "clean_loss": ends["clean"]["loss"],
        "untreated_loss": ends["untreated"]["loss"],
        "treated_loss": ends["treated"]["loss"],
        "incidents": len(incidents),
        "rollbacks": rollbacks,
        "onset_step": incident.get("onset_step"),
        "poison_first_step": answer.first_step,
        "verdict": incident.get("verdict"),
        "cause": (incident.get("cause") or {}).get("name"),
        "skip_samples": count(skipped),
        "poison_samples": count(answer.ranges),
        "contains": contains(skipped, answer.ranges),
        "plan_applied": plan is not None and _applied(layout, plan),
        "recovered": incident.get("state") == "recovered",
        "seconds": round(seconds, 1),
    }
    return summary | {
        "state": incident.get("state"),
        "step": ends["treated"]["step"],
        "skip_ranges": skipped,
        "poison_ranges": answer.ranges,
        "poison_shard": answer.shard,
        "target_step": plan.target.step if plan and plan.target else None,
    }


def write(layout: Layout, summary: dict[str, Any], answer: Answer, incidents: list[dict[str, Any]]) -> None:
    """Write the result, the incidents, and, now that all is over, the answer."""
    layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
    layout.incidents.write_text(json.dumps(incidents, indent=2) + "\n")
    layout.answer.write_text(json.dumps(msgspec.to_builtins(answer), indent=2) + "\n")


def broken_promises(summary: dict[str, Any]) -> list[str]:
    """Return one sentence for each promise of the demo that this summary does not keep."""
    clean = summary["clean_loss"]
    onset = summary["onset_step"]
    kept = {
        f"one rollback (there were {summary['rollbacks']})": summary["rollbacks"] == 1,
        f"cause data (it was {summary['cause']})": summary["cause"] == "data",
        "every poisoned sample is skipped": summary["contains"],
        "the plan was applied": summary["plan_applied"],
        f"the run recovered (the incident is {summary['state']})": summary["recovered"],
        f"at most {MOST_SKIPPED} times the poisoned samples are skipped ({summary['skip_samples']} for "
        f"{summary['poison_samples']})": 0 < summary["skip_samples"] <= MOST_SKIPPED * summary["poison_samples"],
        f"the onset is found within {ONSET_WITHIN} steps of step {summary['poison_first_step']} (it was {onset})": onset
        is not None
        and abs(onset - summary["poison_first_step"]) <= ONSET_WITHIN,
        f"the treated run ends within {TREATED_WITHIN:.0%} of the clean one ({change(summary['treated_loss'], clean)})": abs(
            summary["treated_loss"] / clean - 1
        )
        <= TREATED_WITHIN,
        f"the untreated run ends at least {UNTREATED_ABOVE:.0%} above the clean one "
        f"({change(summary['untreated_loss'], clean)})": summary["untreated_loss"] / clean - 1 >= UNTREATED_ABOVE,
    }
    return [says for says, keeps in kept.items() if not keeps]


def count(ranges: Ranges) -> int:
    """Count the positions in ranges, each once."""
    return sum(end - first for first, end in merge_ranges(ranges))


def contains(outer: Ranges, inner: Ranges) -> bool:
    """Say whether every range of ``inner`` lies inside a range of ``outer``."""
    merged = merge_ranges(outer)
    return all(any(first <= low and high <= end for first, end in merged) for low, high in inner)


def change(loss: float, base: float) -> str:
    """Return a loss relative to another as a percentage with its sign."""
    return f"{loss / base - 1:+.1%}"


def _held_out(layout: Layout, arm: str) -> dict[str, Any]:
    path = layout.arm(arm) / "heldout.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise DemoError(f"{path} is missing: the {arm} run did not come to its end") from None
    return found


def _the_one(incidents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the incident that led to a rollback, else the first, else nothing."""
    acted = [row for row in incidents if row.get("action") == "rollback"]
    return next(iter([*acted, *incidents]), {})


def _plan(incident: dict[str, Any]) -> Plan | None:
    raw = incident.get("plan")
    return msgspec.convert(raw, Plan) if raw else None


def _applied(layout: Layout, plan: Plan) -> bool:
    """Say whether the attempt that the plan was for reports that it carried out all of it."""
    for attempt, line in Journals(layout.run_folder("treated")).new():
        if attempt == plan.for_attempt and isinstance(line, Event) and line.kind == "start":
            report = line.fields.get("plan_applied")
            if report:
                applied = msgspec.convert(report, Applied)
                return applied.plan_id == plan.plan_id and not applied.not_applied
    return False
