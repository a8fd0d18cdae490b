"""What is wrong with a rule file: every problem at once, each with file, line, column and a caret."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from trainwarden.rules.yamltext import Problem

#: Letters from which on a word may be wrong in two.
SHORT = 5


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


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean median?`` where ``word`` is a slip of the pen from a known one: one letter, in longer words two."""
    most = 1 if len(word) < SHORT else 2
    found = min(((_slips(word, one), one) for one in known), default=(most + 1, ""))
    return f"; did you mean {found[1]}?" if found[0] <= most else ""


def _slips(word: str, other: str) -> int:
    """Return how many letters are left out, put in, changed or swapped with the next between two words."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(word, start=1):
        earlier, before, row = before, row, [i]
        for j, b in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and word[i - 2] == b:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]
