"""Suspect samples as data to leave out: what a new run is started with (``Exporter(…, exclude=FILE)``).

It works on the rows that the memory shows (``core/sightings.row``), whether a daemon or a replay remembered them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainwarden.plan import Exclusion, Exclusions, encode, merge_ranges
from trainwarden.record import Ranges

#: States in which samples are still suspect.
STANDING = ("suspect", "confirmed")


def exclusions(rows: Iterable[Mapping[str, Any]], *, weak: bool = False) -> tuple[list[Exclusion], list[str]]:
    """Return what to leave out, each row of a shard once, and a sentence for each suspect that cannot be named by rows.

    ``weak``: also what a single odd step without a cause is all that speaks against.
    """
    found: dict[tuple[str, str], Ranges] = {}
    notices = []
    for row in rows:
        if row["state"] not in STANDING or (row["weak"] and row["state"] != "confirmed" and not weak):
            continue
        if not row["exclude"]:
            lacks = "its data set has no name (exporter.wrap(loader, dataset=…))"
            if row["dataset"] is not None:
                lacks = "its loader's order cannot be computed, so positions are all that is known"
            notices.append(f"{row['id']}: run {row['run']}, step {row['step']}: {lacks}")
        for item in row["exclude"]:
            found.setdefault((item["dataset"], item["shard"]), []).append((item["first"], item["end"]))
    merged = [
        Exclusion(dataset=dataset, shard=shard, first=first, end=end)
        for (dataset, shard), ranges in sorted(found.items())
        for first, end in merge_ranges(ranges)
    ]
    return merged, notices


def to_file(found: Iterable[Exclusion]) -> bytes:
    """Return the file that an exporter reads."""
    return encode(Exclusions(exclude=list(found)))


def to_lines(found: Iterable[Exclusion]) -> bytes:
    """Return a line an exclusion: data set, shard, first row, end, with tabs between; for other programs."""
    return "".join(f"{one.dataset}\t{one.shard}\t{one.first}\t{one.end}\n" for one in found).encode()
