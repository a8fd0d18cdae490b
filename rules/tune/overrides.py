"""The rule file with the thresholds found: the same text, comments and all, with other numbers in it."""

from __future__ import annotations

from trainwarden.rules.core.counted import counted

from .threshold import RuleText, thresholds
from .tune import Tuned


def overriding(file: RuleText, tuned: Tuned, sensitive: bool = False) -> str:
    """Return the text of the file with thresholds for the wanted rate, and above it a note of what was changed.

    Rules that fire more often than wanted are made harder; with ``sensitive`` those that fire less often are made easier too.
    """
    lines = list(file.document.lines)
    places = thresholds(file)
    changed = []
    moves = []
    for found in tuned.rules:
        threshold = places.get(found.rule)
        if threshold is None or found.tuned is None or found.tuned == threshold.value:
            continue
        if (found.tuned > threshold.value) != threshold.rises and not sensitive:
            continue
        line, column = file.document.locate((*threshold.place, "expr"), threshold.at.first)
        written = threshold.expr[threshold.at.first : threshold.at.end]
        if lines[line - 1][column - 1 :].startswith(written):
            moves.append((line, column, written, f"{found.tuned:.9g}"))
            changed.append(f"#   {found.rule}: {threshold.value:g} -> {found.tuned:.9g}")
    for line, column, written, number in sorted(moves, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[: column - 1] + number + text[column - 1 + len(written) :]
    note = [
        f"# {file.source}, tuned by `trainwarden tune` on {counted(tuned.records, 'healthy record')} of {counted(tuned.starts, 'start')}, for at most",
        f"# {tuned.rate:g} firing{'' if tuned.rate == 1 else 's'} of a rule per 100,000 records."
        + (" Changed:" if changed else " Nothing had to be changed."),
        *changed,
    ]
    return "\n".join([*note, *lines]) + "\n"
