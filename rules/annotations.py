"""Annotations: the texts of a rule for people, templates that are filled in where they are shown.

Sandboxed Jinja2 with the variables ``value`` (a float; NaN where the rule compared no number), ``since`` and ``step`` (steps)
and ``labels``. An unknown variable is an error and never an empty text. The core hands templates on as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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


@cache
def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False, cache_size=1000)


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
        text: str = (
            _environment().from_string(template).render(value=number, since=since, step=step, labels=dict(labels))
        )
    except TemplateError as error:
        raise AnnotationError(error.message or str(error)) from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise AnnotationError(f"{type(error).__name__}: {error}") from None
    return text
