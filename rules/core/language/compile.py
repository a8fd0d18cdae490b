"""The program of a pack: every distinct sub-expression of all its rules once, in an order in which it can be computed.

A program is a description and has no state; an evaluator makes the operators. Each node has a key, a text made from what
it computes and from nothing else, under which its state is kept over a restart, also when the pack was edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

from .history import History
from .measured import Members, Signal
from .operator import Operator, Type
from .operators import FUNCTIONS, arithmetic, logic
from .windows import Window

Parameters: TypeAlias = tuple[tuple[str, Any], ...]

# Longer keys are cut and end in a digest of the whole.
_KEY_LENGTH = 160
# What is told at ticks and not in records, and the nodes that an expression of it may be made of: they have no state.
_CLOCK = frozenset({"idle", "budget"})
_STATELESS = frozenset((*_CLOCK, "number", "and", "or", "not", "negative", *"+-*/%^<>", "<=", ">=", "==", "!="))
# Nodes that read the records, and not only other nodes.
_READING = frozenset({"signal", "members", "since_resume", "resumed"})
_OPPOSITE = (("<", ">="), (">", "<="), ("==", "!="), (">=", "<"), ("<=", ">"), ("!=", "=="))


@dataclass(frozen=True, slots=True)
class Node:
    """One distinct sub-expression: what it is, of which nodes, and the text that identifies it."""

    name: str
    inputs: tuple[int, ...]
    parameters: Parameters
    type: Type
    key: str
    reads: bool  # it depends on a signal or on the clock
    clock: bool = False  # it depends on the clock: it is known at ticks alone


@dataclass(frozen=True, slots=True)
class Output:
    """Where an alert's truth and the number that it is about are found."""

    truth: int
    value: int | None


@dataclass(frozen=True, slots=True)
class Program:
    """Nodes in order of computation, and one output for each alert."""

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def operators(self) -> list[Operator]:
        """Return a new operator for each node."""
        return [make(node) for node in self.nodes]

    def below(self, output: Output) -> set[int]:
        """Return the numbers of all nodes that an output is made of."""
        found: set[int] = set()
        waiting = [output.truth] if output.value is None else [output.truth, output.value]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.nodes[number].inputs
        return found


class Builder:
    """Collects nodes; asking twice for the same one gives the same number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[tuple[str, tuple[int, ...], Parameters], int] = {}
        self._spans: dict[int, int] = {}
        self._negated: dict[int, int] = {}

    def add(self, name: str, inputs: tuple[int, ...], type: Type, parameters: Parameters = ()) -> int:
        """Return the number of the node, new or known."""
        identity = (name, inputs, parameters)
        found = self._numbers.get(identity)
        if found is None:
            found = self._numbers[identity] = len(self.nodes)
            clock = name in _CLOCK or any(self.nodes[of].clock for of in inputs)
            elsewhere = any(key == "source" for key, _ in parameters)
            reads = clock or elsewhere or name in _READING or any(self.nodes[of].reads for of in inputs)
            key = self._key(name, inputs, parameters)
            self.nodes.append(Node(name, inputs, parameters, type, key, reads, clock))
        return found

    def window(self, source: int, steps: int, offset: int) -> int:
        """Return the window over the source's history, which is kept as long as its longest window needs."""
        history = self.add("past", (source,), Type.WINDOW)
        self._spans[history] = max(self._spans.get(history, 0), steps + offset)
        of = Type.TRUTHS if self.nodes[source].type is Type.BOOLEAN else Type.WINDOW
        return self.add("window", (history,), of, (("steps", steps), ("offset", offset)))

    def negate(self, number: int) -> int:
        """Return the opposite of a boolean, pushed down to the comparisons: one with NaN stays false under ``not``."""
        known = self._negated.get(number)
        if known is not None:
            return known
        node = self.nodes[number]
        if node.name in ("and", "or"):
            left, right = (self.negate(of) for of in node.inputs)
            found = self.add("or" if node.name == "and" else "and", (left, right), Type.BOOLEAN)
        elif node.name == "not":
            found = node.inputs[0]
        else:
            opposite = next((to for of, to in _OPPOSITE if of == node.name), None)
            if opposite is None:
                found = self.add("not", (number,), Type.BOOLEAN)
            else:
                found = self.add(opposite, node.inputs, Type.BOOLEAN)
        self._negated[number] = found
        return found

    def about(self, number: int) -> int | None:
        """Return the number that a boolean is about: the left side of its first comparison, or what it asks of."""
        node = self.nodes[number]
        if node.type is Type.NUMBER:
            return number if node.reads else None
        for of in node.inputs:
            found = self.about(of) if self.nodes[of].type in (Type.NUMBER, Type.BOOLEAN) else None
            if found is not None:
                return found
        return None

    def mixes(self, number: int) -> bool:
        """Say whether an expression of the clock also reads signals, or remembers something from record to record."""
        node = self.nodes[number]
        if not self.nodes[number].clock:
            return node.reads
        return node.name not in _STATELESS or any(self.mixes(of) for of in node.inputs)

    def program(self, truths: list[int]) -> Program:
        """Return the program of the given alerts, without what none of them needs."""
        abouts = [self.about(truth) for truth in truths]
        needed: set[int] = set()
        waiting = [*truths, *(number for number in abouts if number is not None)]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                waiting += self.nodes[number].inputs
        # Nodes of the clock come last: a block of records is computed without them.
        ordered = sorted(needed, key=lambda number: (self.nodes[number].clock, number))
        place = {number: index for index, number in enumerate(ordered)}
        nodes = []
        for number in ordered:
            node = self.nodes[number]
            parameters = (("span", self._spans[number]),) if node.name == "past" else self._whole(node.parameters)
            inputs = tuple(place[of] for of in node.inputs)
            nodes.append(Node(node.name, inputs, parameters, node.type, node.key, node.reads, node.clock))
        outputs = tuple(
            Output(place[truth], None if about is None else place[about])
            for truth, about in zip(truths, abouts, strict=True)
        )
        return Program(tuple(nodes), outputs)

    def _whole(self, parameters: Parameters) -> Parameters:
        """Put the program of what is computed over the parent's line in the place of its number."""
        return tuple(
            ("program", self.program([value])) if key == "source" else (key, value) for key, value in parameters
        )

    def _key(self, name: str, inputs: tuple[int, ...], parameters: Parameters) -> str:
        said = [self.nodes[of].key for of in inputs]
        source = [value for key, value in parameters if key == "source"]
        said += [self.nodes[of].key for of in source if of not in inputs]
        said += [f"{key}={value!r}" for key, value in parameters if key not in ("of", "source")]
        whole = f"{name}({', '.join(said)})"
        if name == "signal":
            whole = ".".join(dict(parameters)["key"])
        if len(whole) <= _KEY_LENGTH:
            return whole
        return f"{whole[:_KEY_LENGTH]}…{sha256(whole.encode()).hexdigest()[:16]}"


def make(node: Node) -> Operator:
    """Return a new operator for a node."""
    given = dict(node.parameters)
    if node.name == "signal":
        return Signal(**given)
    if node.name == "members":
        return Members(**given)
    if node.name == "past":
        return History(**given)
    if node.name == "window":
        return Window(**given)
    if node.name in FUNCTIONS:
        return FUNCTIONS[node.name].build(given.pop("of"), given)
    simple = {"and": logic.And, "or": logic.Or, "not": logic.Not, "negative": arithmetic.Negation}.get(node.name)
    if simple is not None:
        return simple()
    if node.name == "number":
        return arithmetic.Constant(given["value"])
    if any(node.name == of for of, _ in _OPPOSITE):
        return logic.Comparison(node.name)
    return arithmetic.Arithmetic(node.name)
