"""CSV exports of Weights & Biases: a chart's (``"Step","run - train/loss","run - train/loss__MIN",…``) or a run's history.

Where a chart holds several runs, the first one is read and the others are named in a notice.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.tables import Table, looks_like_table

_OF_RUN = re.compile(r"(?P<run>.+?) - (?P<metric>.+)")
_EXTREMES = ("__MIN", "__MAX")


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    names = looks_like_table(head)
    if names is None:
        return 0.0
    known = set(names)
    if any(_OF_RUN.fullmatch(one) and f"{one}__MIN" in known for one in names):
        return 0.95
    if any(_OF_RUN.fullmatch(one) for one in names) and (
        "Step" in known or any(one.endswith(" - _step") for one in names)
    ):
        return 0.9
    return 0.7 if {"_step", "_runtime"} <= known or {"_step", "_timestamp"} <= known else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""

    def rename(names: list[str]) -> list[str]:
        found = [_OF_RUN.fullmatch(one) for one in names]
        runs = list(dict.fromkeys(match["run"] for match in found if match))
        if len(runs) > 1:
            says = f"The export holds {len(runs)} runs; {runs[0]} is read. The others: {', '.join(runs[1:9])}."
            notices.add("several_runs", says)
        named = []
        for one, match in zip(names, found, strict=True):
            if one.endswith(_EXTREMES) or (match and match["run"] != runs[0]):
                named.append("")
            else:
                named.append(match["metric"] if match else one)
        return named if len(set(named)) > 1 else names

    return Table(notices, rename, sparse=True)
