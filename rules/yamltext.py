"""YAML text to plain values, strictly, with the place of each value kept.

PyYAML reads YAML 1.1 and lets the last of two equal keys win without a word. Rule files and the daemon's configuration
need neither: here numbers and booleans are those of YAML 1.2's core schema (``1e-3`` is a number; ``on``, ``12:30`` and
dates are texts), a duplicate key is an error, and no tag makes an object. Nothing in this module opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml

#: Where a value stands in a document: the keys and indices that lead to it. ``()`` is the document itself.
Path: TypeAlias = tuple[str | int, ...]

#: Aliases may multiply a small text into a huge value; more nodes than this are refused.
MOST_NODES = 100_000

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)

# Within double quotes: how many digits an escape takes, and which escapes stand for white space or for none at all.
_ESCAPED_DIGITS = MappingProxyType({"x": 2, "u": 4, "U": 8})
_ESCAPED_SPACES = frozenset({"", " ", "\t", "n", "r", "t", "v", "f", "_", "N", "L", "P"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a text file, at a line and column (from 1), with the line it stands in."""

    source: str
    line: int
    column: int
    message: str
    text: str = ""

    def __str__(self) -> str:
        said = f"{self.source}:{self.line}:{self.column}: {self.message}"
        if not self.text.strip():
            return said
        pad = "".join("\t" if char == "\t" else " " for char in self.text[: self.column - 1])
        return f"{said}\n    {self.text}\n    {pad}^"


class YamlError(ValueError):
    """A text that is not YAML as read here. ``problems`` lists what is wrong; the message shows all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line, problem.column)))
        super().__init__("\n".join(map(str, self.problems)))


class _Loader(yaml.SafeLoader):
    """PyYAML's reader, scanner, parser and composer with the scalars of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", _NULL, [*"~nN", ""]),
    ("bool", _BOOL, [*"tTfF"]),
    ("int", _INT, [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)


@dataclass(frozen=True, slots=True)
class Document:
    """A document's ``value`` in plain Python and, for each part of it, its place in the text."""

    value: Any
    source: str
    lines: tuple[str, ...]
    _nodes: dict[Path, yaml.Node]
    _keys: dict[Path, yaml.Node]

    def position(self, path: Path) -> tuple[int, int]:
        """Return line and column (from 1) of the value at ``path``, or of the nearest part that holds it."""
        node = self._nearest(self._nodes, path)
        return (1, 1) if node is None else (node.start_mark.line + 1, node.start_mark.column + 1)

    def key_position(self, path: Path) -> tuple[int, int]:
        """Return line and column of the key that leads to ``path``; of the value, where it is an item of a list."""
        key = self._keys.get(path)
        return self.position(path) if key is None else (key.start_mark.line + 1, key.start_mark.column + 1)

    def locate(self, path: Path, offset: int) -> tuple[int, int]:
        """Return line and column of character ``offset`` of the text at ``path``, whatever way it is quoted or folded.

        The characters of a scalar stand in the file in the same order, with quotes, escapes and indentation between
        them: walk both side by side.
        """
        node = self._nodes.get(path)
        if not isinstance(node, yaml.ScalarNode):
            return self.position(path)
        line, column = node.start_mark.line, node.start_mark.column
        if node.style in ("|", ">"):
            line, column = line + 1, 0
        elif node.style in ("'", '"'):
            column += 1
        place = last = (line, column)
        for char in node.value[: offset + 1]:
            if char.isspace():
                continue
            found = self._next(char, *place, node.style == '"')
            if found is None:
                break
            last, place = found, (found[0], found[1] + self._width(*found, node.style == '"'))
        whole = node.value[: offset + 1]
        if offset >= len(node.value) or whole[-1:].isspace():
            behind = bool(whole.strip())
            return last[0] + 1, last[1] + (2 if behind else 1)
        return last[0] + 1, last[1] + 1

    def problem(self, place: tuple[int, int], message: str) -> Problem:
        """Return a problem at ``place`` (line, column) of this document, with its line for the caret."""
        line, column = place
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        return Problem(self.source, line, column, message, text)

    def _next(self, char: str, line: int, column: int, escapes: bool) -> tuple[int, int] | None:
        """Return where ``char`` stands at or behind (line, column), both from 0."""
        while line < len(self.lines):
            text = self.lines[line]
            found = text.find(char, column)
            escape = text.find("\\", column) if escapes else -1
            if escape < 0 or 0 <= found < escape:
                if found >= 0:
                    return line, found
                line, column = line + 1, 0
                continue
            kind = text[escape + 1 : escape + 2]
            column = escape + 2 + _ESCAPED_DIGITS.get(kind, 0)
            if kind not in _ESCAPED_SPACES:
                return line, escape
        return None

    def _width(self, line: int, column: int, escapes: bool) -> int:
        if not escapes or self.lines[line][column] != "\\":
            return 1
        return 2 + _ESCAPED_DIGITS.get(self.lines[line][column + 1 : column + 2], 0)

    @staticmethod
    def _nearest(nodes: dict[Path, yaml.Node], path: Path) -> yaml.Node | None:
        while path and path not in nodes:
            path = path[:-1]
        return nodes.get(path)


def load(text: str, source: str, doubled: list[Problem] | None = None) -> Document:
    """Read one YAML document. An empty text has the value None.

    Where ``doubled`` is given, keys that occur twice are put there and the first of each counts, so that whoever reads the
    document can say what else is wrong with it. What is said of them is an error all the same.

    Raises:
        YamlError: the text is no YAML, holds several documents, a key occurs twice in one mapping, a key is not a
            scalar, a tag asks for an object, or aliases nest without end. ``source`` names the file in the message.
    """
    lines = tuple(text.splitlines())

    def problem(mark: Any, message: str) -> Problem:
        line, column = (mark.line, mark.column) if mark is not None else (0, 0)
        return Problem(source, line + 1, column + 1, message, lines[line] if line < len(lines) else "")

    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise YamlError([problem(*_broken(text, error))]) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
        message = f"character {error.character!r} is not allowed in YAML"
        raise YamlError([Problem(source, line + 1, column + 1, message)]) from None
    except RecursionError:
        raise YamlError([Problem(source, 1, 1, "nested too deeply")]) from None

    nodes: dict[Path, yaml.Node] = {}
    keys: dict[Path, yaml.Node] = {}
    problems: list[Problem] = []
    twice: list[Problem] = []
    open_nodes: set[int] = set()

    def build(node: yaml.Node, path: Path) -> Any:
        if len(nodes) >= MOST_NODES:
            raise YamlError([problem(node.start_mark, f"more than {MOST_NODES} values")])
        if id(node) in open_nodes:
            raise YamlError([problem(node.start_mark, "an alias that contains itself")])
        nodes[path] = node
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, problem, problems)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            problems.append(problem(node.start_mark, f"tag {node.tag!r} is not supported"))
            return None
        open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [build(item, (*path, index)) for index, item in enumerate(node.value)]
            return mapping(node, path)
        finally:
            open_nodes.discard(id(node))

    def mapping(node: yaml.Node, path: Path) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, item in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(problem(key_node.start_mark, "a key must be a plain text or number"))
                continue
            key = _scalar(key_node, problem, problems)
            if key in found:
                first = keys[(*path, key)].start_mark.line + 1
                twice.append(problem(key_node.start_mark, f"duplicate key {key!r}, first given in line {first}"))
                continue
            keys[(*path, key)] = key_node
            found[key] = build(item, (*path, key))
        return found

    try:
        value = None if node is None else build(node, ())
    except RecursionError:
        raise YamlError([Problem(source, 1, 1, "nested too deeply")]) from None
    if problems or (twice and doubled is None):
        raise YamlError(problems + twice)
    if doubled is not None:
        doubled += twice
    return Document(value, source, lines, nodes, keys)


def _broken(text: str, error: yaml.MarkedYAMLError) -> tuple[Any, str]:
    """Return where a text stops being YAML, and why. A quote that is never closed is named itself, not where the text ends."""
    said = " ".join(part for part in (error.context, error.problem) if part)
    mark, began = error.problem_mark or error.context_mark, error.context_mark
    if mark is None:
        return None, said
    if began is not None and "quoted scalar" in (error.context or ""):
        return (began, "the quote that begins here is not closed") if "end of stream" in said else (mark, said)
    quoted = None
    try:
        for token in yaml.scan(text, Loader=_Loader):
            if token.start_mark.index >= mark.index:
                break
            if isinstance(token, yaml.ScalarToken) and token.style in ("'", '"'):
                quoted = token
    except yaml.YAMLError:
        pass
    if quoted is not None and quoted.start_mark.line < quoted.end_mark.line == mark.line:
        ends = quoted.end_mark.line + 1
        return (
            quoted.start_mark,
            f"the quote that begins here ends only in line {ends}, where no text can end: is it closed?",
        )
    if began is not None and mark.index >= len(text.rstrip()):
        return began, said
    return mark, said


def _scalar(node: yaml.ScalarNode, problem: Any, problems: list[Problem]) -> Any:
    text = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind == "str":
        return text
    try:
        if kind == "null" and _NULL.match(text):
            return None
        if kind == "bool" and _BOOL.match(text):
            return text.lower() == "true"
        if kind == "int" and _INT.match(text):
            return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
        if kind == "float" and _FLOAT.match(text):
            return float(re.sub(r"\.(?=[iInN])", "", text))
    except ValueError:
        problems.append(problem(node.start_mark, f"{text[:40]}… is too large a number"))
        return None
    if kind in ("null", "bool", "int", "float"):
        problems.append(problem(node.start_mark, f"{text!r} is no {kind}"))
    else:
        problems.append(problem(node.start_mark, f"tag {node.tag!r} is not supported"))
    return None
