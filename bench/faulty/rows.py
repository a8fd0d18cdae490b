"""One row a run of what was planted and what was found, and the figures over all rows."""

from __future__ import annotations

import math
import statistics
from typing import Any

from .judge import of_fault, paged, told
from .kinds import KINDS

#: A held-out loss so far above the clean one is harm.
HARM = 0.02
#: What a recovered run may be off: the larger of this share and twice the spread of clean runs.
OFF = 0.01
#: A confidence above which a wrong cause misleads.
SURE = 0.6


def row_of(
    kind: str, seed: int, values: dict[str, Any], ended: dict[str, Any], clean: float, report: dict[str, Any]
) -> dict[str, Any]:
    """Return the row of a watched run. ``clean`` is the held-out loss of the reference."""
    of = KINDS[kind]
    fault = of(values)
    rows = report["incidents"]
    found = of_fault(rows, *fault.judged()) if not of.healthy else []
    loss = ended["loss"]
    change = None if loss is None or not math.isfinite(loss) else loss / clean - 1
    row = {
        "kind": kind,
        "seed": seed,
        "says": of.says,
        "expected": list(of.causes),
        "values": values,
        "clean_loss": clean,
        "loss": None if change is None else loss,
        "change": change,
        "finite": change is not None or ended["hung"],
        "hung": ended["hung"],
        "harmful": not of.healthy and (ended["hung"] or change is None or change > HARM),
        "incidents": sum(told(one) for one in rows),
        "pages": sum(paged(one) and told(one) for one in rows),
        "actions": sum(one["action"] != "none" for one in rows),
        "notices": sorted({one["kind"] for one in report["notices"]}),
        "before": sum(told(one) and one not in found for one in rows) if not of.healthy else 0,
        "seconds": round(ended["seconds"], 1),
    }
    if of.healthy:
        return row | {"found": [brief(one) for one in rows if told(one)]}
    best = found[0] if found else None
    named = [one["cause"] for one in rows if told(one)]
    wrong = [
        cause for cause in named if cause["name"] not in (*of.causes, "undetermined") and cause["confidence"] > SURE
    ]
    ranked = max(best["cause"]["scores"], key=best["cause"]["scores"].get, default="undetermined") if best else None
    return row | {
        "detected": best is not None,
        "found": None if best is None else brief(best),
        "top1": best is not None and best["cause"]["name"] in of.causes,
        "ranked_first": ranked is not None
        and (ranked in of.causes or (best is not None and best["cause"]["name"] in of.causes)),
        "confident_wrong": len(wrong),
        "onset_error": None if best is None else best["onset_step"] - fault.first,
    }


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """Return what of an incident is shown in the table."""
    cause = row["cause"]
    plan = row.get("plan") or {}
    return {
        **{
            name: row[name]
            for name in ("verdict", "severity", "state", "action", "onset_step", "opened_step", "alerts")
        },
        "cause": cause["name"],
        "confidence": cause["confidence"],
        "scores": cause["scores"],
        "target": (plan.get("target") or {}).get("step"),
    }


def figures(rows: list[dict[str, Any]], recovered: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts over all rows so far."""
    faults = [row for row in rows if not KINDS[row["kind"]].healthy]
    clean = [row for row in rows if KINDS[row["kind"]].healthy]
    harmful = [row for row in faults if row["harmful"]]
    caught = [row for row in harmful if row["detected"]]
    harmless = [row for row in faults if KINDS[row["kind"]].harmless]
    return {
        "fault_kinds": len({row["kind"] for row in faults}),
        "harmful_kinds": len({row["kind"] for row in harmful}),
        "runs": len(faults),
        "harmful": len(harmful),
        "detected": len(caught),
        "missed": [row["kind"] for row in harmful if not row["detected"]],
        "top1": _share(row["top1"] for row in caught),
        "ranked_first": _share(row["ranked_first"] for row in caught),
        "confident_wrong": _share(row["confident_wrong"] > 0 for row in faults),
        "false_before": sum(row["before"] for row in faults),
        "harmless_pages": sum(row["pages"] for row in harmless),
        "clean_runs": len(clean),
        "clean_incidents": sum(row["incidents"] for row in clean),
        "clean_pages": sum(row["pages"] for row in clean),
        "clean_actions": sum(row["actions"] for row in clean),
        "treated": len(recovered),
        "recovered_share": _share(row["recovered"] for row in recovered),
    }


def _share(values: Any) -> float | None:
    known = [bool(value) for value in values]
    return round(sum(known) / len(known), 4) if known else None


def treated_row(kind: str, seed: int, treated: Any, clean: float, spread: float, harm: float | None) -> dict[str, Any]:
    """Return the row of a run under those that act; ``harm`` is what the same fault did to the run that nobody helped."""
    off = max(OFF, 2 * spread / clean)
    change = treated.loss / clean - 1 if math.isfinite(treated.loss) else None
    return {
        "kind": kind,
        "seed": seed,
        "clean_loss": clean,
        "loss": None if change is None else treated.loss,
        "change": change,
        "untreated_change": harm,
        "allowed": off,
        "recovered": change is not None and change <= off,
        "rollbacks": treated.rollbacks,
        "approved": treated.approved,
        "targets": treated.targets,
        "incidents": [brief(one) for one in treated.incidents if told(one)],
        "seconds": round(treated.seconds, 1),
    }


def spread(losses: list[float]) -> float:
    """Return the standard deviation of clean held-out losses, 0 where there are fewer than two."""
    return statistics.stdev(losses) if len(losses) > 1 else 0.0
