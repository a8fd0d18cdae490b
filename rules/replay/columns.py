"""From the names that a log gives its numbers to signals.

A log's own words for the known signals are listed in :mod:`trainwarden.names`; ``--map`` overrides them. What is not known becomes a signal of the
user's under a name that the rule language takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from zlib import crc32

import msgspec

from trainwarden.names import EVALUATION, HUMP, SYNONYMS, TAKEN, normal, own_name
from trainwarden.record import Value
from trainwarden.rules.core.language.operators import FUNCTIONS
from trainwarden.signals import BY_NAME, GROUPS

from .rows import STEP, TIME, Notices
from .texts import time_of

_COUNTS = re.compile(r"step|iter|update|token|sample", re.IGNORECASE)
_NAMES = re.compile(
    r"(?:^|_)(?:hash|checksum|digest|fingerprint)(?:_|$)|(?:^|_)shard(?:_(?:id|index|idx|number|name))?$"
)
_THOUSANDS = re.compile(rb"\d{1,3}(?:,\d{3})+")
_TIMES = frozenset(dict(SYNONYMS)[TIME])
#: Signals of the user's own that one log may bring.
MOST_OWN = 256
#: Unix times of this century, in seconds; a thousand times that is milliseconds.
OLDEST, NEWEST = 946_684_800.0, 4_102_444_800.0

_MOST_WAYS = 512


def is_time(name: str) -> bool:
    """Say whether a column of this name tells when."""
    return normal(name) in _TIMES


def told_by(name: str, text: bytes) -> float | None:
    """Return what a text that is no plain number tells in a column of this name, or None.

    A date and time in a column that tells when, as Unix seconds; a whole number with commas between its thousands in one that
    counts (in others a comma may be a decimal mark). A hash or the name of a shard is only ever compared: the same text is the same
    number.
    """
    if _NAMES.search(normal(name)):
        return float(crc32(text.strip()))
    if _COUNTS.search(name) and _THOUSANDS.fullmatch(text.strip()):
        return float(text.replace(b",", b""))
    return time_of(text) if is_time(name) else None


class MapError(ValueError):
    """A ``--map`` that cannot be meant. The message says what one looks like."""


def parse_maps(texts: Iterable[str]) -> dict[str, str]:
    """Return column to signal from texts like ``loss=train/loss``.

    Raises:
        MapError: a text is none of that kind, or the signal's name is none.
    """
    found: dict[str, str] = {}
    for text in texts:
        signal, equal, column = text.partition("=")
        signal = signal.strip()
        if not equal or not column:
            raise MapError(f"--map {text}: write SIGNAL=COLUMN, for example --map loss=train/loss")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[a-z_]+)?", signal):
            raise MapError(f"--map {text}: {signal!r} is no name of a signal: letters, digits and _")
        if signal in TAKEN - {STEP, TIME, "samples"} or signal in FUNCTIONS:
            raise MapError(f"--map {text}: {signal} is a word of trainwarden's own: choose another name")
        found[column] = "samples_seen" if signal == "samples" else signal
    return found


class _Way(msgspec.Struct):
    """How a row with certain names is mapped."""

    step: str | None
    time: str | None
    plain: list[tuple[str, str]]
    grouped: list[tuple[str, str, str]]


class Columns:
    """Decides once for each name in a log what it is, and maps rows by that."""

    def __init__(self, maps: Mapping[str, str], notices: Notices) -> None:
        self._maps = dict(maps)
        self._notices = notices
        self._target: dict[str, str] = {}
        self._taken: set[str] = set()
        self._leading: frozenset[str] | None = None
        self._own = 0
        self._ways: dict[tuple[str, ...], _Way] = {}
        self._totals: dict[str, float] = {}
        #: Raw names of evaluation results.
        self.evaluations: set[str] = set()

    def decide(self, names: Iterable[str], example: Mapping[str, float] | None = None) -> None:
        """Take in names that were not seen yet; where two could be one signal, the more telling word wins."""
        new = [name for name in names if name not in self._target]
        for name in new:
            if name in self._maps:
                self._give(name, self._maps[name])
        by_normal: dict[str, str] = {}
        for name in new:
            by_normal.setdefault(normal(name), name)
        for name in new:
            by_normal.setdefault(normal(HUMP.sub("_", name)), name)
        mapped = set(self._maps.values())
        for signal, words in SYNONYMS:
            for word in words:
                found = by_normal.get(word)
                if found is None or found in self._target or signal in self._taken or signal in mapped:
                    continue
                if signal == TIME and _seconds((example or {}).get(found, math.nan)) is None:
                    continue
                self._give(found, signal)
        for name in new:
            if name not in self._target:
                self._give(name, self._other(name))

    def _give(self, name: str, signal: str) -> None:
        self._target[name] = signal
        self._taken.add(signal)
        self._leading = None
        known = BY_NAME.get(signal.partition(".")[0])
        if known is not None and known.type == "counter" and not known.cumulative and normal(name).endswith("_total"):
            self._totals[name] = math.nan

    def _other(self, name: str) -> str:
        """Return the signal that a name is none of the synonyms for: one of the table, a group's, or the user's own."""
        plain = normal(name)
        known = plain in BY_NAME and not {"quantity", "moment", "kind"} & set(BY_NAME[plain].labels)
        if known and plain not in self._taken and plain not in self._maps.values():
            return plain
        for group in GROUPS:
            base = plain.removesuffix(f"_{group}")
            if base != plain and base in BY_NAME and BY_NAME[base].labels == ("group",):
                return f"{base}.{group}"
        if EVALUATION.fullmatch(plain):
            self.evaluations.add(name)
        if self._own >= MOST_OWN:
            self._notices.add("columns", f"More than {MOST_OWN} columns are not known: {name} was left out.")
            return ""
        self._own += 1
        own = own_name(name)
        if own in BY_NAME or own in TAKEN or own in FUNCTIONS:
            own = f"log_{own}"
        unique, count = own, 2
        while unique in self._taken:
            unique, count = f"{own}_{count}", count + 1
        return unique

    def map(self, values: Mapping[str, float]) -> tuple[float | None, float | None, dict[str, Value]]:
        """Return step, Unix time and signals of one row."""
        names = tuple(values)
        way = self._ways.get(names) or self._way(names, values)
        signals: dict[str, Value] = {signal: values[name] for name, signal in way.plain}
        for name, signal, label in way.grouped:
            groups = signals.setdefault(signal, {})
            assert isinstance(groups, dict)
            groups[label] = values[name]
        step = None if way.step is None else values[way.step]
        return step, None if way.time is None else _seconds(values[way.time]), signals

    def take(self, values: Mapping[str, float]) -> tuple[float | None, float | None, dict[str, Value]]:
        """Map the next row of a log: as :meth:`map`, and a running total becomes what it grew by since the row before."""
        step, time, signals = self.map(values)
        for name in self._totals.keys() & values.keys():
            signal, _, label = self._target[name].partition(".")
            before, self._totals[name] = self._totals[name], values[name]
            grown = max(0.0, values[name] - before) if before == before else 0.0
            groups = signals.get(signal)
            if isinstance(groups, dict):
                groups[label or "all"] = grown
            else:
                signals[signal] = grown
        return step, time, signals

    def _way(self, names: tuple[str, ...], example: Mapping[str, float]) -> _Way:
        """Find out how rows with these names are mapped; the same ones come again and again."""
        self.decide(names, example)
        parts = [(name, *self._target[name].partition(".")[::2]) for name in names if self._target[name]]
        of_groups = {signal for _, signal, label in parts if label}
        way = _Way(
            step=next((name for name, signal, _ in parts if signal == STEP), None),
            time=next((name for name, signal, _ in parts if signal == TIME), None),
            plain=[(name, signal) for name, signal, _ in parts if signal not in of_groups | {STEP, TIME}],
            grouped=[(name, signal, label or "all") for name, signal, label in parts if signal in of_groups],
        )
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        self._ways[names] = way
        return way

    def is_total(self, signal: str) -> bool:
        """Say whether a signal's column is a running total by its name; :meth:`take` gives what it grew by."""
        return any(self._target[name] == signal for name in self._totals)

    def names(self) -> list[str]:
        """Return the columns that came, by the names that the log gives them."""
        return list(self._target)

    def report(self) -> None:
        """Say which names of ``--map`` never came."""
        for column, signal in self._maps.items():
            if column not in self._target:
                there = ", ".join(list(self._target)[:20]) or "none"
                self._notices.add("map", f"--map {signal}={column}: there is no such column; there are: {there}.")
        if "loss" not in self._taken and self._target:
            there = ", ".join(list(self._target)[:20])
            says = f"No column is known to be the loss; name it with --map loss=COLUMN. There are: {there}."
            self._notices.add("no_loss", says, signal="loss")

    def leads(self, signals: Mapping[str, Value]) -> bool:
        """Say whether a row with these signals is one of the training's own: with the loss, or where there is none, with any."""
        if self._leading is None:
            known = {signal.partition(".")[0] for signal in self._taken} & BY_NAME.keys() - {"epoch"}
            self._leading = frozenset({"loss"} if "loss" in known else known)
        return not self._leading or not self._leading.isdisjoint(signals)

    def has_step(self) -> bool:
        """Say whether some column gives the step."""
        return STEP in self._taken


def _seconds(value: float) -> float | None:
    """Return a Unix time in seconds from one in seconds or milliseconds, or None for what is no time of this century."""
    if OLDEST < value < NEWEST:
        return value
    return value / 1000 if OLDEST < value / 1000 < NEWEST else None
