"""Megatron-LM's text log, and those of its descendants: `` iteration 10/ 1000 | consumed samples: 160 | … | lm loss: 7.4E+00 |``.

A line holds means and counts over the log interval. Where every iteration of it was skipped, there is no loss.
Older versions write no colon before the value.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.texts import NUMBER, STEP, TextLog, share_of, value_of

_LINE = re.compile(rb"\biteration\s+(\d+)\s*/\s*(?:\d+|infinity)\s*\|(.*)\|")
_PART = re.compile(rb"\s*([A-Za-z][^|:]*?(?:\([^)]*\))?)\s*:?\s+(" + NUMBER + rb")(?:/\S+)?\s*", re.IGNORECASE)
_VALIDATION = re.compile(rb"validation loss at iteration\s+(\d+)(?P<set> on \S+ set)?\s*\|(.*)\|")
#: Seconds in the unit that the time of an iteration is given in.
_UNITS = {b"elapsed time per iteration (ms)": 0.001, b"elapsed time per iteration (s)": 1.0}


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    return 0.95 if share_of(head, _LINE.search) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return TextLog(notices, parse)


def parse(line: bytes) -> dict[str, float] | None:
    """Return the numbers of a line."""
    found = _LINE.search(line)
    if found is None:
        return _validation(line)
    values = {STEP: float(found[1])}
    for part in found[2].split(b"|"):
        pair = _PART.fullmatch(part)
        if pair is None:
            continue
        name, value = pair[1].strip(), value_of(pair[2])
        if value is None:
            continue
        unit = _UNITS.get(name)
        if unit is None:
            values[name.decode(errors="replace")] = value
        else:
            values["step_duration_seconds"] = value * unit
    return values


def _validation(line: bytes) -> dict[str, float] | None:
    found = _VALIDATION.search(line)
    if found is None or found["set"]:  # the extra passes at the end draw other batches
        return None
    values = {STEP: float(found[1])}
    for part in found[3].split(b"|"):
        pair = _PART.fullmatch(part)
        value = None if pair is None else value_of(pair[2])
        if pair is not None and value is not None:
            values[f"validation/{pair[1].decode(errors='replace').removesuffix(' value')}"] = value
    return values if len(values) > 1 else None
