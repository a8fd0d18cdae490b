"""Between which limits an expression lies, as far as its text says, and so which comparisons never or always hold.

Only what is certain: an unknown function has no limits. NaN and unknown are left out, since no comparison holds for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainwarden.rules.core.language.syntax import (
    Binary,
    By,
    Call,
    Negative,
    Not,
    Number,
    Option,
    Selector,
    Tree,
    Window,
)

from .subject import Subject, resolved, setting

Truth = Literal["never", "always", "maybe"]

COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})
#: Functions whose result lies where their argument does, and is finite.
_WITHIN = frozenset({"baseline", "ema", "max", "mean", "median", "min", "quantile"})
_AT_LEAST_ZERO = frozenset({"disagree", "mad", "mad_over", "nonfinite_over", "spread", "stddev", "twins"})
#: Signals that may be negative; all others of the table are sizes, counts and rates.
_SIGNED = frozenset({"attention_logit", "loss", "rank_loss"})
#: Shares of a whole.
_SHARES = frozenset({"batch_unique_token_ratio", "beta2", "grad_zero_ratio"})


@dataclass(frozen=True, slots=True)
class Range:
    """All values lie in ``[low, high]``; ``finite`` says that none is NaN or infinite."""

    low: float = -math.inf
    high: float = math.inf
    finite: bool = False

    def __str__(self) -> str:
        if self.low == self.high:
            return f"always {self.low:g}"
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if math.isinf(self.low) else f"between {self.low:g} and {self.high:g}"


def range_of(tree: Tree, subject: Subject) -> Range:
    """Return the range of a number."""
    tree = resolved(tree, subject)
    match tree:
        case Number():
            return Range(tree.value, tree.value, True)
        case Selector():
            return _signal(tree.name, subject)
        case By():
            return _signal(tree.selector.name, subject)
        case Window():
            return range_of(tree.source, subject)
        case Negative():
            of = range_of(tree.operand, subject)
            return Range(-of.high, -of.low, of.finite)
        case Call():
            return _call(tree, subject)
        case Binary() if tree.operator not in COMPARISONS:
            return _arithmetic(tree, subject)
    return Range()


def _signal(name: str, subject: Subject) -> Range:
    if name in _SIGNED or name in subject.own:
        return Range()
    return Range(0.0, 1.0 if name in _SHARES else math.inf)


def _call(call: Call, subject: Subject) -> Range:
    if not call.arguments:
        return Range(low=0.0, finite=True)
    argument = call.arguments[0]
    if isinstance(argument, Option):
        return Range()
    if call.name in _WITHIN:
        of = range_of(argument, subject)
        return Range(of.low, of.high, True)
    if call.name in ("max_over", "min_over"):
        return range_of(argument, subject)
    if call.name in _AT_LEAST_ZERO or call.name == "argmax":
        return Range(low=0.0, finite=True)
    if call.name in ("count", "changes") and isinstance(argument, Window):
        never = call.name == "count" and truth_of(argument.source, subject) == "never"
        return Range(0.0, 0.0 if never else argument.steps, True)
    if call.name == "streak":
        return Range(0.0, 0.0 if truth_of(argument, subject) == "never" else math.inf, True)
    if call.name == "period":
        longest = setting(call, "window", 1, 20000.0)
        return Range(0.0, 0.0 if truth_of(argument, subject) == "never" else longest, True)
    if call.name == "abs":
        of = range_of(argument, subject)
        low = 0.0 if of.low <= 0 <= of.high else min(abs(of.low), abs(of.high))
        return Range(low, max(abs(of.low), abs(of.high)), of.finite)
    if call.name == "log2":
        of = range_of(argument, subject)
        return Range(_log2(of.low), _log2(of.high))
    return Range()


def _log2(value: float) -> float:
    return -math.inf if value <= 0 else math.log2(value) if value < math.inf else value


def _arithmetic(tree: Binary, subject: Subject) -> Range:
    left, right = range_of(tree.left, subject), range_of(tree.right, subject)
    finite = left.finite and right.finite
    match tree.operator:
        case "+":
            return Range(left.low + right.low, left.high + right.high, finite)
        case "-":
            return Range(left.low - right.high, left.high - right.low, finite)
        case "*":
            return _corners(left, right, lambda a, b: 0.0 if 0 in (a, b) else a * b, finite)
        case "/" if right.low > 0:
            return _corners(left, right, lambda a, b: 0.0 if math.isinf(b) else a / b, finite)
        case "/" if right.low >= 0 and left.low >= 0:
            return Range(low=0.0)
    return Range()


def _corners(left: Range, right: Range, by: Callable[[float, float], float], finite: bool) -> Range:
    found = [by(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    return Range(min(found), max(found), finite)


def truth_of(tree: Tree, subject: Subject) -> Truth:
    """Say whether a boolean never or always holds where it is known."""
    tree = resolved(tree, subject)
    match tree:
        case Not():
            return _opposite(truth_of(tree.operand, subject))
        case Call() if tree.name in ("isnan", "isinf") and not isinstance(tree.arguments[0], Option):
            return "never" if range_of(tree.arguments[0], subject).finite else "maybe"
        case Binary() if tree.operator in COMPARISONS:
            return _comparison(tree, subject)
        case Binary() if tree.operator in ("and", "or", "unless"):
            left, right = truth_of(tree.left, subject), truth_of(tree.right, subject)
            if tree.operator == "unless":
                right = _opposite(right)
            if tree.operator == "or":
                return "always" if "always" in (left, right) else "never" if left == right == "never" else "maybe"
            return "never" if "never" in (left, right) else "always" if left == right == "always" else "maybe"
    return "maybe"


def _opposite(truth: Truth) -> Truth:
    return "always" if truth == "never" else "never" if truth == "always" else "maybe"


def _comparison(tree: Binary, subject: Subject) -> Truth:
    if resolved(tree.left, subject) == resolved(tree.right, subject):
        return "always" if tree.operator in ("==", "<=", ">=") else "never"
    left, right = range_of(tree.left, subject), range_of(tree.right, subject)
    match tree.operator:
        case "<":
            return _ordered(left.high < right.low, left.low >= right.high)
        case "<=":
            return _ordered(left.high <= right.low, left.low > right.high)
        case ">":
            return _ordered(left.low > right.high, left.high <= right.low)
        case ">=":
            return _ordered(left.low >= right.high, left.high < right.low)
        case "==":
            return _ordered(False, left.high < right.low or left.low > right.high)
    return _ordered(left.high < right.low or left.low > right.high, False)


def _ordered(always: bool, never: bool) -> Truth:
    return "never" if never else "always" if always else "maybe"
