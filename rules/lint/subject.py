"""What a check looks at, one rule with its tree, and what it returns, findings with their place in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trainwarden.rules.core.alerts import Hold
from trainwarden.rules.core.language.syntax import (
    Binary,
    By,
    Call,
    Negative,
    Not,
    Number,
    Option,
    Selector,
    Span,
    Tree,
    Window,
)
from trainwarden.rules.yamltext import Document, Path, Problem

Severity = Literal["warning", "information"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something suspicious at a place of a file, found by the check of this name."""

    check: str
    severity: Severity
    rule: str
    problem: Problem

    def __str__(self) -> str:
        first, *rest = str(self.problem).split("\n", 1)
        return "\n".join([f"{first} ({self.severity}, {self.check})", *rest])


@dataclass(frozen=True, slots=True)
class Subject:
    """One rule of a checked file. ``records`` are the trees of the file's recorded expressions by name."""

    document: Document
    place: Path
    kind: Literal["alert", "record"]
    name: str
    expr: str
    tree: Tree
    hold: Hold
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    records: Mapping[str, Tree]
    own: frozenset[str]

    def text(self, at: Span) -> str:
        """Return what stands in the expression at a place, on one line."""
        return " ".join(self.expr[at.first : at.end].split())

    def at_expression(self, check: str, severity: Severity, at: Span, says: str) -> Finding:
        """Return a finding about a part of the expression."""
        place = self.document.locate((*self.place, "expr"), at.first)
        return Finding(check, severity, self.name, self.document.problem(place, says))

    def at_key(self, check: str, severity: Severity, key: str, says: str) -> Finding:
        """Return a finding about one of the rule's keys."""
        place = self.document.key_position((*self.place, key))
        return Finding(check, severity, self.name, self.document.problem(place, says))


@dataclass(frozen=True, slots=True)
class Context:
    """All rules that are checked together, and how many steps the longest start of a run has."""

    subjects: tuple[Subject, ...]
    longest_run: int


def children(tree: Tree) -> Iterator[Tree]:
    """Yield the trees directly below one; settings of a call are none."""
    match tree:
        case Binary():
            yield tree.left
            yield tree.right
        case Negative() | Not():
            yield tree.operand
        case Window():
            yield tree.source
        case By():
            yield tree.selector
        case Call():
            for argument in tree.arguments[:1]:
                if not isinstance(argument, Option):
                    yield argument


def parts(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and all below it, the whole first."""
    yield tree
    for child in children(tree):
        yield from parts(child)


def setting(call: Call, name: str, place: int, default: float) -> float:
    """Return a setting of a call, given by name or at a place behind the argument (from 1)."""
    for index, argument in enumerate(call.arguments):
        value = argument.value if isinstance(argument, Option) and argument.name == name else None
        if value is None and index == place and not isinstance(argument, Option):
            value = argument
        if isinstance(value, Number):
            return value.value
    return default


def resolved(tree: Tree, subject: Subject) -> Tree:
    """Return the expression that a name stands for, or the tree itself."""
    while isinstance(tree, Selector) and tree.name in subject.records:
        tree = subject.records[tree.name]
    return tree
