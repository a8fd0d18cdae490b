"""Objects in a log: JSON, and the dictionaries that Python prints, alone in a line or behind a prefix; and the numbers in them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from .columns import told_by
from .rows import number

_DEEPEST = 8
#: No text longer than this is a number or a time.
_LONGEST = 64
#: What Python prints in the place of JSON's words, outside of quotes.
_PYTHON = {"nan": "NaN", "inf": "Infinity", "True": "true", "False": "false", "None": "null"}
_TOKEN = re.compile(r"'((?:[^'\\]|\\.)*)'|\"(?:[^\"\\]|\\.)*\"|[A-Za-z_]+")


def object_of(line: bytes) -> dict[str, Any] | None:
    """Return the object that a line is or ends with, or None."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = _loosely(line)
    return found if isinstance(found, dict) else None


def _loosely(line: bytes) -> Any:
    begin, end = line.find(b"{"), line.rfind(b"}")
    if not 0 <= begin < end or line[end + 1 :].strip():
        return None
    text = line[begin : end + 1].decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_TOKEN.sub(_as_json, text))
    except (ValueError, RecursionError):
        return None


def _as_json(found: re.Match[str]) -> str:
    if found[1] is not None:
        return json.dumps(found[1])
    return _PYTHON.get(found[0], found[0])


def numbers_of(given: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, float]:
    """Return the numbers of an object by their names, those of inner ones with slashes; also numbers and times that are written as texts."""
    values: dict[str, float] = {}
    for key, value in given.items():
        name = f"{prefix}/{key}" if prefix else key
        if isinstance(value, int | float):
            try:
                values[name] = float(value)
            except OverflowError:
                continue
        elif isinstance(value, str):
            read = _read(key, value)
            if read is not None:
                values[name] = read
        elif isinstance(value, dict) and depth < _DEEPEST:
            values.update(numbers_of(value, name, depth + 1))
    return values


def _read(name: str, text: str) -> float | None:
    if len(text) > _LONGEST:
        return None
    try:
        return number(text.encode())
    except ValueError:
        return told_by(name, text.encode())
