"""Annotations: the texts of a rule for people, templates that are filled in where they are shown.

Sandboxed Jinja2 with the variables ``value`` (a float; NaN where the rule compared no number), ``since`` and ``step`` (steps)
and ``labels``. An unknown variable is an error and never an empty text. The core knows what a rule compared and never what it says:
texts are made where its effects leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import msgspec

from trainwarden.rules.core.effects import Deliver, Effect, Save
from trainwarden.rules.core.language import Pack
from trainwarden.rules.core.language.errors import did_you_mean

#: The names that a template may use.
VARIABLES = ("labels", "since", "step", "value")


class AnnotationError(ValueError):
    """An annotation that cannot be filled in; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a template: the word at which it goes wrong, empty where there is none."""

    word: str
    says: str


def annotated(effect: Effect, pack: Any) -> Effect:
    """Return an effect whose incident, if it holds one, has the annotations of its rules filled in.

    Both drivers do this where effects leave the core. A template that cannot be filled in says so in its text: no incident is lost by it.
    """
    if not isinstance(pack, Pack):
        return effect
    if isinstance(effect, Save) and effect.kind == "incident":
        return msgspec.structs.replace(effect, row=_with_texts(effect.row, pack))
    if isinstance(effect, Deliver):
        for place, name in (("incident", "rules"), ("data", "alerts")):
            holder = effect.body.get(place)
            if isinstance(holder, dict) and name in holder:
                body = {**effect.body, place: _with_texts(holder, pack, name)}
                return msgspec.structs.replace(effect, body=body)
    return effect


def _with_texts(row: dict[str, Any], pack: Pack, name_of_list: str = "rules") -> dict[str, Any]:
    rules = []
    for seen in row.get(name_of_list, []):
        rule = pack.rules.get(seen["alert"])
        texts = {}
        for name, template in rule.annotations.items() if rule is not None else ():
            value = math.nan if seen["value"] is None else float(seen["value"])
            try:
                texts[name] = _fill(template, value, seen["since"], seen["step"], rule.labels if rule else {})
            except AnnotationError as error:
                texts[name] = f"({name} cannot be filled in: {error})"
        rules.append({**seen, "annotations": texts})
    return {**row, name_of_list: rules}


@cache
def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


@lru_cache(maxsize=1000)
def _template(text: str) -> Any:
    return _environment().from_string(text)


def check(template: str, labels: Mapping[str, str]) -> Fault | None:
    """Return what is wrong with a template, if anything: it is compiled and filled in once with made-up numbers."""
    from jinja2 import TemplateSyntaxError, meta

    environment = _environment()
    try:
        unknown = sorted(meta.find_undeclared_variables(environment.parse(template)) - set(VARIABLES))
        if unknown:
            hint = did_you_mean(unknown[0], VARIABLES) or f"; there are {', '.join(VARIABLES)}"
            return Fault(unknown[0], f"unknown variable {unknown[0]!r}{hint}")
        _fill(template, 1.5, 1, 2, labels)
    except TemplateSyntaxError as error:
        return Fault("", f"no template: {error.message}")
    except AnnotationError as error:
        return Fault("", str(error))
    return None


def render(
    annotations: Mapping[str, str], *, value: float | None, since: int, step: int, labels: Mapping[str, str]
) -> dict[str, str]:
    """Return the annotations of an alert filled in.

    Raises:
        AnnotationError: a template cannot be filled in.
    """
    texts = {}
    for name, template in annotations.items():
        try:
            texts[name] = _fill(template, value, since, step, labels)
        except AnnotationError as error:
            raise AnnotationError(f"annotation {name}: {error}") from None
    return texts


def _fill(template: str, value: float | None, since: int, step: int, labels: Mapping[str, str]) -> str:
    from jinja2 import TemplateError

    number = math.nan if value is None else value
    try:
        text: str = _template(template).render(value=number, since=since, step=step, labels=dict(labels))
    except TemplateError as error:
        raise AnnotationError(error.message or str(error)) from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise AnnotationError(f"{type(error).__name__}: {error}") from None
    return text
