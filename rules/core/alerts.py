"""The life of an alert: inactive, pending, firing, resolved, counted in steps.

An alert is fed with what its expression said at each record, true, false or unknown, and whether anything was measured
there. It says what changed. It knows nothing of expressions, incidents or people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

Unit: TypeAlias = Literal["steps", "records", "seconds"]

#: So many steps may be missing between two records before "in a row" is broken: as long as a last value stands in.
MISSING_STEPS = 20

_COUNTED = re.compile(r"(\d{1,9})\s*(steps?|records?)")
_CLOCK = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")


@dataclass(frozen=True, slots=True)
class Hold:
    """How long something must last: so many steps, records, or seconds of wall-clock time."""

    amount: int = 0
    unit: Unit = "steps"

    @classmethod
    def parse(cls, text: str) -> Hold:
        """Read ``3 steps``, ``20 records``, ``5m`` or ``1h30m``.

        Raises:
            ValueError: it is none of them.
        """
        counted = _COUNTED.fullmatch(text.strip())
        if counted:
            return cls(int(counted[1]), "steps" if counted[2].startswith("step") else "records")
        clock = _CLOCK.fullmatch(text.strip())
        if clock and clock[0]:
            days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            return cls(((days * 24 + hours) * 60 + minutes) * 60 + seconds, "seconds")
        raise ValueError(f"{text!r} is no duration; write 3 steps, 20 records, 30s, 5m or 1h30m")

    def __str__(self) -> str:
        return f"{self.amount}s" if self.unit == "seconds" else f"{self.amount} {self.unit}"


@dataclass(frozen=True, slots=True)
class AlertChange:
    """One alert changed at row ``row`` of the block that was fed.

    ``state``: ``pending`` (its expression holds, not yet for long enough), ``firing``, ``resolved`` (it holds no more; also of
    one that was only pending), ``unknown`` (it ended because nobody can say). ``since`` is the first step at which the
    expression held, ``value`` what it compared, where there is such a number (possibly not finite).
    ``annotations`` are templates, not yet filled in.
    """

    rule: str
    state: Literal["pending", "firing", "resolved", "unknown"]
    row: int
    step: int
    since: int
    time: float
    value: float | None
    labels: dict[str, str]
    annotations: dict[str, str]


class State(Enum):
    """Where an alert stands. Resolved is inactive that was once firing or pending."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Record:
    """What one record says of an alert's expression. ``fresh``: something it depends on was measured here."""

    row: int
    step: int
    stride: int
    time: float
    true: bool
    known: bool
    fresh: bool
    value: float | None


@dataclass(frozen=True, slots=True)
class AlertRule:
    """What an alert needs to know of its rule."""

    name: str
    hold: Hold
    keep: Hold
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class Alert:
    """The live instance of one rule. State: eight numbers.

    * ``for: N steps`` is met on the N-th true step in a row, the first included. Where a record covers several steps,
      it is met once the true records cover N steps and number at least ``min(3, N)``.
    * A record at which nothing was measured changes nothing; the next measured one counts the steps in between.
    * A few missing records change nothing either; more than 20 missing steps start a pending alert anew.
    * Unknown ends a pending alert. A firing one keeps firing for ``keep_firing_for`` behind the last true record, whether
      its expression is false or unknown, and then is resolved or unknown by what it is at that moment.
    """

    __slots__ = (
        "_held",
        "_last_step",
        "_last_true",
        "_records",
        "_rule",
        "_since",
        "_started",
        "_steps",
        "_untrue",
        "state",
    )

    def __init__(self, rule: AlertRule) -> None:
        self._rule = rule
        self.state = State.INACTIVE
        self._since = 0
        self._started = 0.0
        self._steps = 0
        self._records = 0
        self._held = 0
        self._last_step: int | None = None
        self._last_true: tuple[int, float] = (0, 0.0)
        self._untrue = 0

    @property
    def idle(self) -> bool:
        """Say whether records that are not true would change nothing."""
        return self.state in (State.INACTIVE, State.RESOLVED)

    def skip(self, last_step: int) -> None:
        """Note that the records up to ``last_step`` said nothing to an idle alert."""
        self._last_step = last_step

    def feed(self, record: Record) -> AlertChange | None:
        """Take one record in and return what changed, if anything."""
        gap = record.step - record.stride - (record.step if self._last_step is None else self._last_step)
        self._last_step = record.step
        if record.known and not record.fresh:
            if self.state is State.PENDING:
                self._held += record.stride
            return None
        if record.true:
            return self._true(record, broken=gap > MISSING_STEPS)
        if self.state is State.PENDING:
            return self._end(record)
        if self.state is State.FIRING:
            self._untrue += 1
            if self._expired(record):
                return self._end(record)
        return None

    def _true(self, record: Record, broken: bool) -> AlertChange | None:
        self._last_true = (record.step, record.time)
        self._untrue = 0
        if self.state is State.FIRING:
            return None
        began = self.state is not State.PENDING or broken
        if began:
            self._since, self._started = record.step, record.time
            self._steps = self._records = self._held = 0
        self._steps += record.stride + self._held
        self._held = 0
        self._records += 1
        if self._met(record):
            self.state = State.FIRING
            return self._change("firing", record)
        was_pending = self.state is State.PENDING
        self.state = State.PENDING
        return self._change("pending", record) if not was_pending else None

    def _met(self, record: Record) -> bool:
        hold = self._rule.hold
        if hold.unit == "records":
            return self._records >= hold.amount
        if hold.unit == "seconds":
            return hold.amount == 0 or record.time - self._started >= hold.amount
        return self._steps >= hold.amount and self._records >= min(3, hold.amount)

    def _expired(self, record: Record) -> bool:
        keep = self._rule.keep
        step, time = self._last_true
        if keep.unit == "records":
            return self._untrue > keep.amount
        if keep.unit == "seconds":
            # A log without times cannot be waited for. Ticks and records may tell the time by two clocks.
            return not (keep.amount and record.time - time <= keep.amount)
        return record.step - step > keep.amount

    def _end(self, record: Record) -> AlertChange:
        self.state = State.RESOLVED
        self._steps = self._records = self._held = self._untrue = 0
        return self._change("resolved" if record.known else "unknown", record)

    def _change(self, state: Literal["pending", "firing", "resolved", "unknown"], record: Record) -> AlertChange:
        return AlertChange(
            self._rule.name,
            state,
            record.row,
            record.step,
            self._since,
            record.time,
            record.value,
            dict(self._rule.labels),
            dict(self._rule.annotations),
        )

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values. A time that is not finite is None."""
        return {
            "state": self.state.value,
            "since": self._since,
            "started": _plain(self._started),
            "steps": self._steps,
            "records": self._records,
            "held": self._held,
            "last_step": self._last_step,
            "last_true": [self._last_true[0], _plain(self._last_true[1])],
            "untrue": self._untrue,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up a dumped state."""
        self.state = State(state["state"])
        self._since = state["since"]
        self._started = _time(state["started"])
        self._steps = state["steps"]
        self._records = state["records"]
        self._held = state["held"]
        self._last_step = state["last_step"]
        self._last_true = (state["last_true"][0], _time(state["last_true"][1]))
        self._untrue = state["untrue"]


def _plain(time: float) -> float | None:
    return time if abs(time) < float("inf") else None


def _time(value: float | None) -> float:
    return float("nan") if value is None else value
