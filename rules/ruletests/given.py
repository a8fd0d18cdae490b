"""The made-up start of one test: series by signal, label and rank, and the block of records that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwarden.record import Step
from trainwarden.rules.core.block import Block, from_steps
from trainwarden.rules.core.language.errors import ExpressionError, did_you_mean
from trainwarden.rules.core.language.syntax import Selector
from trainwarden.rules.evaluate import Compiler
from trainwarden.signals import LABEL_VALUES

#: Time of the first record, Unix seconds: any time does, as long as it is always the same.
BEGAN = 1_000_000_000.0


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """Of what a series is: a signal with its label values in order, of one rank or of the whole run."""

    name: str
    labels: tuple[str, ...]
    rank: int | None


@dataclass(slots=True)
class Given:
    """Series of one test; record i covers the ``stride`` steps that end at ``first + i * stride``."""

    stride: int
    first: int
    interval: float
    series: dict[SeriesKey, list[float | None]] = field(default_factory=dict)

    def put(self, key: SeriesKey, values: list[float | None]) -> bool:
        """Add a series; False if it is there already."""
        if key in self.series:
            return False
        self.series[key] = values
        return True

    @property
    def length(self) -> int:
        """Return the number of records: that of the longest series; a shorter one is absent at its end."""
        return max((len(values) for values in self.series.values()), default=0)

    @property
    def last(self) -> int:
        """Return the step of the last record."""
        return self.first + (self.length - 1) * self.stride

    def row(self, step: int) -> int:
        """Return the newest record at ``step``."""
        return (step - self.first) // self.stride

    def block(self) -> Block:
        """Return the records, with the ranks' own beside them."""
        steps, by_rank = [], []
        for place in range(self.length):
            whole: dict[str, Any] = {}
            ranks: dict[int, dict[str, Any]] = {}
            for key, values in self.series.items():
                value = values[place] if place < len(values) else None
                if value is not None:
                    _set(whole if key.rank is None else ranks.setdefault(key.rank, {}), key, value)
            steps.append(self._record(place, whole))
            by_rank.append({rank: self._record(place, signals) for rank, signals in ranks.items()})
        return from_steps(steps, by_rank)

    def _record(self, place: int, signals: dict[str, Any]) -> Step:
        step, time = self.first + place * self.stride, BEGAN + place * self.interval
        return Step(seq=place + 1, step=step, time=time, stride=self.stride, signals=signals)


def _set(signals: dict[str, Any], key: SeriesKey, value: float) -> None:
    into, name = signals, key.name
    for label in key.labels:
        into = into.setdefault(name, {})
        name = label
    into[name] = value


def read_series(text: str, compiler: Compiler) -> SeriesKey:
    """Read ``loss``, ``grad_norm{group="mlp"}`` or ``rank_loss{rank="3"}``.

    Raises:
        ExpressionError: it is no selector of a known signal.
    """
    tree = compiler.parse(text)
    if not isinstance(tree, Selector):
        raise ExpressionError(0, "a series is one signal, with labels in braces if it has any")
    signal = compiler.signals.get(tree.name)
    if signal is None:
        if tree.name in compiler.records:
            raise ExpressionError(
                0, f"{tree.name} is recorded by a rule and is computed: give the signals that it reads"
            )
        hint = did_you_mean(tree.name, compiler.signals)
        own = "" if hint else "; a signal of your own must be listed under `signals:` of the rule file"
        raise ExpressionError(0, f"unknown signal {tree.name!r}{hint}{own}")
    given: dict[str, str] = {}
    for matcher in tree.matchers:
        known = LABEL_VALUES.get(matcher.label, ()) if tree.name not in (*compiler.own, "lr", "source_share") else ()
        if matcher.operator != "=":
            raise ExpressionError(matcher.at.first, "the labels of a series are given with =")
        if matcher.label not in (*signal.labels, "rank"):
            has = f"its labels are {', '.join((*signal.labels, 'rank'))}"
            raise ExpressionError(matcher.at.first, f"{tree.name} has no label {matcher.label!r}: {has}")
        if known and matcher.value not in known:
            hint = did_you_mean(matcher.value, known) or f"; known are {', '.join(known)}"
            raise ExpressionError(matcher.at.first, f"{tree.name} has no {matcher.label} {matcher.value!r}{hint}")
        if matcher.label == "rank" and not matcher.value.isdecimal():
            raise ExpressionError(matcher.at.first, f"a rank is a number, not {matcher.value!r}")
        given[matcher.label] = matcher.value
    rank = given.get("rank")
    if rank is not None and len(given) > 1:
        raise ExpressionError(0, "a series of one rank has no further labels")
    labels = () if rank is not None else tuple(given.get(label, "all") for label in signal.labels)
    return SeriesKey(tree.name, labels, None if rank is None else int(rank))
