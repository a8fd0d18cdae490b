"""JSON Schemas of the files that people write, for their editors: made from the models, with a committed copy beside this file.

``trainwarden check schema rules > rules/schema/rules.json`` makes a copy anew; a test compares. A schema sees shape and spelling; what
an expression means is checked by ``trainwarden check``.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

import msgspec

from trainwarden.rules.config import Config
from trainwarden.rules.fields import Seconds
from trainwarden.rules.ruletests.testfile import RuleTests

from .rulefile import MODELS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: The root model of each schema, what belongs to it, and its title.
_FILES: dict[str, tuple[tuple[type[msgspec.Struct], ...], str]] = {
    "rules": (MODELS, "Rules of trainwarden"),
    "config": ((Config,), "Configuration of the trainwarden daemon"),
    "tests": ((RuleTests,), "Unit tests of rules of trainwarden"),
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of ``rules``, ``config`` or ``tests``."""
    models, title = _FILES[name]
    made: dict[Any, Any] = {}
    plain = [_plain(model, made) for model in models]
    (root, *_), components = msgspec.json.schema_components(plain, schema_hook=_hook, ref_template="#/$defs/{name}")
    for component in components.values():
        if "properties" in component:
            component["additionalProperties"] = False
    for model in _structs(models):
        _describe(model, components)
    components.get("Config", {}).get("properties", {}).pop("base", None)  # where the file lies, not what stands in it
    components.get("Settings", {}).get("properties", {}).pop("planned_changes", None)  # at the top of the file
    return {"$schema": DIALECT, "title": title, **root, "$defs": components}


def to_json(schema: dict[str, Any]) -> bytes:
    """Encode a schema as it is committed."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"


def _hook(kind: type) -> dict[str, Any]:
    if kind is Seconds:
        number = {"type": "number", "exclusiveMinimum": 0}
        text = {"type": "string", "pattern": r"^\s*[0-9.]+\s*(ms|s|m|h|d)?\s*$"}
        return {"anyOf": [number, text], "description": "A duration: 500ms, 2s, 5m, or a number of seconds."}
    raise NotImplementedError(kind)


def _plain(kind: Any, made: dict[Any, Any]) -> Any:
    """Return a model with plain defaults: msgspec writes down no default of a type that it does not know."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in made:
            hints = typing.get_type_hints(kind, include_extras=True)
            fields = [(one.name, _plain(hints[one.name], made), _default(one)) for one in msgspec.structs.fields(kind)]
            made[kind] = msgspec.defstruct(kind.__name__, fields, kw_only=True, namespace={"__doc__": kind.__doc__})
        return made[kind]
    inside = tuple(_plain(one, made) for one in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return list[inside]  # type: ignore[valid-type]
    if typing.get_origin(kind) is tuple:
        return tuple[inside]  # type: ignore[valid-type]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return reduce(or_, inside)
    return kind


def _default(field: Any) -> Any:
    if isinstance(field.default, msgspec.Struct):
        return msgspec.field(name=field.encode_name, default_factory=type(field.default))
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(name=field.encode_name, default_factory=field.default_factory)
    default = float(field.default) if isinstance(field.default, Seconds) else field.default
    return msgspec.field(name=field.encode_name, default=default)


def _structs(models: tuple[type[msgspec.Struct], ...]) -> list[type[msgspec.Struct]]:
    """Return the models and all that they hold."""
    found: dict[type[msgspec.Struct], None] = {}
    waiting: list[Any] = list(models)
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            if one not in found:
                found[one] = None
                waiting += inspect.get_annotations(one, eval_str=True).values()
        else:
            waiting += getattr(one, "__args__", ())
    return list(found)


def _describe(model: type[msgspec.Struct], components: dict[str, Any]) -> None:
    """Put the texts that stand below the fields of a model into its schema."""
    properties = components.get(model.__name__, {}).get("properties", {})
    (found,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(found, ast.ClassDef)
    for field, below in pairwise(found.body):
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            properties.get(field.target.id, {}).setdefault("description", " ".join(text.split()))
