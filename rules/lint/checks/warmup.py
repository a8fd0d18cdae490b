"""Rules that need more steps than a run has: nothing spans two starts, so a window begins empty at each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.language.syntax import Binary, Call, Tree, Window
from trainwarden.rules.core.language.windows import FULL
from trainwarden.rules.lint.subject import Context, Finding, Subject, children, parts, resolved, setting

NAMES = ("alert/for", "expr/window")


def check(subject: Subject, context: Context) -> Iterator[Finding]:
    """Yield windows longer than any run, warm-ups that no run lives to see, and a ``for`` that no run can meet."""
    longest = context.longest_run
    warm = warmup(subject.tree, subject)
    if warm > longest:
        says = (
            f"known only after {counted(warm, 'step')} of a start, and no run has more than {longest}: it stays unknown"
        )
        yield subject.at_expression("expr/window", "warning", subject.tree.at, says)
    else:
        for part in parts(subject.tree):
            if isinstance(part, Window) and part.steps + part.offset > longest:
                says = (
                    f"`{subject.text(part.at)}` looks back {part.steps + part.offset:g} steps, further than any run of "
                    f"{counted(longest, 'step')}"
                )
                yield subject.at_expression("expr/window", "warning", part.at, says)
    if subject.hold.unit != "seconds" and subject.hold.amount > longest:
        says = f"`for: {subject.hold}` is longer than any run of {counted(longest, 'step')}: the alert can never fire"
        yield subject.at_key("alert/for", "warning", "for", says)


def warmup(tree: Tree, subject: Subject) -> int:
    """Return after how many steps of a start an expression can be known at the earliest, with a record at every step."""
    tree = resolved(tree, subject)
    if isinstance(tree, Window):
        return int(tree.offset) + math.ceil(tree.steps / FULL) + warmup(tree.source, subject) - 1
    below = [warmup(child, subject) for child in children(tree)]
    if isinstance(tree, Call) and tree.name == "absent":
        return 1
    if isinstance(tree, Call) and tree.name in ("baseline", "zscore") and not isinstance(tree.arguments[0], Window):
        return max(6, math.ceil(setting(tree, "window", 1, 100.0) / FULL)) + below[0]
    if isinstance(tree, Binary) and tree.operator == "or":
        return min(below)
    return max(below, default=1)
