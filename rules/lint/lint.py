"""Runs all checks over files of rules that have no errors.

``# trainwarden disable NAME…`` within a rule, or in the comments right above it, switches checks off for the rule;
``# trainwarden file/disable NAME…`` for the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainwarden.rules.core.alerts import Hold
from trainwarden.rules.core.language.parser import Parser
from trainwarden.rules.core.language.syntax import Tree
from trainwarden.rules.rulefiles import rules_in
from trainwarden.rules.yamltext import Document, load

from .checks import CHECKS
from .subject import Context, Finding, Subject

#: Steps of the longest start of a run, unless said otherwise: few go on for so long without a restart.
LONGEST_RUN = 50_000

_COMMENT = re.compile(r"#\s*trainwarden (file/)?disable((?:\s+[a-z]+/[a-z]+)+)\s*$")


def lint(texts: Iterable[tuple[str, str]], longest_run: int = LONGEST_RUN) -> list[Finding]:
    """Return what is suspicious in rule files, each ``(text, source)``, in the order of the files. They must have no errors."""
    parser = Parser()
    documents = [load(text, source) for text, source in texts]
    subjects = tuple(subject for document in documents for subject in _subjects(document, parser))
    context = Context(subjects, longest_run)
    off = {id(document): _switched_off(document) for document in documents}
    found = []
    for subject in subjects:
        first, ends = _first_line(subject), _last_line(subject, subjects)
        for check in CHECKS:
            for finding in check(subject, context):
                if not _is_off(finding.check, off[id(subject.document)], first, ends):
                    found.append(finding)
    order = {document.source: place for place, document in enumerate(documents)}
    return sorted(found, key=lambda one: (order[one.problem.source], one.problem.line, one.problem.column))


def _subjects(document: Document, parser: Parser) -> Iterator[Subject]:
    records: dict[str, Tree] = {}
    own = frozenset(document.value.get("signals") or ())
    for place, rule in rules_in(document):
        kind = "alert" if "alert" in rule else "record"
        tree = parser.parse(rule["expr"])
        hold = Hold.parse(rule["for"]) if rule.get("for") else Hold()
        labels, annotations = _texts(rule.get("labels")), _texts(rule.get("annotations"))
        name = rule[kind]
        yield Subject(
            document,
            place,
            "alert" if kind == "alert" else "record",
            name,
            rule["expr"],
            tree,
            hold,
            labels,
            annotations,
            dict(records),
            own,
        )
        if kind == "record":
            records[name] = tree


def _texts(value: Any) -> Mapping[str, str]:
    return dict(value) if isinstance(value, dict) else {}


def _switched_off(document: Document) -> list[tuple[int, str]]:
    """Return (line, check) of each comment that switches something off; line 0 is the whole file."""
    found = []
    for number, line in enumerate(document.lines, start=1):
        comment = _COMMENT.search(line)
        if comment:
            found += [(0 if comment[1] else number, name) for name in comment[2].split()]
    return found


def _is_off(name: str, off: list[tuple[int, str]], first: int, last: int) -> bool:
    return any(name == known and (line == 0 or first <= line <= last) for line, known in off)


def _first_line(subject: Subject) -> int:
    """Return the first line of a rule: that of the comments right above it."""
    lines = subject.document.lines
    first = subject.document.position(subject.place)[0]
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return first


def _last_line(subject: Subject, subjects: tuple[Subject, ...]) -> int:
    """Return the last line of a rule: the one before the next rule's comments."""
    lines = subject.document.lines
    first = subject.document.position(subject.place)[0]
    behind = [
        line
        for other in subjects
        if other.document is subject.document and (line := other.document.position(other.place)[0]) > first
    ]
    last = min(behind, default=len(lines) + 1) - 1
    while last > first and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
        last -= 1
    return last
