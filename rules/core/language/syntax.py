"""What an expression says, before anybody asks whether it makes sense: the tree that the parser returns.

Every node knows where it stands in the expression's text (``first`` and ``end``, offsets of characters); places do not
count when two trees are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``[first, end)`` of an expression's text."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Number:
    """A literal such as ``1.5``."""

    value: float
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Matcher:
    """``label="value"`` within a selector's braces; ``operator`` is ``=`` where it is right."""

    label: str
    operator: str
    value: str
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Selector:
    """A signal or a recorded expression by its name: ``grad_norm{group="embedding"}``."""

    name: str
    matchers: tuple[Matcher, ...]
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class By:
    """A vector: ``loss by rank``."""

    selector: Selector
    label: str
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of an expression that end at or before the current one: ``loss[200] offset 20``."""

    source: Tree
    steps: float
    offset: float
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Option:
    """A named constant of a call: ``beta=0.98``."""

    name: str
    value: Tree
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments; named options stand behind the others."""

    name: str
    arguments: tuple[Tree | Option, ...]
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Negative:
    """Unary minus."""

    operand: Tree
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """Logical negation."""

    operand: Tree
    at: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """Two operands and one of ``or and unless < <= > >= == != + - * / % ^``."""

    operator: str
    left: Tree
    right: Tree
    at: Span = field(compare=False)


Tree: TypeAlias = Number | Selector | By | Window | Call | Negative | Not | Binary
