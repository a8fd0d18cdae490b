"""Which samples are suspect: the dirty steps' shards, to their ends; else the batch of the onset.

Never more than needed: a shard is suspect only if most of the steps read from it were dirty, and only from where the dirt began.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges, ShardSpan

from .facts import Facts, dirty_rows

#: Steps after a shard's first position within which the dirt began with the shard.
FROM_THE_START = 3
#: Records back from now that tell how much of a shard was clean.
LOOK_BACK = 1000
#: What a record tells as its epoch is one below this; a float is exact up to here.
LARGEST_EPOCH = 2**53
#: A count of samples is one below this.
LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class Suspects:
    """Positions in the unskipped order of ``epoch``; ``shards`` names those that are suspect as a whole, with extents."""

    ranges: Ranges
    epoch: int
    shards: list[ShardSpan]
    says: str


def suspects(facts: Facts) -> Suspects:
    """Return the suspect samples as far as the records tell."""
    trace = facts.trace
    if not len(trace):
        return Suspects([], 0, [], "no samples")
    first = trace.row(facts.onset - facts.uncertainty)
    dirty = dirty_rows(trace, slice(first, len(trace)), facts.usual)
    onset_row = min(trace.row(facts.onset), len(trace) - 1)
    epoch = _epoch(facts, onset_row)
    if not dirty.any():
        ranges = merge_ranges([pair for row in range(first, onset_row + 1) for pair in trace.samples(row)])
        ranges = ranges or _counted(facts, first, onset_row)
        return Suspects(ranges, epoch, [], f"the samples of steps {_step(facts, first)} to {facts.onset}")
    rows = [first + int(place) for place in np.flatnonzero(dirty)]
    rows = [row for row in rows if _epoch(facts, row) == epoch]
    whole = [span for span in _spans(facts, rows) if _mostly_dirty(facts, span, set(rows))]
    if not whole:
        ranges = merge_ranges([pair for row in rows for pair in trace.samples(row) or _counted(facts, row, row)])
        return Suspects(ranges, epoch, [], f"the samples of the {len(rows)} dirty steps")
    ranges, names = [], []
    for span in whole:
        begin = _begin(facts, span, rows)
        ranges.append((begin, span.end))
        names.append(span.name if begin == span.first else f"the rest of {span.name}")
    full = [span for span, (begin, _) in zip(whole, ranges, strict=True) if begin == span.first]
    return Suspects(merge_ranges(ranges), epoch, full, f"shard {', '.join(names)} to its end")


def _counted(facts: Facts, first: int, last: int) -> Ranges:
    """Return the samples of rows ``first`` to ``last`` where a log only counts those trained on so far, none where it does not.

    Whether it counts before or behind a step's own batch no log says: both are within the range (case A04).
    """
    seen = facts.trace.column("samples_seen")
    known = seen[max(0, first - 1) : last + 2]
    known = known[np.isfinite(known) & (known >= 0) & (known < LARGEST)]
    if len(known) < 2 or known[0] >= known[-1]:
        return []
    return [(int(known[0]), int(known[-1]))]


def _step(facts: Facts, row: int) -> int:
    return int(facts.trace.steps[min(row, len(facts.trace) - 1)])


def _epoch(facts: Facts, row: int) -> int:
    value = facts.trace.column("epoch")[row] if len(facts.trace) else np.nan
    return int(value) if 0 <= value < LARGEST_EPOCH else 0


def _overlap(samples: Ranges, first: int, end: int) -> int:
    return sum(max(0, min(end, b) - max(first, a)) for a, b in samples)


def _spans(facts: Facts, rows: list[int]) -> list[ShardSpan]:
    """Return the shards of the rows whose extent is a whole shard's, not just one batch's."""
    found: dict[ShardSpan, None] = {}
    for row in rows:
        read = sum(end - first for first, end in facts.trace.samples(row))
        for span in facts.trace.shards(row):
            if read and span.end - span.first > 2 * read:
                found[span] = None
    return list(found)


def _mostly_dirty(facts: Facts, span: ShardSpan, dirty: set[int]) -> bool:
    """Say whether the steps that read mostly from the shard were dirty once they began to be.

    At a boundary a step draws from two shards: the clean one has a single dirty step and is let off.
    """
    trace = facts.trace
    reading = []
    for row in range(max(0, len(trace) - LOOK_BACK), len(trace)):
        samples = trace.samples(row)
        read = sum(end - first for first, end in samples)
        if read and 2 * _overlap(samples, span.first, span.end) > read:
            reading.append(row)
    bad = [row for row in reading if row in dirty]
    if len(bad) < 2:
        return False
    clean_since = sum(1 for row in reading if row > bad[0] and row not in dirty)
    clean_before = sum(1 for row in reading if row < bad[0])
    return len(bad) >= 3 * clean_since and (clean_before <= len(bad) or len(bad) >= 5)


def _begin(facts: Facts, span: ShardSpan, rows: list[int]) -> int:
    """Return the first suspect position of a shard: its own first where the dirt began with it."""
    trace = facts.trace
    touching = [row for row in rows if _overlap(trace.samples(row), span.first, span.end)]
    earliest = min(touching)
    samples = trace.samples(earliest)
    read = sum(end - first for first, end in samples)
    position = min(max(first, span.first) for first, end in samples if end > span.first)
    if position - span.first <= FROM_THE_START * read:
        return span.first
    margin = max(0, earliest - max(1, facts.uncertainty // trace.stride()))
    before = [max(first, span.first) for first, end in trace.samples(margin) if end > span.first]
    return min([position, *before])
