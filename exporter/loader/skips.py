"""What a run must not train on: skipped positions of an epoch, and data excluded by its identity in every epoch.

Both come from the ledger and the plan (resume.py reads them); a loader that can carries them out, one that cannot
says so in :class:`Refusals`, so that planning can refuse and the start event is honest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainwarden.plan import Exclusion, SkipMode, merge_ranges
from trainwarden.record import Ranges

from .ranges import RangeSet
from .shards import Shards


@dataclass(frozen=True, slots=True)
class Skip:
    """Positions of the unskipped global order of one epoch that are not trained on, and what happens to them."""

    epoch: int
    ranges: Ranges
    mode: SkipMode = "substitute"


@dataclass(frozen=True, slots=True)
class Excluded:
    """Rows of a named shard that are not trained on in any epoch. Rows count from the shard's first row."""

    what: Exclusion
    mode: SkipMode = "substitute"


@dataclass(frozen=True, slots=True)
class Skips:
    """All skips and exclusions in force, from the ledger and the plan."""

    skips: tuple[Skip, ...] = ()
    exclude: tuple[Excluded, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.skips or self.exclude)

    def beside(self, exclude: Iterable[Exclusion]) -> Skips:
        """Return these with further data that is substituted for in every epoch: what the script itself leaves out."""
        more = tuple(Excluded(what) for what in exclude)
        return Skips(self.skips, self.exclude + more) if more else self

    def in_epoch(self, epoch: int, mode: SkipMode | None = None) -> Ranges:
        """Return the skipped positions of an epoch; those of one mode where ``mode`` says which."""
        chosen = (skip for skip in self.skips if skip.epoch == epoch and mode in (None, skip.mode))
        return merge_ranges([span for skip in chosen for span in skip.ranges])

    def epochs(self) -> set[int]:
        """Return the epochs in which positions are skipped."""
        return {skip.epoch for skip in self.skips if skip.ranges}


@dataclass(slots=True)
class Refusals:
    """Fields of a plan that a loader could not carry out to the letter, each with the reason."""

    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, reason: str) -> None:
        """Add a reason; several for one field are joined."""
        known = self.reasons.get(name)
        self.reasons[name] = reason if known is None else f"{known}; {reason}"


def excluded_rows(
    exclude: Iterable[Excluded], dataset: str | None, shards: Shards | None, refusals: Refusals, size: int = 0
) -> dict[SkipMode, RangeSet]:
    """Translate exclusions into rows of the data set, by mode.

    An ``end`` beyond the shard's last row means the rest of the shard. Shard "" is the data set itself, of ``size`` rows, where it has no
    shards. What names another data set or an unknown shard is added to ``refusals``.
    """
    rows: dict[SkipMode, Ranges] = {"substitute": [], "shift": []}
    for entry in exclude:
        what = entry.what
        named = f"{what.dataset}/{what.shard} rows [{what.first}, {what.end})"
        if shards is None and size and not what.shard and what.dataset == dataset:
            if not 0 <= what.first < min(what.end, size):
                refusals.add("exclude", f"{named}: the data set has {size} rows")
            else:
                rows[entry.mode].append((what.first, min(what.end, size)))
            continue
        if dataset is None or shards is None:
            missing = "name" if dataset is None else "shards"
            refusals.add("exclude", f"{named}: the loader was wrapped without the data set's {missing}")
            continue
        if what.dataset != dataset:
            refusals.add("exclude", f"{named}: this loader reads the data set {dataset!r}")
            continue
        shard = shards.named(what.shard)
        if shard is None:
            refusals.add("exclude", f"{named}: the data set has no such shard")
            continue
        first, end = shard.first + what.first, min(shard.first + what.end, shard.end)
        if not shard.first <= first < end:
            refusals.add("exclude", f"{named}: the shard has {shard.end - shard.first} rows")
            continue
        rows[entry.mode].append((first, end))
    return {mode: RangeSet(spans) for mode, spans in rows.items()}
