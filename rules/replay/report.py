"""What replay prints: one object a recording, the same as JSON and as text for people."""

from __future__ import annotations

from typing import Any

import msgspec

from trainwarden.record import encode_numbers

from .driver import Outcome
from .recordings import Recording


def report(recording: Recording, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of one recording. Nothing was delivered, so ``done`` is null."""
    return {
        "source": recording.source,
        "run": recording.run,
        "records": outcome.records,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "stride": outcome.stride,
        "signals": list(outcome.signals),
        "incidents": [{**row, "done": None} for row in outcome.incidents.values()],
        "notices": recording.notices + list(outcome.notices.values()),
    }


def to_json(reports: list[dict[str, Any]]) -> bytes:
    """Encode reports; non-finite numbers become their words, as in a record."""
    encoded = msgspec.json.encode(encode_numbers(reports))
    return msgspec.json.format(encoded, indent=2) + b"\n"


def to_text(reports: list[dict[str, Any]], console: Any) -> None:
    """Print reports on a rich console."""
    from rich.table import Table
    from rich.text import Text

    for one in reports:
        steps = f"steps {one['first_step']}–{one['last_step']}" if one["records"] else "no step"
        console.print(Text(f"{one['run']}: {one['records']} records, {steps}", style="bold"))
        console.print(Text(f"  {one['source']}", style="dim"))
        if one["incidents"]:
            table = Table(box=None, pad_edge=True, header_style="dim")
            for column in ("onset", "attempt", "state", "severity", "verdict", "cause", "action", "held by"):
                table.add_column(column)
            for row in one["incidents"]:
                cause = row.get("cause") or {}
                confidence = cause.get("confidence")
                named = str(cause.get("name", ""))
                table.add_row(
                    *(str(row.get(name, "")) for name in ("onset_step", "attempt", "state", "severity", "verdict")),
                    f"{named} {confidence:.2f}" if isinstance(confidence, int | float) else named,
                    str(row.get("action", "")),
                    str(row.get("held_by") or ""),
                )
            console.print(table)
            for row in one["incidents"]:
                incident_to_text(row, console)
        else:
            console.print(Text("  no incident"))
        for notice in one["notices"]:
            step = notice.get("step")
            console.print(
                Text(f"  notice{'' if step is None else f' at step {step}'}: {notice.get('says', '')}", style="dim")
            )


def incident_to_text(row: dict[str, Any], console: Any) -> None:
    """Print one incident: what happened, what speaks for it, what was done and when."""
    from rich.text import Text

    console.print()
    console.print(Text(f"  {row.get('id', '')}  {row.get('summary', '')}"))
    for item in row.get("evidence") or []:
        step = item.get("step")
        console.print(Text(f"    {'' if step is None else f'step {step}: '}{item.get('says', '')}", style="dim"))
    plan = row.get("plan")
    if isinstance(plan, dict):
        target = plan.get("target") or {}
        console.print(
            Text(
                f"    plan {plan.get('plan_id', '')}: back to step {target.get('step')}, skip {plan.get('skip_samples')}"
            )
        )
        for field, sentence in (plan.get("reasons") or {}).items():
            console.print(Text(f"      {field}: {sentence}", style="dim"))
    for item in row.get("timeline") or []:
        console.print(Text(f"    step {item.get('step')}: {item.get('state')}: {item.get('says', '')}"))
