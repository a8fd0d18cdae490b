"""``metrics.csv`` of Lightning's CSVLogger: a row a call of ``log``, so that most cells are blank."""

from __future__ import annotations

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.tables import Table, looks_like_table


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    names = looks_like_table(head)
    if names is None or not {"epoch", "step"} <= set(names):
        return 0.0
    return 0.8 if name.removesuffix(".gz").endswith("metrics.csv") else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return Table(notices, sparse=True)
