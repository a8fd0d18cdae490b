"""Names that collide, rules that say the same thing twice, and recorded expressions that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

from trainwarden.rules.core.language.syntax import Selector
from trainwarden.rules.lint.subject import Context, Finding, Subject, parts

NAMES = ("rule/duplicate", "rule/same", "rule/unused")


def check(subject: Subject, context: Context) -> Iterator[Finding]:
    """Yield an alert whose name or expression an earlier one has, and a recorded expression without a reader."""
    if subject.kind == "record":
        if not any(_reads(other, subject.name) for other in context.subjects if other.document is subject.document):
            says = (
                f"{subject.name} is used by no rule of this file, and recorded expressions are seen in their file alone"
            )
            yield subject.at_key("rule/unused", "information", "record", says)
        return
    for other in context.subjects:
        if other is subject:
            return
        if other.kind != "alert":
            continue
        line = other.document.key_position((*other.place, "alert"))[0]
        where = f"{other.document.source}:{line}"
        if other.name == subject.name:
            says = f"alert {subject.name} is in {where} too: the two files cannot be used together"
            yield subject.at_key("rule/duplicate", "warning", "alert", says)
        elif other.tree == subject.tree and other.hold == subject.hold and other.records == subject.records:
            says = f"the same expression as {other.name} in {where}"
            yield subject.at_key("rule/same", "information", "expr", says)


def _reads(subject: Subject, name: str) -> bool:
    return any(isinstance(part, Selector) and part.name == name for part in parts(subject.tree))
