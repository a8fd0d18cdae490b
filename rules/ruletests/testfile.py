"""A file of rule tests: promtool's shape, with steps in the place of times. All of its errors at once, each with its line."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainwarden.rules.core.language import Pack
from trainwarden.rules.core.language.compile import Program
from trainwarden.rules.core.language.errors import ExpressionError, did_you_mean
from trainwarden.rules.evaluate import Compiler
from trainwarden.rules.fields import Path as Place
from trainwarden.rules.fields import Seconds, convert, where
from trainwarden.rules.rulefiles import RuleFileError, check_packs, text_of
from trainwarden.rules.yamltext import Document, Problem, YamlError, load

from .given import Given, read_series
from .series import NotationError, values


class InputSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One signal of the test: ``series`` is its selector, ``values`` the notation of one value a record."""

    series: str
    values: str | int | float


class ExpectedAlert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that must be firing. What is not given is not compared; what is given must be equal as a whole."""

    exp_labels: dict[str, str] | None = None
    exp_annotations: dict[str, str] | None = None
    exp_since: int | None = None
    exp_value: str | float | None = None


class AlertTest(msgspec.Struct, frozen=True, kw_only=True):
    """Whether ``alertname`` fires once the record of ``eval_step`` was taken in; no ``exp_alerts``: it must not fire."""

    eval_step: int
    alertname: str | None = None
    exp_alerts: list[ExpectedAlert] = []


class ExprTest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``expr`` is at ``eval_step``: a number, true, false, or the word unknown."""

    expr: str
    eval_step: int
    exp_value: bool | float | str


class RuleTest(msgspec.Struct, frozen=True, kw_only=True):
    """One test: a made-up start of a run and what must be seen in it.

    ``stride`` are the steps that a record covers, ``first_step`` is the step of the first record (the stride, if not given),
    ``interval`` the time between two records.
    """

    input_series: list[InputSeries]
    name: str = ""
    interval: Seconds = Seconds(1.0)
    stride: int = 1
    first_step: int | None = None
    alert_rule_test: list[AlertTest] = []
    expr_test: list[ExprTest] = []


class RuleTests(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. ``rule_files`` are paths relative to it, globs, or names of shipped packs."""

    rule_files: list[str]
    tests: list[RuleTest]


class RuleTestError(ValueError):
    """A file of tests that cannot be run; ``errors`` holds all that is wrong."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Ready:
    """One test ready to run: its series, and a program for its expressions, where it has any."""

    test: RuleTest
    place: Place
    given: Given
    program: Program | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file ready to run."""

    document: Document
    pack: Pack
    tests: tuple[Ready, ...]


def load_tests(path: Path) -> Loaded:
    """Read a file of tests and the rules that it names.

    Raises:
        RuleTestError: with all that is wrong.
    """
    problems: list[Problem] = []
    try:
        document = load(path.read_text("utf-8"), str(path), problems)
    except (OSError, UnicodeDecodeError) as error:
        raise RuleTestError([f"{path}: cannot be read: {error}"]) from None
    except YamlError as error:
        raise RuleTestError([str(error)]) from None
    misspelt: set[Place] = set()

    def complain(at: Place, says: str, offset: int | None = None) -> None:
        unknown = says.startswith("unknown field")
        if unknown:
            misspelt.add(at[:-1])
        elif at in misspelt and "is missing" in says:
            return  # the field that is unknown was hardly meant for another
        spot = document.key_position(at) if unknown else document.position(at)
        named = f"{where(at)}: " if offset is None else ""
        problems.append(document.problem(spot if offset is None else document.locate(at, offset), f"{named}{says}"))

    whole = convert(document.value, RuleTests, lambda at, says: complain(at, says), pass_over=True)
    file = _readable(document.value) if whole is None else _Readable(whole.rule_files, [*whole.tests])
    if file is None:
        raise RuleTestError(_said(problems))
    texts, errors = _rules(file.rule_files, path.parent)
    try:
        pack = check_packs(texts)
    except RuleFileError as error:
        errors += error.errors
    if errors:
        raise RuleTestError([*_said(problems), f"{path}: rule_files cannot be used:", *errors])
    compiler = Compiler(texts)
    tests = []
    for index, test in enumerate(file.tests):
        place: Place = ("tests", index)
        if test is None:
            _check_names(document.value["tests"][index], place, pack, complain)
        else:
            tests.append(_ready(test, place, pack, compiler, complain))
    if not file.tests and not problems:
        complain(("tests",), "there is no test")
    if problems:
        raise RuleTestError(_said(problems))
    return Loaded(document, pack, tuple(tests))


@dataclass(frozen=True, slots=True)
class _Readable:
    """What of a file can be read: None for each test that cannot."""

    rule_files: list[str]
    tests: list[RuleTest | None]


def _readable(value: Any) -> _Readable | None:
    """Return what can be read of a file, so that the rest is checked too; None where not even its rules are named."""
    names = value.get("rule_files") if isinstance(value, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    tests = value.get("tests")
    found = tests if isinstance(tests, list) else []
    return _Readable(names, [convert(test, RuleTest, lambda at, says: None, pass_over=True) for test in found])


def _said(problems: list[Problem]) -> list[str]:
    return [str(one) for one in sorted(problems, key=lambda problem: (problem.line, problem.column))]


def _rules(names: list[str], base: Path) -> tuple[list[tuple[str, str]], list[str]]:
    texts: list[tuple[str, str]] = []
    errors = [] if names else ["rule_files: name at least one"]
    for name in names:
        found = [name]
        if any(char in name for char in "*?["):
            found = sorted(glob.glob(name, root_dir=base, recursive=True))  # noqa: PTH207 (a user's own pattern)
            if not found:
                errors.append(f"{name}: no such file")
        for one in found:
            try:
                texts.append(text_of(one, base))
            except RuleFileError as error:
                errors += error.errors
    return texts, errors


def _ready(test: RuleTest, place: Place, pack: Pack, compiler: Compiler, complain: Callable[..., None]) -> Ready:
    given = Given(test.stride, test.stride if test.first_step is None else test.first_step, float(test.interval))
    if test.stride < 1:
        complain((*place, "stride"), "a record covers at least one step")
        return Ready(test, place, given, None)
    if given.first < 0:
        complain((*place, "first_step"), "steps begin at 0 or 1")
    for index, one in enumerate(test.input_series):
        at = (*place, "input_series", index)
        try:
            series = read_series(one.series, compiler)
            numbers = values(str(one.values), test.stride)
            if not given.put(series, numbers):
                complain((*at, "series"), f"{one.series} is given twice")
        except ExpressionError as error:
            complain((*at, "series"), error.message, error.offset)
        except NotationError as error:
            complain((*at, "values"), str(error), error.offset)
    if not test.input_series:
        complain((*place, "input_series"), "a test needs at least one series")
    if not test.alert_rule_test and not test.expr_test:
        complain(place, "the test expects nothing: give alert_rule_test or expr_test")
    _check_alerts(test, place, pack, given, complain)
    return Ready(test, place, given, _compiled(test, place, compiler, given, complain))


def _check_alerts(test: RuleTest, place: Place, pack: Pack, given: Given, complain: Callable[..., None]) -> None:
    for index, one in enumerate(test.alert_rule_test):
        at = (*place, "alert_rule_test", index)
        _check_step(one.eval_step, at, given, complain)
        if not one.alertname:
            complain(at, "alertname is missing: a test without one would pass whatever fires")
        else:
            _check_name(one.alertname, at, pack, complain)
        if len(one.exp_alerts) > 1:
            complain((*at, "exp_alerts"), "an alert has one instance in a run: give one, or none if it must not fire")
        for expected in one.exp_alerts:
            if isinstance(expected.exp_value, str) and number_of(expected.exp_value) is None:
                complain((*at, "exp_alerts", 0, "exp_value"), f"{expected.exp_value!r} is no number, NaN, Inf or -Inf")


def _check_names(test: Any, place: Place, pack: Pack, complain: Callable[..., None]) -> None:
    """Check the alerts' names of a test that cannot be read as a whole."""
    listed = test.get("alert_rule_test") if isinstance(test, dict) else None
    for index, one in enumerate(listed if isinstance(listed, list) else []):
        name = one.get("alertname") if isinstance(one, dict) else None
        if isinstance(name, str):
            _check_name(name, (*place, "alert_rule_test", index), pack, complain)


def _check_name(name: str, at: Place, pack: Pack, complain: Callable[..., None]) -> None:
    if name not in pack.rules:
        hint = did_you_mean(name, pack.rules) or f"; there are {', '.join(pack.rules)}"
        complain((*at, "alertname"), f"no rule has the alert {name!r}{hint}")


def _check_step(step: int, at: Place, given: Given, complain: Callable[..., None]) -> None:
    if given.length and not given.first <= step <= given.last:
        says = f"there is no record at step {step}: the series cover steps {given.first} to {given.last}"
        complain((*at, "eval_step"), says)


def _compiled(
    test: RuleTest, place: Place, compiler: Compiler, given: Given, complain: Callable[..., None]
) -> Program | None:
    fine = True
    for index, one in enumerate(test.expr_test):
        at = (*place, "expr_test", index)
        _check_step(one.eval_step, at, given, complain)
        if isinstance(one.exp_value, str) and one.exp_value != "unknown" and number_of(one.exp_value) is None:
            complain((*at, "exp_value"), f"{one.exp_value!r} is no number, true, false, unknown, NaN, Inf or -Inf")
        try:
            compiler.compile(one.expr)
        except ExpressionError as error:
            fine = False
            complain((*at, "expr"), error.message, error.offset)
    return compiler.compile(*(one.expr for one in test.expr_test)) if fine and test.expr_test else None


def number_of(word: str | float) -> float | None:
    """Return the number that a word such as ``NaN`` or ``-Inf`` stands for, None for another word."""
    if isinstance(word, int | float):
        return float(word)
    return {"nan": float("nan"), "inf": float("inf"), "+inf": float("inf"), "-inf": float("-inf")}.get(word.lower())
