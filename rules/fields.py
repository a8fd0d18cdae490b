"""Turning a YAML value into a model, with all of its errors at once and the line of each.

msgspec stops at the first error; an operator who mistyped three fields should not need three tries. So objects are
walked here, field by field, and msgspec converts the leaves. Nothing here knows what the fields mean.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

Path = tuple[str | int, ...]
Model = TypeVar("Model", bound=msgspec.Struct)

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Seconds(float):
    """A duration in seconds. In a file: a number of seconds, or a number with ``ms``, ``s``, ``m``, ``h`` or ``d``."""


def seconds(text: str | float) -> Seconds:
    """Read a duration.

    Raises:
        ValueError: it is not a positive number with an optional unit.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        value = float(text)
    else:
        written = str(text).strip()
        unit = next((unit for unit in ("ms", "s", "m", "h", "d") if written.endswith(unit)), "")
        try:
            value = float(written.removesuffix(unit)) * _DURATION_UNITS.get(unit, 1.0)
        except ValueError:
            raise ValueError(f"{text!r} is no duration; write for example 500ms, 2s or 5m") from None
    if not 0 < value < 1e9:
        raise ValueError(f"{text!r} is no positive duration")
    return Seconds(value)


def _hook(kind: type, value: Any) -> Any:
    if kind is Seconds:
        return seconds(value)
    raise NotImplementedError(kind)


def convert(
    value: Any, model: type[Model], complain: Callable[[Path, str], None], path: Path = (), *, pass_over: bool = False
) -> Model | None:
    """Convert a mapping to ``model``; every error goes to ``complain(path, says)``, and then None comes back.

    With ``pass_over``, unknown fields are complained of and passed over, for who can say more of the rest.
    """
    if not isinstance(value, dict):
        complain(path, f"expected an object with {_names(model)}, got {_kind(value)}")
        return None
    fine = True
    hints = typing.get_type_hints(model, include_extras=True)
    fields = {field.encode_name: field for field in msgspec.structs.fields(model)}
    for key in value:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {_names(model)}"
            complain((*path, key), f"unknown field{hint}")
            fine = pass_over and fine
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in value:
            if field.required:
                complain(path, f"field {name} is missing")
                fine = False
            continue
        before = fine
        converted = _convert_any(value[name], hints[field.name], complain, (*path, name), pass_over)
        fine = before and converted is not _WRONG
        arguments[field.name] = converted
    if not fine:
        return None
    try:
        return model(**arguments)
    except (ValueError, TypeError) as error:
        complain(path, str(error))
        return None


_WRONG = object()


def _convert_any(value: Any, kind: Any, complain: Callable[[Path, str], None], path: Path, pass_over: bool) -> Any:
    inner = _struct_in(kind)
    if inner is not None and value is not None:
        converted = convert(value, inner, complain, path, pass_over=pass_over)
        return _WRONG if converted is None else converted
    if typing.get_origin(kind) is list and isinstance(value, list):
        (of,) = typing.get_args(kind)
        items = [_convert_any(item, of, complain, (*path, index), pass_over) for index, item in enumerate(value)]
        return _WRONG if any(item is _WRONG for item in items) else items
    try:
        return msgspec.convert(value, kind, dec_hook=_hook)
    except (msgspec.ValidationError, ValueError) as error:
        says = str(error).split(" - at `$")[0]
        values = _values(kind) if says.startswith("Invalid enum value") else []
        complain(path, f"{value!r} is none of {', '.join(values)}" if values else says)
        return _WRONG


def _values(kind: Any) -> list[str]:
    """Return the values that a field may have, where that is a short list of words."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(value) for value in typing.get_args(kind)]
    return [value for item in typing.get_args(kind) for value in _values(item)]


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the model that ``kind`` is, or is optionally."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [_struct_in(item) for item in typing.get_args(kind) if item is not type(None)]
        return found[0] if len(found) == 1 else None
    return None


def _names(model: type[msgspec.Struct]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(model))


def _kind(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return words.get(type(value), "nothing" if value is None else type(value).__name__)


def where(path: Path) -> str:
    """Write a path as people read it: ``sources[0].token_file``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
