"""One incident as `incidents show` prints it."""

from __future__ import annotations

import io

from rich.console import Console

from trainwarden.rules.report.terminal import incident_to_text


def test_a_moment_without_a_step_shows_none_and_what_is_skipped_is_a_range() -> None:
    row = {
        "id": "inc_1",
        "severity": "critical",
        "verdict": "divergence",
        "state": "acting",
        "attempt": 0,
        "onset_step": 90,
        "action": "rollback",
        "plan": {"plan_id": "p", "skip_samples": [[2732, 3116]], "skip_mode": "substitute"},
        "timeline": [
            {"time": 1.0, "step": None, "state": "acting", "says": "asked"},
            {"time": 1.0, "step": 90, "state": "confirmed", "says": "seen"},
        ],
    }
    out = io.StringIO()
    incident_to_text(row, Console(file=out, width=200, soft_wrap=True, no_color=True))
    text = out.getvalue()
    assert "None" not in text
    assert "      acting: asked\n" in text
    assert "      step 90: confirmed: seen\n" in text
    assert "skip samples [2732, 3116) (substitute)" in text


def test_the_runbooks_of_its_alerts_are_a_line_and_each_is_there_once() -> None:
    def said(*runbooks: str | None) -> str:
        rules = [{"alert": "A", "annotations": {} if one is None else {"runbook_url": one}} for one in runbooks]
        row = {"id": "inc_1", "severity": "warning", "verdict": "other", "state": "watching", "rules": rules}
        out = io.StringIO()
        incident_to_text({**row, "alerts": ["A"]}, Console(file=out, width=200, soft_wrap=True, no_color=True))
        return out.getvalue()

    assert "    runbooks: docs/rules/A.md, https://x/B\n" in said(
        "docs/rules/A.md", "https://x/B", "docs/rules/A.md", None
    )
    assert "runbooks" not in said(None)
    assert "runbooks" not in said()
