"""torchtitan's text log: ``[rank0]:… - root - INFO - step: 10  loss: 7.7  grad_norm: 1.2  memory: 31.2GiB(40%)  tps: 1,200``.

Colours are taken off. Every rank may print the same global numbers: the first rank that does is read. Lines of a validation
belong to the evaluation.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.texts import NUMBER, STEP, TextLog, share_of, value_of

_LINE = re.compile(
    rb"(?P<kind>validate\s+|validation:?\s+|evaluation:?\s+)?\bstep:\s*(?P<step>\d+)\s\s*(?P<rest>loss:.*)"
)
_PAIR = re.compile(rb"([A-Za-z_]+):\s*(" + NUMBER + rb")(GiB|%|ms)?(?=[\s(]|$)", re.IGNORECASE)
_RANK = re.compile(rb"^\[(?:rank|default)?(\d+)\]:")


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    return 0.85 if share_of(head, _LINE.search) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return TextLog(notices, _Parser().parse)


class _Parser:
    def __init__(self) -> None:
        self._rank: bytes | None = None
        self._found = False

    def parse(self, line: bytes) -> dict[str, float] | None:
        """Return the numbers of a line."""
        found = _LINE.search(line)
        if found is None:
            return None
        ranked = _RANK.match(line)
        rank = ranked[1] if ranked else None
        if not self._found:
            self._rank, self._found = rank, True
        if rank != self._rank:
            return None
        prefix = "val/" if found["kind"] else ""
        values: dict[str, float] = {}
        for name, text, unit in _PAIR.findall(found["rest"]):
            value = value_of(text)
            if value is None or (prefix and name != b"loss"):
                continue
            words = name.decode()
            values[prefix + (f"{words}_gib" if unit == b"GiB" else f"{words}_percent" if unit == b"%" else words)] = (
                value
            )
        return {STEP: float(found["step"]), **values} if values else None
