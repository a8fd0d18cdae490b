"""Runs the tests of a file through the evaluator that the daemon has, and says what was expected and what came."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwarden.rules.annotations import AnnotationError, render
from trainwarden.rules.core.alerts import AlertChange
from trainwarden.rules.core.block import Block
from trainwarden.rules.core.instrument_screen import screen
from trainwarden.rules.core.language import Evaluator
from trainwarden.rules.core.language.series import Series
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.evaluate import evaluate
from trainwarden.rules.fields import Path as Place

from .testfile import AlertTest, ExpectedAlert, ExprTest, Loaded, Ready, number_of

#: Relative difference up to which two numbers are the same.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Failure:
    """One expectation that does not hold: where it stands, of what it is, and both sides in words."""

    source: str
    line: int
    column: int
    test: str
    about: str
    expected: str
    got: str
    history: str = ""
    hidden: str = ""

    def __str__(self) -> str:
        lines = [f"{self.source}:{self.line}:{self.column}: {self.test}: {self.about}"]
        lines += [f"    expected: {self.expected}", f"    got:      {self.got}"]
        if self.history:
            lines.append(f"    its life: {self.history}")
        if self.hidden:
            lines.append(f"    note:     {self.hidden}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a file: how many tests and expectations there were, and what failed."""

    source: str
    tests: int
    checks: int
    failures: tuple[Failure, ...]


def run_tests(loaded: Loaded, only: re.Pattern[str] | None = None) -> Report:
    """Run the tests of a file whose name matches ``only``, each with an evaluator of its own."""
    failures: list[Failure] = []
    tests = checks = 0
    for number, ready in enumerate(loaded.tests, start=1):
        name = ready.test.name or f"test {number}"
        if only is not None and not only.search(name):
            continue
        tests += 1
        checks += len(ready.test.alert_rule_test) + len(ready.test.expr_test)
        failures += _run(loaded, ready, name)
    return Report(loaded.document.source, tests, checks, tuple(failures))


def _run(loaded: Loaded, ready: Ready, name: str) -> Iterator[Failure]:
    given = ready.given.block()
    dead = Settings().dead_records
    block, _ = screen({}, given, dead)

    def failure(at: Place, step: int, about: str, expected: str, got: str, history: str = "") -> Failure:
        line, column = loaded.document.position((*ready.place, *at))
        note = hidden(given, block, ready.given.row(step), dead)
        return Failure(loaded.document.source, line, column, name, about, expected, got, history, note)

    changes = Evaluator(loaded.pack).feed(block)
    for index, one in enumerate(ready.test.alert_rule_test):
        mine = [change for change in changes if change.rule == one.alertname]
        wrong = _alert(one, mine)
        if wrong is not None:
            about = f"{one.alertname} at step {one.eval_step}"
            yield failure(("alert_rule_test", index), one.eval_step, about, *wrong, history(mine))
    if ready.program is None:
        return
    for index, (each, series) in enumerate(zip(ready.test.expr_test, evaluate(ready.program, block), strict=True)):
        expected, got = _expression(each, series, ready.given.row(each.eval_step))
        if expected != got:
            yield failure(("expr_test", index), each.eval_step, f"{each.expr} at step {each.eval_step}", expected, got)


def hidden(given: Block, shown: Block, row: int, dead_records: int) -> str:
    """Say which signals the rules did not get to see at a row although a value was given, as in replay; an empty text for none."""
    said = []
    for key, column in given.columns.items():
        kept = column.present & ~shown.columns[key].present
        if not kept[row]:
            continue
        rows = np.flatnonzero(kept)
        why = f"the same value {dead_records} times in a row is no measurement"
        if (column.values[rows] == 0).all() and not np.isfinite(column.values[: rows[0]]).all():
            why = "0 behind a value that was not finite is no measurement"
        said.append(f"{key[0]} is unknown to the rules from step {given.step[rows[0]]} on: {why}")
    return "; ".join(said)


def _alert(test: AlertTest, changes: Sequence[AlertChange]) -> tuple[str, str] | None:
    """Return what was expected and what came, or None where they agree."""
    newest = next((change for change in reversed(changes) if change.step <= test.eval_step), None)
    firing = newest if newest is not None and newest.state == "firing" else None
    if not test.exp_alerts:
        return None if firing is None else ("not firing", _shown(firing, ExpectedAlert(exp_labels={}, exp_since=0)))
    expected = test.exp_alerts[0]
    if firing is None:
        pending = newest is not None and newest.state == "pending"
        return _wanted(expected), f"not firing{f' (pending since step {newest.since})' if pending and newest else ''}"
    try:
        texts = render(
            firing.annotations, value=firing.value, since=firing.since, step=firing.step, labels=firing.labels
        )
    except AnnotationError as error:
        return _wanted(expected), f"firing, but its {error}"
    value = math.nan if firing.value is None else firing.value
    agree = (
        expected.exp_labels in (None, firing.labels)
        and expected.exp_annotations in (None, texts)
        and expected.exp_since in (None, firing.since)
        and (expected.exp_value is None or _same(number_of(expected.exp_value) or 0.0, value))
    )
    return None if agree else (_wanted(expected), _shown(firing, expected, texts))


def _wanted(expected: ExpectedAlert) -> str:
    value = None if expected.exp_value is None else number_of(expected.exp_value)
    return _words(expected.exp_since, value, expected.exp_labels, expected.exp_annotations)


def _shown(firing: AlertChange, expected: ExpectedAlert, texts: dict[str, str] | None = None) -> str:
    """Say of a firing alert what is expected of it, and no more."""
    return _words(
        None if expected.exp_since is None else firing.since,
        None if expected.exp_value is None else firing.value,
        None if expected.exp_labels is None else firing.labels,
        None if expected.exp_annotations is None else texts,
    )


def _words(
    since: int | None, value: float | None, labels: dict[str, str] | None, annotations: dict[str, str] | None
) -> str:
    said = "firing" + (f" since step {since}" if since is not None else "")
    parts = [said]
    if value is not None:
        parts.append(f"value {value:.9g}")
    for name, texts in (("labels", labels), ("annotations", annotations)):
        if texts is not None:
            listed = ", ".join(f'{key}="{text}"' for key, text in sorted(texts.items()))
            parts.append(f"{name} {{{listed}}}")
    return ", ".join(parts)


def history(changes: Sequence[AlertChange], most: int = 8) -> str:
    """Return the life of an alert in words."""
    said = [f"{change.state} at step {change.step}" for change in changes[:most]]
    if len(changes) > most:
        said.append(f"and {len(changes) - most} more changes")
    return ", ".join(said) or "it was never pending"


def _expression(test: ExprTest, series: Series, row: int) -> tuple[str, str]:
    """Return both sides in words; equal words where they agree."""
    value: Any = series.values[row].item() if bool(series.known[row]) else None
    got = "unknown" if value is None else str(value).lower() if isinstance(value, bool) else f"{value:.9g}"
    wanted = test.exp_value
    if wanted == "unknown":
        return "unknown", got
    if isinstance(wanted, bool):
        return str(wanted).lower(), got
    number = number_of(wanted)
    expected = f"{number:.9g}"
    agree = value is not None and not isinstance(value, bool) and number is not None and _same(number, value)
    return (got, got) if agree else (expected, got)


def _same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
