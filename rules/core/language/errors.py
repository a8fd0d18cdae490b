"""What is wrong with a rule file: every problem at once, each with file, line, column and a caret."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from trainwarden.rules.yamltext import Problem


class ExpressionError(ValueError):
    """Something in an expression cannot be; ``offset`` is the character of its text at which it stands."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset
        self.message = message


class RuleErrors(ValueError):
    """A rule file that cannot be used. ``problems`` are all of its errors, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.source, problem.line, problem.column)))
        super().__init__("\n".join(map(str, self.problems)))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean grad_norm?`` where a known word is close to ``word``, else an empty text."""
    close = get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
