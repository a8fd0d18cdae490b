"""From a tree to typed nodes: every name is known, every argument has the type that its function takes.

All errors of an expression are found, not only the first; what follows from an error already reported is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwarden.rules.core.resumed import REMEMBERED
from trainwarden.signals import LABEL_VALUES, SIGNALS, Signal

from .compile import Builder
from .elsewhere import INSTEAD
from .errors import ExpressionError, did_you_mean, nearest
from .operator import Function, Setting, Type
from .operators import FUNCTIONS
from .syntax import Binary, By, Call, Matcher, Negative, Not, Number, Option, Selector, Span, Tree, Window
from .windows import LONGEST

_COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})
# Labels whose values are the user's own: optimizer parameter groups, sources of data.
_OPEN = frozenset({("lr", "group"), ("source_share", "source")})


@dataclass(slots=True)
class Names:
    """What a name in an expression can mean.

    ``records`` maps a recorded expression to its node, or to None if it has an error of its own; ``later`` are those that
    the file defines further down.
    """

    signals: Mapping[str, Signal]
    records: dict[str, int | None] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    own: frozenset[str] = frozenset()


class Checker:
    """Checks one expression after the other into the same builder. ``errors`` holds what was wrong with the last."""

    def __init__(self, builder: Builder, names: Names) -> None:
        self._builder = builder
        self._names = names
        self.errors: list[ExpressionError] = []

    def check(self, tree: Tree, wanted: tuple[Type, ...]) -> int | None:
        """Return the node of the whole expression, which must have a wanted type; None if there are errors."""
        self.errors = []
        number = self._any(tree)
        if number is not None and self._type(number) not in wanted:
            self._wrong(tree.at, f"the expression is {self._type(number).value}{self._advice(number, wanted, tree)}")
        elif number is not None and not self._builder.nodes[number].reads:
            self._wrong(tree.at, "the expression reads no signal: it can never change")
        elif number is not None and self._builder.nodes[number].clock and self._builder.mixes(number):
            self._wrong(
                tree.at,
                "idle() and budget() count seconds between records: no signal, window or other function goes with them",
            )
        return None if self.errors else number

    def _type(self, number: int) -> Type:
        return self._builder.nodes[number].type

    def _wrong(self, at: Span, message: str) -> None:
        self.errors.append(ExpressionError(at.first, message))

    def _any(self, tree: Tree) -> int | None:
        match tree:
            case Number():
                return self._builder.add("number", (), Type.NUMBER, (("value", tree.value),))
            case Selector():
                return self._selector(tree)
            case By():
                return self._members(tree)
            case Window():
                return self._window(tree)
            case Call():
                return self._call(tree)
            case Negative():
                return self._negative(tree)
            case Not():
                operand = self._of(tree.operand, Type.BOOLEAN, "not")
                return None if operand is None else self._builder.negate(operand)
        return self._binary(tree)

    def _of(self, tree: Tree, wanted: Type, operator: str) -> int | None:
        number = self._any(tree)
        if number is None or self._type(number) is wanted:
            return number
        advice = self._advice(number, (wanted,), tree)
        self._wrong(tree.at, f"{operator} takes {wanted.value}, but this is {self._type(number).value}{advice}")
        return None

    def _advice(self, number: int, wanted: tuple[Type, ...], tree: Tree) -> str:
        found = self._type(number)
        if found is Type.NUMBER and wanted == (Type.BOOLEAN,):
            return ": compare it, as in loss > 5"
        if found is Type.WINDOW:
            return ": put it into a function, as in mean(loss[200])"
        if found is Type.TRUTHS:
            return ": put it into a function, as in count((loss > 5)[200])"
        if found is Type.VECTOR:
            return ": put it into a function, as in spread(loss by rank)"
        if found is Type.NUMBER and isinstance(tree, Selector) and Type.WINDOW in wanted:
            return f": write {tree.name}[200]"
        return ""

    def _negative(self, tree: Negative) -> int | None:
        operand = self._of(tree.operand, Type.NUMBER, "-")
        if operand is None:
            return None
        node = self._builder.nodes[operand]
        if node.name == "number":
            return self._builder.add("number", (), Type.NUMBER, (("value", -dict(node.parameters)["value"]),))
        return self._builder.add("negative", (operand,), Type.NUMBER)

    def _binary(self, tree: Binary) -> int | None:
        operator = tree.operator
        if operator in ("or", "and", "unless"):
            left, right = self._of(tree.left, Type.BOOLEAN, operator), self._of(tree.right, Type.BOOLEAN, operator)
            if left is None or right is None:
                return None
            if operator == "unless":
                right = self._builder.negate(right)
            return self._builder.add("or" if operator == "or" else "and", (left, right), Type.BOOLEAN)
        comparison = operator in _COMPARISONS
        if (
            comparison
            and isinstance(tree.left, Binary)
            and tree.left.operator in _COMPARISONS
            and not self._closed(tree)
        ):
            self._wrong(tree.at, "comparisons cannot be chained: write a < b and b < c")
            return None
        left, right = self._of(tree.left, Type.NUMBER, operator), self._of(tree.right, Type.NUMBER, operator)
        if left is None or right is None:
            return None
        return self._builder.add(operator, (left, right), Type.BOOLEAN if comparison else Type.NUMBER)

    @staticmethod
    def _closed(tree: Binary) -> bool:
        """Say whether the left side stands in parentheses, so that it is no chain."""
        return tree.at.first < tree.left.at.first

    def _window(self, tree: Window) -> int | None:
        errors = len(self.errors)
        if tree.steps != int(tree.steps) or tree.steps < 1:
            self._wrong(tree.at, f"a window has a whole number of steps, at least 1, not {tree.steps:g}")
        elif tree.offset != int(tree.offset):
            self._wrong(tree.at, f"an offset is a whole number of steps, not {tree.offset:g}")
        elif tree.steps + tree.offset > LONGEST:
            self._wrong(tree.at, f"a window and its offset reach back at most {LONGEST} steps")
        source = self._any(tree.source)
        if source is None or len(self.errors) > errors:
            return None
        node = self._builder.nodes[source]
        if node.type not in (Type.NUMBER, Type.BOOLEAN):
            self._wrong(tree.source.at, f"a window is of a number or a boolean, but this is {node.type.value}")
            return None
        if not node.reads:
            self._wrong(tree.source.at, "a window of a constant: it never changes")
            return None
        return self._builder.window(source, int(tree.steps), int(tree.offset))

    # -- names ---------------------------------------------------------------------------------------------------

    def _selector(self, tree: Selector) -> int | None:
        name = tree.name
        if name in self._names.records:
            if tree.matchers:
                self._wrong(tree.matchers[0].at, f"{name} is a recorded expression and has no labels")
                return None
            return self._names.records[name]
        signal = self._signal(tree)
        if signal is None:
            return None
        given = self._matched(signal, tree.matchers)
        if given is None:
            return None
        values, parts = [], False
        for label in signal.labels:
            value = given.get(label)
            if value is None:
                known = self._values(signal, label)
                if known and "all" not in known:
                    if signal.type != "counter":
                        listed = ", ".join(f'{name}{{{label}="{one}"}}' for one in known)
                        self._wrong(tree.at, f"{name} has no total over {label}: write one of {listed}")
                        return None
                    parts = True
                value = "all"
            values.append(value)
        return self._builder.add("signal", (), Type.NUMBER, (("key", (name, *values)), ("parts", parts)))

    def _members(self, tree: By) -> int | None:
        selector, label = tree.selector, tree.label
        if selector.name in self._names.records:
            self._wrong(tree.at, f"{selector.name} is a recorded expression: only a signal can be split by {label}")
            return None
        signal = self._signal(selector)
        if signal is None:
            return None
        if label == "rank":
            if selector.matchers:
                self._wrong(selector.matchers[0].at, "a signal by rank has no labels")
                return None
            if signal.labels and f"rank_{signal.name}" not in self._names.signals:
                self._wrong(tree.at, f"{signal.name} is not recorded by rank")
                return None
            return self._vector((signal.name,), 0, ())
        if label not in signal.labels:
            has = "by rank" + "".join(f" or by {one}" for one in signal.labels)
            hint = did_you_mean(label, ["rank", *signal.labels])
            self._wrong(tree.at, f"{signal.name} has no label {label!r}: it can be split {has}{hint}")
            return None
        given = self._matched(signal, selector.matchers)
        if given is None:
            return None
        if label in given:
            self._wrong(selector.at, f"{label} is fixed in the braces: it cannot be split by as well")
            return None
        missing = [one for one in signal.labels if one != label and one not in given]
        needed = [one for one in missing if (known := self._values(signal, one)) and "all" not in known]
        if needed:
            self._wrong(selector.at, f'{signal.name} needs {needed[0]}: write {signal.name}{{{needed[0]}="…"}}')
            return None
        key = (signal.name, *("" if one == label else given.get(one, "all") for one in signal.labels))
        return self._vector(key, 1 + signal.labels.index(label), self._values(signal, label))

    def _vector(self, key: tuple[str, ...], axis: int, order: tuple[str, ...]) -> int:
        return self._builder.add("members", (), Type.VECTOR, (("key", key), ("axis", axis), ("order", order)))

    def _signal(self, tree: Selector) -> Signal | None:
        name = tree.name
        signal = self._names.signals.get(name)
        if signal is not None:
            return signal
        if name in self._names.later:
            self._wrong(tree.at, f"{name} is recorded further down: move its rule before this one")
            return None
        if name in FUNCTIONS:
            self._wrong(tree.at, f"{name} is a function: write {name}(…)")
            return None
        if name.lower() in ("nan", "inf"):
            self._wrong(tree.at, f"{name} is no number here: use isnan(x) or isinf(x)")
            return None
        by_series = {known.series: known.name for known in SIGNALS}
        if name in by_series:
            self._wrong(tree.at, f"{name} is the Prometheus series; in rules the signal is called {by_series[name]}")
            return None
        hint = did_you_mean(name, [*self._names.signals, *self._names.records])
        own = "" if hint else "; a signal of your own must be listed under `signals:` at the top of the file"
        self._wrong(tree.at, f"unknown signal {name!r}{hint}{own}")
        return None

    def _matched(self, signal: Signal, matchers: tuple[Matcher, ...]) -> dict[str, str] | None:
        given: dict[str, str] = {}
        errors = len(self.errors)
        for matcher in matchers:
            label, value = matcher.label, matcher.value
            if matcher.operator != "=":
                self._wrong(
                    matcher.at, f"a selector is one number: labels are matched by = alone, not {matcher.operator}"
                )
            elif label not in signal.labels:
                has = f"its labels are {', '.join(signal.labels)}" if signal.labels else "it has none"
                self._wrong(
                    matcher.at, f"{signal.name} has no label {label!r}: {has}{did_you_mean(label, signal.labels)}"
                )
            elif label in given:
                self._wrong(matcher.at, f"{label} is given twice")
            else:
                known = self._values(signal, label)
                if known and value not in known:
                    hint = did_you_mean(value, known) or f"; known are {', '.join(known)}"
                    self._wrong(matcher.at, f"{signal.name} has no {label} {value!r}{hint}")
                given[label] = value
        return given if len(self.errors) == errors else None

    def _values(self, signal: Signal, label: str) -> tuple[str, ...]:
        """Return the values that a label can have, or nothing where they are the user's own."""
        if signal.name in self._names.own or (signal.name, label) in _OPEN:
            return ()
        return LABEL_VALUES.get(label, ())

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call(self, tree: Call) -> int | None:
        function = FUNCTIONS.get(tree.name)
        if function is None:
            for argument in tree.arguments:
                self._any(argument.value if isinstance(argument, Option) else argument)
            instead = INSTEAD.get(tree.name)
            hint = nearest(tree.name, FUNCTIONS) if instead is None else f"; here write for example {instead}"
            signal = "; it is a signal, which has no arguments" if tree.name in self._names.signals else ""
            self._wrong(tree.at, f"unknown function {tree.name!r}{signal or hint}")
            return None
        if not function.takes:
            if tree.arguments:
                self._wrong(tree.at, f"{tree.name}() takes no argument")
                return None
            return self._builder.add(tree.name, (), function.gives, (("of", function.gives),))
        plain = [argument for argument in tree.arguments if not isinstance(argument, Option)]
        if not plain or isinstance(tree.arguments[0], Option):
            self._wrong(tree.at, f"{tree.name} needs an argument first, {_one_of(function.takes)}")
            return None
        errors = len(self.errors)
        operand = self._any(plain[0])
        if operand is not None and self._type(operand) not in function.takes:
            advice = self._advice(operand, function.takes, plain[0])
            found = self._type(operand).value
            self._wrong(plain[0].at, f"{tree.name} takes {_one_of(function.takes)}, but this is {found}{advice}")
        on_window = operand is not None and function.with_result_of and self._type(operand) is Type.WINDOW
        settings = self._settings(tree, function, () if on_window else function.settings)
        if operand is None or settings is None or len(self.errors) > errors:
            return None
        kind = self._type(operand)
        parameters: tuple[tuple[str, Any], ...] = (("of", kind), *settings)
        inputs = [operand]
        if function.of_parent:
            if not self._remembered(operand, tree.name, plain[0].at):
                return None
            parameters = (*parameters, ("source", operand))
            inputs = [operand] if function.of_parent == "too" else []
        if function.with_result_of and not on_window:
            inputs.append(self._builder.add(function.with_result_of, (operand,), Type.NUMBER, parameters))
        return self._builder.add(tree.name, tuple(inputs), function.gives, parameters)

    def _remembered(self, number: int, function: str, at: Span) -> bool:
        """Say whether an expression can be computed over the parent's line, of which a few signals are remembered."""
        node = self._builder.nodes[number]
        said = ""
        if node.name == "signal" and dict(node.parameters)["key"] not in REMEMBERED:
            said = f"{'.'.join(dict(node.parameters)['key'])} of a parent is not remembered: {_known()} are"
        elif node.name in ("members", "since_resume", "resumed") or any(key == "source" for key, _ in node.parameters):
            said = f"{function} takes an expression over the signals of the parent: no vector and no function of the resume"
        elif node.clock:
            said = (
                f"{function} takes an expression over the signals of the parent: idle() and budget() are of no record"
            )
        if said:
            self._wrong(at, said)
            return False
        return all(self._remembered(of, function, at) for of in node.inputs)

    def _settings(
        self, tree: Call, function: Function, allowed: tuple[Setting, ...]
    ) -> tuple[tuple[str, float], ...] | None:
        given: dict[str, float] = {}
        by_name = {setting.name: setting for setting in allowed}
        errors = len(self.errors)
        for place, argument in enumerate(tree.arguments[1:]):
            if isinstance(argument, Option):
                setting, value = by_name.get(argument.name), argument.value
                if setting is None:
                    hint = did_you_mean(argument.name, by_name) if by_name else "; it has none here"
                    self._wrong(argument.at, f"{tree.name} has no setting {argument.name!r}{hint}")
                    continue
            else:
                setting, value = (allowed[place] if place < len(allowed) else None), argument
                if setting is None:
                    self._wrong(argument.at, f"{tree.name} takes no more than {1 + len(allowed)} arguments")
                    continue
            number = _constant(value)
            if number is None:
                self._wrong(value.at, f"{setting.name} of {tree.name} must be a plain number")
            elif setting.name in given:
                self._wrong(argument.at, f"{setting.name} of {tree.name} is given twice")
            elif not setting.low <= number <= setting.high:
                limits = f"between {setting.low:g} and {setting.high:g}"
                self._wrong(value.at, f"{setting.name} of {tree.name} must be {limits}, not {number:g}")
            elif setting.whole and number != int(number):
                self._wrong(value.at, f"{setting.name} of {tree.name} must be a whole number, not {number:g}")
            else:
                given[setting.name] = number
        complete = []
        for setting in allowed:
            other = given.get(setting.same_as) if setting.same_as else None
            value_or_none = given.get(setting.name, setting.default if other is None else other)
            if value_or_none is None:
                if len(self.errors) == errors:
                    self._wrong(tree.at, f"{tree.name} needs {setting.name}, as in {tree.name}(…, {setting.name}=0.99)")
                return None
            complete.append((setting.name, value_or_none))
        return tuple(complete) if len(self.errors) == errors else None


def _constant(tree: Tree) -> float | None:
    if isinstance(tree, Number):
        return tree.value
    if isinstance(tree, Negative) and isinstance(tree.operand, Number):
        return -tree.operand.value
    return None


def _known() -> str:
    return ", ".join(sorted({key[0] for key in REMEMBERED}))


def _one_of(types: tuple[Type, ...]) -> str:
    return " or ".join(one.value for one in types)
