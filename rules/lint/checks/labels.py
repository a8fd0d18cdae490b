"""What an alert says to people: a summary, a severity, a verdict."""

from __future__ import annotations

from collections.abc import Iterator

from trainwarden.rules.core.language import SEVERITIES
from trainwarden.rules.lint.subject import Context, Finding, Subject

NAMES = ("alert/severity", "alert/summary", "alert/verdict")


def check(subject: Subject, context: Context) -> Iterator[Finding]:
    """Yield what an alert does not say."""
    if subject.kind != "alert":
        return
    if not subject.annotations.get("summary", "").strip():
        says = "no annotation `summary`: people will read the alert's name and nothing else"
        yield subject.at_key("alert/summary", "warning", "alert", says)
    if "severity" not in subject.labels:
        says = f"no label `severity`: it counts as warning; write one of {', '.join(SEVERITIES)}"
        yield subject.at_key("alert/severity", "warning", "alert", says)
    if "verdict" not in subject.labels:
        says = "no label `verdict`: it offers no shape for its incidents"
        yield subject.at_key("alert/verdict", "information", "alert", says)
