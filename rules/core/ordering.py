"""Which rows of a data set lie at which positions of an epoch's order, from what a start event says of the loader, and back.

The exporter's loader computes its orders by a small cipher (docs/data-and-resume.md); a start event says all that they are a function
of. Here the same is computed for a handful of positions, and the other way around: at which positions of this run's epoch lie the rows that
broke another one. Keys and purposes are shared with the loader (:mod:`trainwarden.orderkey`); a test compares the orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from msgspec import Struct, field

from trainwarden.orderkey import CHOOSING, OF_ROWS, OF_SHARDS, ROUNDS, key, reserve_size
from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges

from .block import Bools, Ints

#: Orders that can be computed here: functions of seed, epoch and position alone.
COMPUTED = ("sequential", "shuffle", "blocks")
#: Rows held in reserve up to which an order is computed: about two seconds once a start, and 8 bytes each.
MOST_RESERVED = 1 << 22
#: Rows that are looked for one by one; a longer range is looked for where it stays one in the order.
MOST_ROWS = 1 << 14
#: Orders that are kept computed.
MOST_ORDERS = 8
#: What a start event tells as a count, a seed or a row is below this.
LARGEST = 1 << 62
#: Shards, skips and exclusions of a start event that are remembered.
MOST_PARTS = 1000


class Shard(Struct, frozen=True):
    """Rows ``[first, end)`` of the data set, under a name."""

    name: str
    first: int
    end: int


class Layout(Struct, frozen=True, kw_only=True):
    """What a start event says of the data: its name and size, its shards, and everything that the order is a function of.

    ``shards`` is None where there are too many to be told. ``excluded`` are rows that are never read, ``skips`` positions of an epoch.
    """

    dataset: str | None
    size: int
    order: str = ""
    function: str = ""
    seed: int | None = None
    reserve: float = 0.0
    batch: int = 1  #: positions of a step over all ranks
    shards: list[Shard] | None = field(default_factory=list)
    shard_count: int = 0
    skips: list[tuple[int, Ranges]] = field(default_factory=list)
    excluded: list[tuple[str, int, int]] = field(default_factory=list)
    owner: str = ""  #: the run, where nothing but the run tells which data or which order it is

    @property
    def version(self) -> str:
        """A short name of what the rows are rows of: the same for the same size and shards of a data set of that name."""
        parts = [str(self.size), str(self.shard_count)]
        parts += [f"{one.name}:{one.first}:{one.end}" for one in self.shards or ()]
        if self.dataset is None:
            parts.append(self.owner)
        return _short(parts)

    @property
    def order_name(self) -> str:
        """A short name of the order: positions of two runs mean the same rows where it is the same."""
        known = self.order in COMPUTED or self.seed is not None
        held = reserve_size(self.size, self.reserve, self.batch)
        seed = "" if self.order == "sequential" and not held else str(self.seed)
        parts = [self.version, self.order, self.function, seed, f"{self.reserve:.6g}"]
        parts.append(str(held) if known else self.owner)
        return _short(parts)

    @property
    def computed(self) -> bool:
        """Whether rows can be told from positions here."""
        if self.order not in COMPUTED or self.seed is None or self.shards is None:
            return False
        return self.size > 0 and reserve_size(self.size, self.reserve, self.batch) <= MOST_RESERVED

    def skipped(self, epoch: int) -> Ranges:
        """Return the positions of an epoch that are not read."""
        return merge_ranges([span for at, ranges in self.skips if at == epoch for span in ranges])


def _short(parts: Sequence[str]) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()[:12]


def layout_of(fields: Mapping[str, Any], run_uid: str) -> Layout | None:
    """Return what a start event says of its data, None where no loader tells positions or what it says cannot be meant."""
    size, kind, told, name = (fields.get(key) for key in ("dataset_size", "loader_kind", "loader", "dataset"))
    if not isinstance(kind, str):
        return None
    dataset = name if isinstance(name, str) and 0 < len(name) <= 4096 else None
    rows = size if isinstance(size, int) and 0 <= size < LARGEST else 0
    if not isinstance(told, Mapping):
        return Layout(dataset=dataset, size=rows, order=kind[:64], owner=run_uid)
    try:
        return _layout(dataset, rows, told, run_uid)
    except (KeyError, TypeError, ValueError, OverflowError):
        return Layout(dataset=dataset, size=rows, order=kind[:64], owner=run_uid)


def _layout(dataset: str | None, rows: int, told: Mapping[str, Any], run_uid: str) -> Layout:
    shards = told["shards"]
    found: list[Shard] | None = None
    if shards is not None and len(shards) <= MOST_PARTS:
        found = [Shard(str(name), int(first), int(end)) for name, first, end in shards]
        if not all(0 <= one.first < one.end <= rows for one in found):
            raise ValueError("shards outside the data set")
    count = int(told["shard_count"])
    if shards is None and not count:
        found = []
    seed, share = told["seed"], float(told["reserve"])
    if not 0 <= share <= 0.5 or not (seed is None or abs(int(seed)) < 1 << 128):
        raise ValueError("no reserve or seed")
    skips = [
        (int(epoch), [(int(first), int(end)) for first, end in ranges])
        for epoch, ranges, _ in told["skips"][:MOST_PARTS]
    ]
    excluded = [
        (str(what["shard"]), int(what["first"]), int(what["end"]))
        for what, _ in told["exclude"][:MOST_PARTS]
        if what["dataset"] == dataset
    ]
    return Layout(
        dataset=dataset,
        size=rows,
        order=str(told["order"])[:64],
        function=str(told.get("function") or "")[:4096],
        seed=None if seed is None else int(seed),
        reserve=share,
        batch=max(1, int(told["batch_size"]) * int(told["world"])),
        shards=found,
        shard_count=count,
        skips=skips,
        excluded=excluded,
        owner=run_uid,
    )


class Order:
    """The order of a layout that can be computed. Holds 8 bytes a reserved row; everything else is computed as it is asked for."""

    def __init__(self, layout: Layout) -> None:
        self._name, self._seed = layout.order, layout.seed or 0
        self.shards = list(layout.shards or ())
        spans = [(0, layout.size)]
        if layout.order == "blocks":
            spans = [(one.first, one.end) for one in self.shards]
        covered = sum(end - first for first, end in spans)
        size = reserve_size(covered, layout.reserve, layout.batch)
        chosen = np.sort(Permutation(covered, key(self._seed, CHOOSING))(np.arange(size))) if size else _none()
        self._reserved = _rows_at(chosen, sorted(spans))
        self._before = self._reserved - np.arange(self._reserved.size)
        firsts = np.array([first for first, _ in spans], dtype=np.int64)
        ends = np.array([end for _, end in spans], dtype=np.int64)
        self._spans = spans
        self._firsts = self._place(firsts)
        self._sizes = self._place(ends) - self._firsts
        self._by_row = np.argsort(firsts, kind="stable")

    @property
    def size(self) -> int:
        """Positions of an epoch."""
        return int(self._sizes.sum())

    def rows(self, epoch: int, positions: Ints) -> Ints:
        """Return the row of the data set at each position that an epoch has; what it does not have is left out."""
        positions = positions[(positions >= 0) & (positions < self.size)]
        sequence, starts = self._sequence(epoch)
        slots = np.searchsorted(starts, positions, side="right") - 1
        offsets, segments = positions - starts[slots], sequence[slots]
        for segment in np.unique(segments) if self._name != "sequential" else ():
            here = segments == segment
            offsets[here] = self._shuffled(epoch, int(segment))(offsets[here])
        places = self._firsts[segments] + offsets
        found: Ints = places + np.searchsorted(self._before, places, side="right")
        return found

    def positions(self, epoch: int, rows: Ints) -> Ints:
        """Return the position of each row that is in the order of an epoch; reserved rows and those of no segment are in none."""
        rows = rows[~np.isin(rows, self._reserved)]
        firsts = np.array([first for first, _ in self._spans], dtype=np.int64)[self._by_row]
        ends = np.array([end for _, end in self._spans], dtype=np.int64)[self._by_row]
        slots = np.searchsorted(firsts, rows, side="right") - 1
        inside = (slots >= 0) & (rows < ends[np.maximum(slots, 0)])
        rows, segments = rows[inside], self._by_row[slots[inside]]
        sequence, starts = self._sequence(epoch)
        begins = np.empty_like(starts)
        begins[sequence] = starts
        offsets = self._place(rows) - self._firsts[segments]
        for segment in np.unique(segments) if self._name != "sequential" else ():
            here = segments == segment
            offsets[here] = self._shuffled(epoch, int(segment)).inverse(offsets[here])
        found: Ints = begins[segments] + offsets
        return found

    def spread(self, epoch: int, first: int, end: int) -> Ranges | None:
        """Return the positions of the rows ``[first, end)`` of the data set; None where they are too many to be looked for one by one."""
        if self._name == "sequential":
            low, high = (int(place) for place in self._place(np.array([first, end], dtype=np.int64)))
            return merge_ranges([(low, high)])
        left: Ranges = []
        rest = [(first, end)]
        if self._name == "blocks":
            sequence, starts = self._sequence(epoch)
            rest = []
            for segment, (low, high) in enumerate(self._spans):
                if first <= low and high <= end:
                    at = int(starts[int(np.flatnonzero(sequence == segment)[0])])
                    left.append((at, at + int(self._sizes[segment])))
                elif low < end and first < high:
                    rest.append((max(first, low), min(end, high)))
        if sum(high - low for low, high in rest) > MOST_ROWS:
            return None
        for low, high in rest:
            left += as_ranges(self.positions(epoch, np.arange(low, high)))
        return merge_ranges(left)

    @property
    def forward(self) -> bool:
        """Whether rows are read in their own order."""
        return self._name == "sequential"

    def split(self, first: int, end: int) -> list[tuple[str, int, int]]:
        """Return rows of the data set by shard, counted from the shard's first; under "" where the data set has no shards."""
        if not self.shards:
            return [("", first, end)]
        return [
            (one.name, max(first, one.first) - one.first, min(end, one.end) - one.first)
            for one in self.shards
            if one.first < end and first < one.end
        ]

    def _place(self, rows: Ints) -> Ints:
        found: Ints = rows - np.searchsorted(self._reserved, rows, side="left")
        return found

    def _sequence(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the segments in the epoch's order, and the position at which each of them begins."""
        sequence = np.arange(self._sizes.size)
        if self._name == "blocks":
            sequence = Permutation(sequence.size, key(self._seed, OF_SHARDS, epoch))(sequence)
        ends = np.cumsum(self._sizes[sequence])
        return sequence, ends - self._sizes[sequence]

    def _shuffled(self, epoch: int, segment: int) -> Permutation:
        return Permutation(int(self._sizes[segment]), key(self._seed, OF_ROWS, epoch, segment))


class Orders:
    """The newest few orders, kept computed: a reserve takes time."""

    def __init__(self) -> None:
        self._kept: dict[str, Order] = {}

    def of(self, layout: Layout) -> Order:
        """Return the order of a layout that can be computed."""
        found = self._kept.pop(layout.order_name, None) or Order(layout)
        self._kept[layout.order_name] = found
        if len(self._kept) > MOST_ORDERS:
            del self._kept[next(iter(self._kept))]
        return found


def as_ranges(numbers: Ints) -> Ranges:
    """Return the half-open ranges that hold exactly these numbers."""
    ordered = np.unique(numbers)
    if not ordered.size:
        return []
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))].tolist()
    lasts = ordered[np.concatenate((breaks, [ordered.size - 1]))].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


def _rows_at(places: Ints, spans: Sequence[tuple[int, int]]) -> Ints:
    """Return the rows at places among the rows of ascending spans."""
    sizes = np.array([end - first for first, end in spans], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    slots = np.searchsorted(starts, places, side="right") - 1
    found: Ints = np.array([first for first, _ in spans], dtype=np.int64)[slots] + places - starts[slots]
    return found


class Permutation:
    """The loader's shuffle of ``range(size)``: an alternating Feistel network with cycle walking (Black and Rogaway 2002).

    Each round changes one half by a function of the other and undoes itself, so the inverse is the rounds backwards.
    """

    def __init__(self, size: int, key_of: int) -> None:
        bits = max(2, (size - 1).bit_length())
        self._size = size
        self._low_bits = bits - bits // 2
        self._high_bits = bits // 2
        self._keys = [key(key_of, number) for number in range(ROUNDS)]

    def __call__(self, positions: Ints) -> Ints:
        """Map values in ``range(size)`` to values in ``range(size)``."""
        return self._walk(positions, range(ROUNDS))

    def inverse(self, values: Ints) -> Ints:
        """Map values back to where they came from."""
        return self._walk(values, range(ROUNDS - 1, -1, -1))

    def _walk(self, given: Ints, rounds: range) -> Ints:
        values = self._network(given.astype(np.uint64), rounds)
        beyond: Bools = values >= self._size
        while beyond.any():
            values[beyond] = self._network(values[beyond], rounds)
            beyond = values >= self._size
        found: Ints = values.astype(np.int64)
        return found

    def _network(self, values: Any, rounds: range) -> Any:
        low_bits = np.uint64(self._low_bits)
        low_mask, high_mask = np.uint64((1 << self._low_bits) - 1), np.uint64((1 << self._high_bits) - 1)
        high, low = values >> low_bits, values & low_mask
        for number in rounds:
            if number % 2:
                low = low ^ (_mixed(high, self._keys[number]) & low_mask)
            else:
                high = high ^ (_mixed(low, self._keys[number]) & high_mask)
        return (high << low_bits) | low


def _mixed(half: Any, round_key: int) -> Any:
    mixed = (half ^ np.uint64(round_key)) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
