"""Comparisons that never hold and comparisons that always do, and alerts that so never or always fire."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwarden.rules.core.language.syntax import Binary, Call, Number, Tree, Window
from trainwarden.rules.lint.ranges import COMPARISONS, range_of, truth_of
from trainwarden.rules.lint.subject import Context, Finding, Subject, parts, resolved

NAMES = ("expr/always", "expr/never")
_FLIPPED = (("<", ">"), ("<=", ">="), (">", "<"), (">=", "<="), ("==", "=="), ("!=", "!="))


def check(subject: Subject, context: Context) -> Iterator[Finding]:
    """Yield each comparison or question that is decided by its text, and each pair that excludes each other."""
    whole = {"never": ": the alert can never fire", "always": ": the alert fires all the time", "maybe": ""}
    ends = whole[truth_of(subject.tree, subject)] if subject.kind == "alert" else ""
    said = False
    counted = {id(part.source) for part in parts(subject.tree) if isinstance(part, Window)}
    for part in parts(subject.tree):
        compares = isinstance(part, Binary) and part.operator in COMPARISONS
        asks = isinstance(part, Call) and part.name in ("isnan", "isinf")
        truth = truth_of(part, subject) if compares or asks else "maybe"
        # count((x >= 0)[100]) says how often x was measured: meant.
        if truth == "never" or (truth == "always" and id(part) not in counted):
            said = True
            says = f"`{subject.text(part.at)}` {truth} holds: {_why(part, subject)}{ends}"
            yield subject.at_expression(f"expr/{truth}", "warning", part.at, says)
    if said:
        return
    for part in parts(subject.tree):
        if isinstance(part, Binary) and part.operator == "and":
            excluded = _excluded(part, subject)
            if excluded is not None:
                yield subject.at_expression("expr/never", "warning", part.at, excluded)
                return


def _why(part: Tree, subject: Subject) -> str:
    if isinstance(part, Call):
        return "an average and a window leave out what is not finite; ask the signal itself"
    assert isinstance(part, Binary)
    if resolved(part.left, subject) == resolved(part.right, subject):
        nan = "; for NaN use isnan(x)" if part.operator == "!=" else ""
        return f"both sides are the same{nan}"
    left, right = range_of(part.left, subject), range_of(part.right, subject)
    side, limits = (part.right, right) if isinstance(part.left, Number) else (part.left, left)
    return f"{subject.text(side.at)} is {limits}"


def _conjuncts(tree: Tree) -> Iterator[Tree]:
    if isinstance(tree, Binary) and tree.operator == "and":
        yield from _conjuncts(tree.left)
        yield from _conjuncts(tree.right)
    else:
        yield tree


def _excluded(tree: Binary, subject: Subject) -> str | None:
    """Return why the parts of an ``and`` cannot hold together: limits of one number that leave nothing between them."""
    limits: dict[Tree, list[tuple[float, bool]]] = {}
    for part in _conjuncts(tree):
        if not isinstance(part, Binary) or part.operator not in COMPARISONS:
            continue
        number, operator, bound = part.left, part.operator, part.right
        if isinstance(number, Number):
            number, operator, bound = bound, dict(_FLIPPED)[operator], number
        if not isinstance(bound, Number):
            continue
        low, high = limits.setdefault(resolved(number, subject), [(-math.inf, False), (math.inf, True)])
        if operator in (">", ">=", "=="):
            low = max(low, (bound.value, operator == ">"))
        if operator in ("<", "<=", "=="):
            high = min(high, (bound.value, operator != "<"))
        limits[resolved(number, subject)] = [low, high]
        # The second of each pair says whether the limit itself is left out (low) or allowed (high).
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1])):
            return f"{subject.text(number.at)} cannot be both: nothing lies between {low[0]:g} and {high[0]:g}"
    return None
