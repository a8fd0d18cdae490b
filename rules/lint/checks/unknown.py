"""Comparisons that are unknown at every step: windows too small for what is asked of them, signals that nobody records."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from trainwarden.rules.core.language.syntax import Call, Selector, Window
from trainwarden.rules.lint.subject import Context, Finding, Subject, parts
from trainwarden.signals import BY_NAME

NAMES = ("expr/unknown", "expr/unrecorded")

#: Functions of a window that need more than one value.
LEAST = MappingProxyType({"stddev": 2, "slope": 2, "slope_t": 3, "zscore": 3})


def check(subject: Subject, context: Context) -> Iterator[Finding]:
    """Yield calls that can never have enough values, and signals that come from others' logs alone."""
    said = set()
    for part in parts(subject.tree):
        if isinstance(part, Call) and part.name in LEAST:
            window = part.arguments[0]
            if isinstance(window, Window) and window.steps < LEAST[part.name]:
                says = (
                    f"`{subject.text(part.at)}` is unknown at every step: {part.name} needs {LEAST[part.name]} values and the "
                    f"window holds {window.steps:g}"
                )
                yield subject.at_expression("expr/unknown", "warning", part.at, says)
        signal = BY_NAME.get(part.name) if isinstance(part, Selector) else None
        if signal is not None and not signal.probed and signal.name not in said:
            said.add(signal.name)
            says = (
                f"the exporter does not record {signal.name}: the expression is unknown but for logs of other programs that "
                "have it"
            )
            yield subject.at_expression("expr/unrecorded", "information", part.at, says)
