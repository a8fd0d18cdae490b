"""From the text of a rule file to a pack: immutable rules and the program that computes them.

The file has Prometheus' own shape. Unknown and duplicate keys, bad durations and bad expressions are errors with file, line
and column; all of a file's errors come at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainwarden.rules import yamltext
from trainwarden.rules.core.alerts import AlertRule, Hold
from trainwarden.rules.yamltext import Document, Path, Problem, YamlError
from trainwarden.signals import BY_NAME, Signal

from .compile import Builder, Program
from .errors import ExpressionError, RuleErrors, did_you_mean
from .operator import Type
from .operators import FUNCTIONS
from .parser import Parser
from .types import Checker, Names

SEVERITIES = ("info", "warning", "critical")
#: The shapes that a rule may offer under its label ``verdict``.
VERDICTS = (
    "outlier",
    "transient_spike",
    "slow_recovery",
    "level_shift",
    "divergence",
    "nonfinite",
    "grad_surge",
    "grad_collapse",
    "recurring_spikes",
    "periodic_spikes",
    "drift",
    "scale_collapse",
    "stall",
    "mismatch",
    "other",
)

_TOP = ("groups", "signals")
_GROUP = ("name", "rules")
_ALERT = ("alert", "expr", "for", "keep_firing_for", "labels", "annotations")
_RECORD = ("record", "expr")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_:]*")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset({"or", "and", "unless", "not", "by", "offset"})


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert rule as it stands in the file. ``line`` is where; ``annotations`` are templates left unrendered."""

    name: str
    group: str
    expr: str
    for_: Hold
    keep_firing_for: Hold
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    source: str
    line: int

    @property
    def alert(self) -> AlertRule:
        """Return what the alert's life cycle needs."""
        return AlertRule(self.name, self.for_, self.keep_firing_for, self.labels, self.annotations)


@dataclass(frozen=True, slots=True)
class Pack:
    """Alert rules by name, in the order of their files, and the program with one output for each. Immutable.

    ``records`` are the recorded expressions, by name, as text.
    """

    source: str
    rules: Mapping[str, Rule]
    records: Mapping[str, str]
    program: Program

    def reads(self, rule: str) -> frozenset[str]:
        """Return the names of the signals that a rule reads; none for a rule that the pack does not have."""
        for name, output in zip(self.rules, self.program.outputs, strict=True):
            if name == rule:
                keys = [dict(self.program.nodes[number].parameters).get("key") for number in self.program.below(output)]
                return frozenset(key if isinstance(key, str) else str(key[0]) for key in keys if key)
        return frozenset()


def load_pack(text: str, source: str) -> Pack:
    """Read one rule file. ``source`` is its name in messages.

    Raises:
        RuleErrors: the file cannot be used; all of its problems.
    """
    return load_packs([(text, source)])


def load_packs(files: list[tuple[str, str]]) -> Pack:
    """Read several rule files, each ``(text, source)``, into one pack. Alert names must differ over all of them.

    Raises:
        RuleErrors: a file cannot be used; all problems of all files.
    """
    loading = _Loading()
    for text, source in files:
        loading.file(text, source)
    if loading.problems:
        raise RuleErrors(loading.problems)
    return Pack(
        ", ".join(source for _, source in files),
        MappingProxyType(loading.rules),
        MappingProxyType(loading.records),
        loading.builder.program(loading.truths),
    )


@dataclass(slots=True)
class _Loading:
    """One call of :func:`load_packs`: what was read so far, and what was wrong with it. ``named`` is where each alert stands."""

    builder: Builder = field(default_factory=Builder)
    parser: Parser = field(default_factory=Parser)
    rules: dict[str, Rule] = field(default_factory=dict)
    records: dict[str, str] = field(default_factory=dict)
    truths: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)

    def file(self, text: str, source: str) -> None:
        try:
            document = yamltext.load(text, source, self.problems)
        except YamlError as error:
            self.problems += error.problems
            return
        _File(self, document).read()


class _File:
    def __init__(self, loading: _Loading, document: Document) -> None:
        self.loading = loading
        self.document = document
        self.names = Names(dict(BY_NAME))
        self.checker = Checker(loading.builder, self.names)

    def read(self) -> None:
        top = self.document.value
        if not isinstance(top, dict):
            self.wrong((), "a rule file is a mapping with the key `groups`")
            return
        self.keys((), top, _TOP)
        self.signals(top.get("signals"))
        groups = top.get("groups")
        if not isinstance(groups, list):
            self.wrong(("groups",), "`groups` must be a list of groups, each with a name and rules")
            return
        rules: list[tuple[Path, str, dict[Any, Any]]] = []
        seen: dict[str, int] = {}
        for index, group in enumerate(groups):
            path: Path = ("groups", index)
            if not isinstance(group, dict):
                self.wrong(path, "a group is a mapping with a name and rules")
                continue
            self.keys(path, group, _GROUP)
            name = self.text((*path, "name"), group.get("name"), "a group needs a name")
            if name is not None:
                if name in seen:
                    self.wrong((*path, "name"), f"group {name!r} exists already, in line {seen[name]}")
                seen.setdefault(name, self.document.position((*path, "name"))[0])
            listed = group.get("rules")
            if not isinstance(listed, list):
                self.wrong((*path, "rules"), "`rules` must be a list of rules")
                continue
            for place, rule in enumerate(listed):
                if isinstance(rule, dict):
                    rules.append(((*path, "rules", place), name or "", rule))
                else:
                    self.wrong((*path, "rules", place), "a rule is a mapping with alert or record, and expr")
        self.names.later = {rule["record"] for _, _, rule in rules if isinstance(rule.get("record"), str)}
        for path, group_name, rule in rules:
            if "record" in rule and "alert" not in rule:
                self.record(path, rule)
            else:
                self.alert(path, group_name, rule)

    def signals(self, given: Any) -> None:
        """Read the user's own signals: a list of names, or a mapping from names to lists of labels."""
        if given is None:
            return
        named = (
            dict.fromkeys(given, ()) if isinstance(given, list) and all(isinstance(n, str) for n in given) else given
        )
        if not isinstance(named, dict):
            self.wrong(("signals",), "`signals` must be a list of names, or name: [labels]")
            return
        own: dict[str, Signal] = {}
        for name, labels in named.items():
            path: Path = ("signals", name)
            fits = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
                self.wrong(path, f"{name!r} is no name for a signal: letters, digits and _")
            elif name in BY_NAME or name in FUNCTIONS:
                self.wrong(path, f"{name} is a {'signal' if name in BY_NAME else 'function'} of trainwarden already")
            elif not fits:
                self.wrong(path, "the labels of a signal are a list of names")
            else:
                own[name] = Signal(name, "", "", "", labels=tuple(labels))
        self.names.signals = {**BY_NAME, **own}
        self.names.own = frozenset(own)

    def record(self, path: Path, rule: dict[Any, Any]) -> None:
        self.keys(path, rule, _RECORD)
        name = self.name((*path, "record"), rule["record"])
        number = self.expression(path, rule, (Type.NUMBER, Type.BOOLEAN))
        if name is None:
            return
        if name in self.names.signals:
            self.wrong((*path, "record"), f"{name} is a signal: record it under another name")
        elif name in self.names.records:
            self.wrong((*path, "record"), f"{name} is recorded already")
        else:
            self.names.records[name] = number
            self.names.later.discard(name)
            self.loading.records[name] = str(rule.get("expr"))

    def alert(self, path: Path, group: str, rule: dict[Any, Any]) -> None:
        self.keys(path, rule, _ALERT)
        before = len(self.loading.problems)
        name = None
        if "alert" in rule:
            name = self.name((*path, "alert"), rule["alert"])
        else:
            self.wrong(path, "a rule needs `alert` or `record`")
        number = self.expression(path, rule, (Type.BOOLEAN,))
        hold, keep = self.hold(path, rule, "for"), self.hold(path, rule, "keep_firing_for")
        if number is not None and self.loading.builder.nodes[number].clock:
            for key, held in (("for", hold), ("keep_firing_for", keep)):
                if held.amount and held.unit != "seconds":
                    self.wrong((*path, key), f"no step passes while idle() grows: write `{key}` as a time such as 5m")
            keep = Hold(keep.amount, "seconds")
        labels = self.texts((*path, "labels"), rule.get("labels"))
        annotations = self.texts((*path, "annotations"), rule.get("annotations"))
        for label, known in (("severity", SEVERITIES), ("verdict", VERDICTS)):
            if label in labels and labels[label] not in known:
                hint = did_you_mean(labels[label], known) or f"; it is one of {', '.join(known)}"
                self.wrong((*path, "labels", label), f"{labels[label]!r} is no {label}{hint}")
        line = self.document.key_position((*path, "alert"))[0]
        if name is not None and name in self.loading.named:
            self.wrong((*path, "alert"), f"alert {name} exists already, at {self.loading.named[name]}")
        elif name is not None:
            self.loading.named[name] = f"{self.document.source}:{line}"
        if name is None or number is None or len(self.loading.problems) > before:
            return
        self.loading.rules[name] = Rule(
            name,
            group,
            rule["expr"].strip(),
            hold,
            keep,
            MappingProxyType(labels),
            MappingProxyType(annotations),
            self.document.source,
            line,
        )
        self.loading.truths.append(number)

    # -- pieces --------------------------------------------------------------------------------------------------

    def expression(self, path: Path, rule: dict[Any, Any], wanted: tuple[Type, ...]) -> int | None:
        text = rule.get("expr")
        at: Path = (*path, "expr")
        if not isinstance(text, str):
            if isinstance(text, int | float) and not isinstance(text, bool):
                self.wrong(at, "the expression reads no signal: it can never change")
            else:
                self.wrong(at if "expr" in rule else path, "a rule needs `expr`, an expression")
            return None
        try:
            number = self.checker.check(self.loading.parser.parse(text), wanted)
            found = self.checker.errors
        except ExpressionError as error:
            number, found = None, [error]
        for each in found:
            place = self.document.locate(at, each.offset)
            self.loading.problems.append(self.document.problem(place, each.message))
        return number

    def hold(self, path: Path, rule: dict[Any, Any], key: str) -> Hold:
        value = rule.get(key)
        if value is None:
            if key in rule:
                self.wrong((*path, key), f"`{key}` is empty")
            return Hold()
        if not isinstance(value, str):
            self.wrong(
                (*path, key), f"`{key}: {value}` has no unit; write {value} steps, {value} records or a time such as 5m"
            )
            return Hold()
        try:
            return Hold.parse(value)
        except ValueError as error:
            self.wrong((*path, key), str(error))
            return Hold()

    def texts(self, path: Path, value: Any) -> dict[str, str]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.wrong(path, f"`{path[-1]}` is a mapping from names to texts")
            return {}
        for key, text in value.items():
            if not isinstance(key, str) or not _LABEL.fullmatch(key):
                self.wrong((*path, key), f"{key!r} is no label name: letters, digits and _", key=True)
            elif not isinstance(text, str):
                self.wrong((*path, key), f"`{key}` must be a text: put it in quotes")
        return {key: text for key, text in value.items() if isinstance(key, str) and isinstance(text, str)}

    def name(self, path: Path, value: Any) -> str | None:
        if isinstance(value, str) and _NAME.fullmatch(value) and value not in _RESERVED:
            return value
        self.wrong(path, f"{value!r} is no name: letters, digits, _ and : only, and none of the language's own words")
        return None

    def text(self, path: Path, value: Any, otherwise: str) -> str | None:
        if isinstance(value, str) and value:
            return value
        self.wrong(path, otherwise)
        return None

    def keys(self, path: Path, given: dict[Any, Any], known: tuple[str, ...]) -> None:
        for key in given:
            if key not in known:
                hint = did_you_mean(str(key), known) or f"; it is one of {', '.join(known)}"
                self.wrong((*path, key), f"unknown key {key!r}{hint}", key=True)

    def wrong(self, path: Path, message: str, key: bool = False) -> None:
        place = self.document.key_position(path) if key else self.document.position(path)
        self.loading.problems.append(self.document.problem(place, message))
