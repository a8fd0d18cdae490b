"""Values of expressions over recorded steps: what rule tests and tune look at besides alerts.

Expressions are compiled and computed by the rule language itself; here is only the way in for one that stands in no rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Block
from trainwarden.rules.core.language.compile import Builder, Program
from trainwarden.rules.core.language.errors import ExpressionError
from trainwarden.rules.core.language.operator import Type
from trainwarden.rules.core.language.parser import Parser
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.syntax import Tree
from trainwarden.rules.core.language.types import Checker, Names
from trainwarden.rules.rulefiles import rules_in
from trainwarden.rules.yamltext import load
from trainwarden.signals import BY_NAME, Signal


class Compiler:
    """Compiles expressions that may use the signals and recorded expressions of checked rule files."""

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._parser = Parser()
        self._builder = Builder()
        self.signals: dict[str, Signal] = dict(BY_NAME)
        self.own: set[str] = set()
        self._records: dict[str, int | None] = {}
        for text, source in texts:
            self._take_up(text, source)

    def _take_up(self, text: str, source: str) -> None:
        document = load(text, source)
        given = document.value.get("signals") or {}
        own = {name: Signal(name, "", "", "", labels=tuple(given[name]) if isinstance(given, dict) else ()) for name in given}  # fmt: skip
        self.signals.update(own)
        self.own |= set(own)
        records: dict[str, int | None] = {}
        names = Names({**BY_NAME, **own}, records, own=frozenset(own))
        for _, rule in rules_in(document):
            if "record" in rule:
                checker = Checker(self._builder, names)
                records[rule["record"]] = checker.check(self._parser.parse(rule["expr"]), (Type.NUMBER, Type.BOOLEAN))
        self._records.update(records)

    def parse(self, text: str) -> Tree:
        """Return the tree of an expression.

        Raises:
            ExpressionError: it is none.
        """
        return self._parser.parse(text)

    @property
    def records(self) -> list[str]:
        """Return the names of recorded expressions."""
        return list(self._records)

    def compile(self, *expressions: str) -> Program:
        """Return a program with one output an expression, each a number or a boolean.

        Raises:
            ExpressionError: the first thing that is wrong.
        """
        names = Names(self.signals, self._records, own=frozenset(self.own))
        outputs = []
        for expression in expressions:
            checker = Checker(self._builder, names)
            number = checker.check(self._parser.parse(expression), (Type.NUMBER, Type.BOOLEAN))
            if number is None:
                raise ExpressionError(checker.errors[0].offset, checker.errors[0].message)
            outputs.append(number)
        return self._builder.program(outputs)


def evaluate(program: Program, block: Block) -> list[Series]:
    """Return the outputs of a program over the whole of one start, whose first record begins the block."""
    frame = Frame.of(block)
    results: list[Any] = []
    with np.errstate(all="ignore"):  # infinities and NaN are values of the language
        for node, operator in zip(program.nodes, program.operators(), strict=True):
            results.append(operator.feed(frame, [results[of] for of in node.inputs]))
    return [results[output.truth] for output in program.outputs]
