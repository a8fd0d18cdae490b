"""CSV as people and scripts write it: one header line, then numbers."""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.tables import Table, looks_like_table

_KNOWN = re.compile(r"step|iter|loss|epoch|grad|lr|norm", re.IGNORECASE)


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    names = looks_like_table(head)
    if names is None:
        return 0.0
    known = any(_KNOWN.search(one) for one in names)
    rows = sum(bool(line.strip()) for line in head[:5]) > 1
    if len(names) < 2 and not (known and rows):
        return 0.0
    if rows:
        return 0.6 if known else 0.3
    return 0.5 if known and name.lower().removesuffix(".gz").endswith((".csv", ".tsv")) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return Table(notices)
