"""What an operator is: the running side (:class:`Operator`) and the describing side (:class:`Function`).

A family of operators is one file in ``operators``. It names its functions; parser, types and compiler know none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

from trainwarden.rules.core.block import Block

from .series import Frame


class Type(Enum):
    """The type of an expression. Windows and vectors exist only as arguments of functions."""

    NUMBER = "a number"
    BOOLEAN = "a boolean"
    WINDOW = "a window"
    TRUTHS = "a window of booleans"
    VECTOR = "a vector"


class Operator:
    """One node of a program with the state it keeps between blocks. The base has no state.

    ``feed`` is called once a block with what its inputs gave for the same block; it changes none of them. Any cutting
    of a stream into blocks gives the same results: a value may depend on the records so far, never on the cut. Numpy's
    floating-point warnings are off while it runs.

    ``lazy``: it keeps nothing from block to block that it could not find again, and its result is fresh where one of its inputs is: it
    is left out of blocks in which nobody asks for it. ``sleeps``: of inputs that are unknown at every row it makes what is
    unknown at every row, and remembers nothing: while none of its signals was ever seen, it is not fed. ``of_parent``: it compares
    with the line that the start resumed from, and is not fed with a block without one, in which it is unknown. ``cost``: what a
    record costs it, beside others; only the order in which two sides of an ``and`` are tried hangs on it.
    """

    __slots__ = ()

    lazy: bool = False
    of_parent: bool = False
    sleeps: bool = False
    cost: int = 1

    def awake(self, block: Block) -> bool:
        """Say whether a node without inputs has anything to tell of this block, or had before. False only if it never had."""
        return True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Any:
        """Return the node's result for the block: a Series, a Vector or a View."""
        raise NotImplementedError

    def bounds(self, frame: Frame, inputs: Sequence[Any]) -> tuple[float, float] | None:
        """Return two finite numbers between which every row of the result lies, or None if that is not known cheaply.

        They say that every row is known. ``inputs`` are the bounds of numbers and the results of windows. Only a lazy node is asked.
        """
        return None

    def dump(self) -> Any:
        """Return the state as plain values (texts, finite numbers, lists, dicts), or None if there is none."""
        return None

    def load(self, state: Any) -> None:
        """Take up the state that ``dump`` returned."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A named constant of a function, within ``[low, high]``; ``default`` None means that it must be given.

    ``same_as`` names the setting whose value counts where this one is not given.
    """

    name: str
    default: float | None
    low: float
    high: float
    whole: bool = False
    same_as: str | None = None


Settings: TypeAlias = Mapping[str, Any]
Build: TypeAlias = Callable[[Type, Settings], Operator]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the language: its one argument's types, its result, its settings and how to make its operator.

    ``with_result_of`` names a function whose result for the same argument and settings the operator gets as a
    further input, so that both share one state; where it is named, a call on a window has neither settings nor it.

    ``of_parent``: the argument is computed over the line that the start resumed from. The operator gets its program as the setting
    ``program``, and the argument over the start's own records as an input only where it is ``"too"``.
    """

    name: str
    takes: tuple[Type, ...]
    gives: Type
    build: Build
    settings: tuple[Setting, ...] = ()
    with_result_of: str | None = None
    of_parent: Literal["", "alone", "too"] = ""
