"""The checks, one kind a file. A check is a function from a rule to findings; ``docs/checks.md`` has a section for each name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainwarden.rules.lint.subject import Context, Finding, Subject

from . import labels, limits, names, unknown, warmup

Check = Callable[[Subject, Context], Iterator[Finding]]

#: All checks in the order in which they look at a rule.
CHECKS: tuple[Check, ...] = (
    limits.check,
    unknown.check,
    warmup.check,
    labels.check,
    names.check,
)

#: The names that findings carry and that a comment can switch off.
NAMES: tuple[str, ...] = tuple(sorted({*limits.NAMES, *unknown.NAMES, *warmup.NAMES, *labels.NAMES, *names.NAMES}))
