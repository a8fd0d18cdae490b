"""The one number of a rule that is moved: the plain number of its only comparison with one, or of the first that all depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwarden.rules.core.language.parser import Parser
from trainwarden.rules.core.language.syntax import Binary, Call, Negative, Not, Number, Option, Span, Tree, Window
from trainwarden.rules.rulefiles import rules_in
from trainwarden.rules.yamltext import Document, Path, load

_ORDERED = frozenset({"<", "<=", ">", ">="})
#: Functions that count steps.
_COUNTS = frozenset({"changes", "count", "period", "streak"})


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number in a rule's expression. ``rises``: the greater it is, the less often the expression holds.

    ``compares`` is the comparison in words, ``of`` how many numbers the rule compares with.
    """

    rule: str
    place: Path
    expr: str
    at: Span
    value: float
    rises: bool
    compares: str
    of: int

    def put(self, text: str) -> str:
        """Return the expression with another number."""
        return f"{self.expr[: self.at.first]}{text}{self.expr[self.at.end :]}"


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule file as text, with its document."""

    text: str
    source: str
    document: Document

    @classmethod
    def of(cls, text: str, source: str) -> RuleText:
        """Return the text of a checked rule file."""
        return cls(text, source, load(text, source))


def thresholds(file: RuleText) -> dict[str, Threshold]:
    """Return the thresholds of the alerts that have one, by alert.

    Of several numbers it is that of the first part of an ``and`` which compares with one: without that part the rule cannot fire. A
    count of steps is no such part: it says for how long, not how much.
    """
    parser = Parser()
    found = {}
    for place, rule in rules_in(file.document):
        if "alert" not in rule:
            continue
        tree = parser.parse(rule["expr"])
        candidates = list(_numbers(tree, True))
        chosen = candidates if len(candidates) == 1 else [one for part in _needed(tree) for one in _own(part)]
        if chosen:
            whole, at, value, rises = chosen[0]
            words = " ".join(rule["expr"][whole.first : whole.end].split())
            found[rule["alert"]] = Threshold(
                rule["alert"], place, rule["expr"], at, value, rises, words, len(candidates)
            )
    return found


def _needed(tree: Tree) -> Iterator[Tree]:
    """Yield the parts without which an expression cannot hold."""
    if isinstance(tree, Binary) and tree.operator in ("and", "unless"):
        yield from _needed(tree.left)
        if tree.operator == "and":
            yield from _needed(tree.right)
    else:
        yield tree


def _own(tree: Tree) -> Iterator[tuple[Span, Span, float, bool]]:
    """Yield the number that a comparison itself has, unless it is one of steps."""
    if not isinstance(tree, Binary) or tree.operator not in _ORDERED:
        return
    other = tree.right if _plain(tree.right) is None else tree.left
    if not isinstance(other, Call) or other.name not in _COUNTS:
        yield from list(_numbers(tree, True))[:1]


def _numbers(tree: Tree | Option, rises: bool) -> Iterator[tuple[Span, Span, float, bool]]:
    """Yield each plain number on one side of a comparison. Under ``not``, what made it rarer makes it more frequent."""
    match tree:
        case Not():
            yield from _numbers(tree.operand, not rises)
        case Binary() if tree.operator in _ORDERED and (_plain(tree.left) is None) != (_plain(tree.right) is None):
            left = _plain(tree.left)
            bound, value = (tree.right, _plain(tree.right)) if left is None else (tree.left, left)
            greater = tree.operator in (">", ">=")
            assert value is not None
            yield tree.at, bound.at, value, (greater == (left is None)) == rises
            yield from _numbers(tree.left if left is None else tree.right, rises)
        case Binary():
            yield from _numbers(tree.left, rises)
            yield from _numbers(tree.right, rises if tree.operator != "unless" else not rises)
        case Call():
            for argument in tree.arguments:
                yield from _numbers(argument, rises)
        case Window():
            yield from _numbers(tree.source, rises)
        case Negative():
            yield from _numbers(tree.operand, rises)


def _plain(tree: Tree) -> float | None:
    if isinstance(tree, Number):
        return tree.value
    return -tree.operand.value if isinstance(tree, Negative) and isinstance(tree.operand, Number) else None
