"""Lines of any other program that name their numbers: ``step=10 loss=2.3``, ``Step [10/60], Loss: 2.3, LR: 1e-4``, ``iter 10 | loss train: 2.3``.

A line counts if it has a step and a loss. A number goes by the words before it; one with a unit is left out.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.texts import NUMBER, STEP, TextLog, share_of, value_of

_STEP = re.compile(
    rb"(?<![A-Za-z/])(?:global[_ ]?step|train(?:ing)?[_ ]?step|steps?|iter(?:ation)?s?|num_updates|updates?)"
    rb"\s*[:=#]?\s*\[?\s*(\d{1,3}(?:,\d{3})+|\d+)(?![\d.]*[A-Za-z%])(?!\.\d)",
    re.IGNORECASE,
)
#: No letters or digits may follow: a unit, a date, a version.
_END = rb"(?![\w%:/]|\.\w)"
_NAMED = re.compile(
    rb"([A-Za-z][\w/.\-]*(?: \(?[A-Za-z][\w/.\-]*\)?){0,2})\s*[:=]\s*(" + NUMBER + rb")" + _END, re.IGNORECASE
)
_SPACED = re.compile(rb"(?<![\w/.\-])([A-Za-z][\w/\-]*) (" + NUMBER + rb")" + _END, re.IGNORECASE)
#: Lines that a format must have before it is taken for one.
_ENOUGH = 2


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    return 0.2 if share_of(head, parse) >= _ENOUGH else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return TextLog(notices, parse)


def parse(line: bytes) -> dict[str, float] | None:
    """Return the numbers of a line that has a step and a loss."""
    lowered = line.lower()
    if b"loss" not in lowered or not (b"step" in lowered or b"iter" in lowered or b"update" in lowered):
        return None
    step = _STEP.search(line)
    if step is None:
        return None
    values: dict[str, float] = {}
    for form in (_NAMED, _SPACED):
        for name, text in form.findall(line):
            value = value_of(text)
            if value is not None and not _STEP.match(name + b" " + text):
                values.setdefault(b" ".join(name.split()).decode(), value)
    if not any("loss" in name.lower() for name in values):
        return None
    return {STEP: float(step[1].replace(b",", b"")), **values}
