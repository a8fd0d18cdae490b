"""llm.c: what it prints (``step 13/18865 | loss 8.96 (+1.2z)| norm 2.0 (-0.3z)| lr 1.0e-04 | …``) and its ``main.log``
(``s:13 trl:8.96 lr:0.0001 norm:2.0``, ``s:250 tel:6.1``). So do several trainers made after it.

What it prints counts from 1, ``main.log`` from 0; the numbers stay as they are.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.texts import NUMBER, STEP, TextLog, share_of, value_of

_PRINTED = re.compile(rb"(?:^|.*?[\s:\]])step:?\s+(\d+)(?:\s*/\s*\d+)?\s*(?:\([^)]*\)\s*)?\|(.*)")
_PART = re.compile(rb"\s*([A-Za-z][A-Za-z_ ]*?):?\s*(" + NUMBER + rb")(?![A-Za-z%])", re.IGNORECASE)
_LOGGED = re.compile(rb"(?:^|.*?[:\]])\s*s:(\d+)((?:\s+[a-z_]+:\S+)+)\s*$")
_NAMES = {b"trl": "loss", b"tel": "val_loss", b"eval": "eval_accuracy"}


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    return 0.85 if share_of(head, lambda line: "loss" in (parse(line) or ())) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return TextLog(notices, parse)


def parse(line: bytes) -> dict[str, float] | None:
    """Return the numbers of a line."""
    found = _LOGGED.match(line)
    values: dict[str, float] = {}
    if found is not None:
        for pair in found[2].split():
            name, _, text = pair.partition(b":")
            value = value_of(text)
            if value is not None:
                values[_NAMES.get(name) or _name(name)] = value
    else:
        found = _PRINTED.match(line)
        if found is None:
            return None
        for part in found[2].split(b"|"):
            pair_found = _PART.match(part)
            value = None if pair_found is None else value_of(pair_found[2])
            if pair_found is not None and value is not None:
                values[_name(pair_found[1])] = value
    return {STEP: float(found[1]), **values} if values else None


def _name(name: bytes) -> str:
    words = name.strip().lower().decode()
    return {"train loss": "loss", "norm": "grad_norm"}.get(words, words)
