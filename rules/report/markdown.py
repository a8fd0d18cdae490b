"""The report of an incident in Markdown: for a ticket, a chat, a repository of post-mortems.

Whatever came from a run is escaped, so that it is text wherever the Markdown is shown: no markup, no link, no image, no HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from . import words
from .dossier import Dossier, dossier

#: What Markdown, GitHub's tables and HTML read as markup.
_MARKUP = re.compile(r"([\\`*_\[\]<>#!|~&$@])")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: What is linked without any markup: an address, and www.
_ADDRESS = re.compile(r"(?i)(https?|ftp|mailto|www)([:.])")


def text(value: Any) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    plain = _CONTROLS.sub("\ufffd", " ".join(str(value).split()))
    plain = _MARKUP.sub(r"\\\1", plain)
    plain = _ADDRESS.sub(lambda found: f"{found[1]}\u200b{found[2]}", plain)
    plain = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", plain)  # no item of a list
    return re.sub(r"^([-+=])", r"\\\1", plain)


def code(value: Any) -> str:
    """Return a text as code, whatever backticks it holds."""
    plain = _CONTROLS.sub("\ufffd", " ".join(str(value).split()))
    fence = "`" * (max((len(run) for run in re.findall("`+", plain)), default=0) + 1)
    room = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{room}{plain}{room}{fence}"


def to_markdown(row: dict[str, Any]) -> str:
    """Return the report of an incident's row."""
    one = dossier(row)
    parts = [
        f"# {text(words.title(row))} in {text(row.get('run') or 'run')}, step {words.step(row.get('onset_step'))}",
        _lead(one, row),
    ]
    parts += _section(
        "What it was",
        _table(("", "", ""), one.numbers),
        [text(one.unknown)] if one.unknown else [],
        [text(one.order)] if one.order else [],
    )
    parts += _section("Evidence", _causes(one))
    parts += _section("Triage, from cheap to dear", *_stages(one))
    parts += _section("Samples", _items(one.samples), [f"- {code(command)}" for command in one.commands])
    parts += _section("Plan", _table(("field", "value", "why"), one.plan), _gates(one))
    parts += _section(
        "Verified",
        [text(one.verified)] if one.verified else [],
        _table(("window", "steps", "what was seen"), one.windows),
        _table(("check", "holds", "what was seen"), one.checks),
    )
    parts += _section("Cost", _items(one.cost))
    parts += _section(
        "What would have prevented it", [f"- **{text(what)}**: {text(says)}" for what, says in one.prevention]
    )
    parts += _section("Timeline", _table(("time (UTC)", "step", "state", "what"), one.timeline))
    return "\n\n".join(part for part in parts if part) + "\n"


def reports_of(reports: Sequence[dict[str, Any]]) -> str:
    """Return the reports of all incidents above information of several replayed runs, one behind the other."""
    parts = []
    for one in reports:
        rows = [row for row in words.ordered(one.get("incidents") or []) if row.get("severity") != "info"]
        if rows:
            parts += [to_markdown(row) for row in rows]
        else:
            parts.append(
                f"# {text(one.get('run') or one.get('source') or 'run')}\n\n{text(words.verdict_of_run(one))}\n"
            )
    return "\n".join(parts)


def _lead(one: Dossier, row: dict[str, Any]) -> str:
    lines = [f"**{text(one.sentence)}** {text(words.state_of(row))}"]
    if row.get("summary"):
        lines.append(text(row["summary"]))
    lines.append(text(one.decision) + (f" **{text(one.todo)}**" if one.todo else ""))
    lines.append("\n".join(_table(("", ""), [*one.head, ("incident", str(row.get("id") or ""))])))
    return "\n\n".join(lines)


def _causes(one: Dossier) -> list[str]:
    found = []
    for cause in one.causes:
        found.append(f"**{text(cause.name)}** ({cause.score:.2f})")
        found += [f"- for it ({weight:.2f}): {text(says)}" for says, weight in cause.speaks_for]
        found += [f"- against it ({weight:.2f}): {text(says)}" for says, weight in cause.against]
        found.append("")
    if one.explained:
        found += [text(one.explained), ""]
    if one.seen:
        found += ["Also seen:", ""]
        found += [f"- {f'step {words.step(at)}: ' if at is not None else ''}{text(says)}" for at, says in one.seen]
        found.append("")
    if one.test:
        found.append(f"Cheapest test: {text(one.test)}")
    return found


def _stages(one: Dossier) -> list[list[str]]:
    rows = [(stage, check.name, check.words, check.says) for stage, checks in one.triage for check in checks]
    return [_table(("stage", "check", "outcome", "what was seen"), rows)]


def _gates(one: Dossier) -> list[str]:
    return [*_table(("gate", "answer", "why"), one.gates), *([f"\n{text(one.open_gates)}"] if one.open_gates else [])]


def _section(title: str, *blocks: Sequence[str]) -> list[str]:
    filled = ["\n".join(block).strip("\n") for block in blocks if block]
    return [f"## {title}", *filled] if filled else []


def _items(lines: Iterable[str]) -> list[str]:
    return [f"- {text(line)}" for line in lines]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return [*lines, *(f"| {' | '.join(text(cell) for cell in row)} |" for row in rows)]
