"""Streams of records for the tests of the rule language, and ways to run a pack over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from trainwarden.record import Step, Value
from trainwarden.rules.core.alerts import AlertChange
from trainwarden.rules.core.block import Block, from_steps
from trainwarden.rules.core.language import Evaluator, Pack, load_pack
from trainwarden.rules.core.language.compile import Builder
from trainwarden.rules.core.language.operator import Type
from trainwarden.rules.core.language.parser import Parser
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.types import Checker, Names
from trainwarden.signals import BY_NAME, Signal

PARSER = Parser()
OWN = {name: Signal(name, "", "", "") for name in ("x", "y")}


def record(step: int, stride: int = 1, **signals: Value | None) -> Step:
    """Return a record; a signal that is None is absent."""
    given = {name: value for name, value in signals.items() if value is not None}
    return Step(seq=step, step=step, time=1000.0 + step, stride=stride, signals=given)


def column(values: Iterable[float | None], first: int = 1, stride: int = 1, name: str = "x") -> list[Step]:
    """Return records of one signal; None is absent."""
    return [
        record(first + place * stride, stride, **{name: value})  # type: ignore[arg-type]
        for place, value in enumerate(values)
    ]


def rows_of(text: str, steps: Sequence[Step], ranks: Any = None) -> list[tuple[float | bool | None, bool]]:
    """Evaluate one expression of any type: (value, or None where unknown; fresh) for each record."""
    builder = Builder()
    checker = Checker(builder, Names({**BY_NAME, **OWN}))
    number = checker.check(PARSER.parse(text), tuple(Type))
    assert number is not None, checker.errors
    program = builder.program([number])
    results: list[Any] = []
    frame = Frame.of(from_steps(steps, ranks))
    with np.errstate(all="ignore"):
        for node, operator in zip(program.nodes, program.operators(), strict=True):
            results.append(operator.feed(frame, [results[of] for of in node.inputs]))
    found: Series = results[program.outputs[0].truth]
    rows = zip(found.values.tolist(), found.known.tolist(), found.fresh.tolist(), strict=True)
    return [(value if known else None, known and fresh) for value, known, fresh in rows]


def values_of(text: str, steps: Sequence[Step], ranks: Any = None) -> list[Any]:
    """Return the values of an expression, None where it is unknown."""
    return [value for value, _ in rows_of(text, steps, ranks)]


def pack_of(*expressions: str, hold: str = "1 steps", keep: str = "0 steps") -> Pack:
    """Return a pack with one alert an expression, named r0, r1, …"""
    lines = ["signals: [x, y]", "groups:", "  - name: g", "    rules:"]
    for place, expression in enumerate(expressions):
        lines += [f"      - alert: r{place}", f"        expr: {expression}", f"        for: {hold}", f"        keep_firing_for: {keep}"]  # fmt: skip
    return load_pack("\n".join(lines), "test.yml")


def run(pack: Pack, steps: Sequence[Step], cuts: Iterable[int] = (), reload: Iterable[int] = ()) -> list[AlertChange]:
    """Feed records in blocks cut before the given places; at those in ``reload`` the state goes through JSON."""
    again = set(reload)
    places = sorted({0, len(steps), *(cut for cut in {*cuts, *again} if 0 < cut < len(steps))})
    evaluator = Evaluator(pack)
    found: list[AlertChange] = []
    for first, end in pairwise(places):
        if first in again:
            evaluator = Evaluator.load(pack, msgspec.json.decode(msgspec.json.encode(evaluator.dump())))
        found += [replace(change, row=first + change.row) for change in evaluator.feed(block(steps[first:end]))]
    return found


def block(steps: Sequence[Step]) -> Block:
    """Return the block of some records, with the ranks' own where a record has a signal ``by_rank``."""
    ranks = []
    plain = []
    for step in steps:
        own = step.signals.get("by_rank")
        parts = own if isinstance(own, dict) else {}
        ranks.append({int(rank): msgspec.structs.replace(step, signals={"rank_loss": v}) for rank, v in parts.items()})
        plain.append(msgspec.structs.replace(step, signals={k: v for k, v in step.signals.items() if k != "by_rank"}))
    return from_steps(plain, ranks)


def said(changes: Iterable[AlertChange]) -> list[tuple[str, str, int, int]]:
    """Return rule, state, step and since of each change."""
    return [(change.rule, change.state, change.step, change.since) for change in changes]


def same(left: Sequence[AlertChange], right: Sequence[AlertChange]) -> bool:
    """Say whether two runs changed the same alerts at the same rows, with values equal to 1e-9."""

    def plain(change: AlertChange) -> Mapping[str, Any]:
        return {name: getattr(change, name) for name in ("rule", "state", "row", "step", "since", "time", "labels")}

    return len(left) == len(right) and all(
        plain(one) == plain(other) and close(one.value, other.value) for one, other in zip(left, right, strict=True)
    )


def close(left: float | None, right: float | None) -> bool:
    """Say whether two values are the same to 1e-9; absent, NaN and the infinities equal themselves."""
    if left is None or right is None:
        return left is right
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return left == right or abs(left - right) <= 1e-9 * max(1.0, abs(left), abs(right))
