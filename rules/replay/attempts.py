"""From rows of a foreign log to the records of a run: steps in order, starts, strides and times.

Steps that go backwards are a new start. Rows of one step whose columns differ are one record, a row that repeats what is there is
a duplicate. A record covers as many steps as lie between two records as a rule (the median of the latest differences).
"""

from __future__ import annotations

import math
import statistics
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

from trainwarden.record import Event, Step, Value
from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.inputs import Start
from trainwarden.signals import BY_NAME

from .columns import Columns
from .rows import Notices, Row
from .running_total import RunningTotal

#: A line with the stream that it belongs to.
Placed: TypeAlias = tuple[Start, int, "Step | Event"]

#: Rows that are looked at before the first record goes out: which columns there are, and how far apart the steps.
LOOK_AHEAD = 16
#: Differences of steps of which the median is the stride.
DIFFERENCES = 31
#: So many differences in a row that are alike are a new logging interval at once.
ALIKE = 3
#: The name space of ids that are made of a log's place and contents.
SPACE = uuid.UUID("6f1d3c52-6a0e-4f0a-9a55-4a5b8f6a2f10")

_LARGEST = 2**53


class _Moment(msgspec.Struct):
    """What is known of one step so far. Moments that lead carry the loss: they alone tell strides and starts."""

    step: int
    time: float | None
    signals: dict[str, Value]
    evaluation: dict[str, float]
    leads: bool
    known: bool


class Attempts:
    """Makes records of rows. :meth:`feed` may be called again and again, :meth:`end` once.

    ``attempt_of(start_id, attempt)`` may give a start another attempt number than the count from 0; ``clock()`` is the time of
    rows that bring none. Without a clock they lie one second a step apart.
    """

    def __init__(
        self,
        run_uid: str,
        run: str,
        columns: Columns,
        notices: Notices,
        *,
        attempt_of: Callable[[str, int], int] = lambda start_id, attempt: attempt,
        clock: Callable[[], float] | None = None,
        look_ahead: int = LOOK_AHEAD,
    ) -> None:
        self._run_uid = run_uid
        self._run = run
        self._columns = columns
        self._notices = notices
        self._attempt_of = attempt_of
        self._clock = clock
        self._look_ahead = look_ahead
        self._ahead: list[Row] | None = []
        self._counted: int | None = None
        self._offset = 0.0
        self._epoch: tuple[int, float] | None = None
        self._skips = RunningTotal()
        self._pending: _Moment | None = None
        self._back: _Moment | None = None
        self._start: Start | None = None
        self._seq = 0
        self._last = self._led = -1
        self._time = -math.inf
        self._opened = False
        self._resumed_from: int | None = None
        self._before: int | None = None
        self._alike: dict[str, int] = {}
        self._gaps: list[tuple[int, int, int, int]] = []
        self._differences: deque[int] = deque(maxlen=DIFFERENCES)
        #: How many steps a record covers now.
        self.stride = 1

    def feed(self, rows: Iterable[Row]) -> Iterator[Placed]:
        """Yield the records and events of consecutive rows, a row late."""
        for row in rows:
            if self._ahead is not None:
                self._ahead.append(row)
                if len(self._ahead) >= self._look_ahead:
                    yield from self._begin()
            else:
                yield from self._take(row)

    def idle(self, *, long: bool = False) -> Iterator[Placed]:
        """Yield what waits for a next row; what that one adds to the same step is then lost.

        After a ``long`` pause the rows that are looked at first no longer wait for more of them either.
        """
        if long and self._ahead:
            yield from self._begin()
        if self._ahead is not None or self._back is not None:
            return
        if self._pending is not None:
            yield from self._emit(self._pending)
            self._pending = None

    def end(self) -> Iterator[Placed]:
        """Yield what is left, and say what is known only at the end."""
        yield from self._begin()
        if self._pending is not None:
            yield from self._emit(self._pending)
        if self._back is not None:
            self._again(self._back)
            yield from self._emit(self._back)
        self._pending = self._back = None
        self._say_gaps()
        self._columns.report()

    def _begin(self) -> Iterator[Placed]:
        rows, self._ahead = self._ahead, None
        if not rows:
            return
        example = {name: value for row in rows for name, value in row.values.items()}
        self._columns.decide(example, example)
        if not self._columns.has_step():
            self._counted = 0
            self._notices.add(
                "no_step", "No column is known to be the step: rows are counted from 1 (or use --map step=COLUMN)."
            )
        mapped = [self._columns.map(row.values) for row in rows]
        steps = [step for step, _, signals in mapped if self._columns.leads(signals)]
        ahead = [int(b - a) for a, b in zip(_whole(steps), _whole(steps)[1:], strict=False) if b > a]
        if ahead:
            self.stride = max(1, statistics.median_low(ahead))
        for row in rows:
            yield from self._take(row)

    def _take(self, row: Row) -> Iterator[Placed]:
        moment = self._moment(row)
        if moment is None:
            return
        pending, back = self._pending, self._back
        if pending is None:
            if moment.step > self._last:
                self._pending = moment
            elif moment.step < self._last and moment.leads:
                self._again(moment)
                self._pending = moment
            else:
                self._duplicate(moment)
            return
        if back is not None:
            self._back = None
            if moment.step > pending.step:
                says = f"Line {row.line}: step {back.step} after step {pending.step} and before step {moment.step}: left out."
                self._notices.add("unordered", says, step=back.step)
            else:
                yield from self._emit(pending)
                self._again(back)
                self._pending = pending = back
        if moment.step == pending.step:
            self._merge(pending, moment)
        elif moment.step > pending.step:
            yield from self._emit(pending)
            self._pending = moment
        elif moment.leads:
            self._back = moment
        else:
            says = f"Line {row.line}: step {moment.step} after step {pending.step}: left out."
            self._notices.add("unordered", says, step=moment.step)

    def _moment(self, row: Row) -> _Moment | None:
        step, time, signals = self._columns.take(row.values)
        if self._counted is not None:
            if self._counted == 0 or self._columns.leads(signals) or not self._columns.evaluations & row.values.keys():
                self._counted += 1  # results of an evaluation belong to the step before
            step = float(self._counted)
        if step is None or not 0 <= step < _LARGEST or step != int(step):
            said = "is missing" if step is None else f"{step:g} is no whole number from 0 on"
            self._notices.add("unreadable", f"Line {row.line}: the step {said}: the row was left out.", signal="step")
            return None
        if not signals:
            return None
        skipped = signals.get("skipped")
        if isinstance(skipped, int | float) and not self._columns.is_total("skipped"):
            signals["skipped"] = self._skips.take(skipped, self.stride)
        evaluation = {}
        if self._columns.evaluations:
            evaluation = {name: row.values[name] for name in row.values.keys() & self._columns.evaluations}
        leads = self._columns.leads(signals)
        if self._counted is None:
            step = self._counted_on(step, signals) if leads else step + self._offset
        known = leads or any(name in BY_NAME and name != "epoch" for name in signals)
        return _Moment(int(step), time, signals, evaluation, leads, known)

    def _counted_on(self, step: float, signals: dict[str, Value]) -> float:
        """Return the step counted from the beginning of the log where it begins anew with each epoch.

        A step that goes back while the epoch goes on is no restart: that would go back in both.
        """
        epoch = signals.get("epoch")
        if isinstance(epoch, int | float):
            if self._epoch is not None and epoch >= self._epoch[0] + 1 and step <= self._epoch[1]:
                self._offset += self._epoch[1] + self.stride - step
                says = "The steps begin anew with each epoch: they are counted on."
                self._notices.add("epoch_steps", says, step=int(step + self._offset))
            elif self._epoch is not None and epoch < self._epoch[0]:
                self._offset = 0.0
            self._epoch = (math.floor(epoch), step)
        return step + self._offset

    def _merge(self, pending: _Moment, moment: _Moment) -> None:
        new = moment.signals.keys() - pending.signals.keys()
        told = {name: moment.signals[name] for name in moment.signals.keys() - new - {"epoch"}}
        if told and (not new or self._columns.leads(told)):
            self._duplicate(moment)
            return
        # A clock or a counter that stands beside new numbers too: its first value counts.
        pending.signals.update({name: moment.signals[name] for name in moment.signals if name in new})
        pending.evaluation.update(moment.evaluation)
        pending.leads = pending.leads or moment.leads
        pending.known = pending.known or moment.known

    def _duplicate(self, moment: _Moment) -> None:
        says = f"Step {moment.step} is there twice: the first one counts."
        self._notices.add("duplicate_step", says, step=moment.step)

    def _again(self, first: _Moment) -> None:
        """Leave the start that there is: what comes from ``first`` on is the next one's."""
        self._begin_start(first, resumed=True)

    def _begin_start(self, first: _Moment, *, resumed: bool) -> None:
        before = self._start
        attempt = 0 if before is None else before.attempt + 1
        # Made of the first row alone: who reads the log again, or only its newer part, gives the same start the same id.
        seed = repr((first.step, sorted((name, repr(value)) for name, value in first.signals.items())))
        self._alike[seed] = self._alike.get(seed, 0) + 1
        start_id = str(uuid.uuid5(SPACE, f"{self._run_uid} {seed} {self._alike[seed]}"))
        self._start = Start(self._run_uid, self._run, self._attempt_of(start_id, attempt), start_id)
        self._before = None if before is None else before.attempt
        self._say_gaps()
        self._seq = 0
        self._last = self._led = -1
        self._opened = False
        self._resumed_from = max(0, first.step - self.stride) if resumed else None

    def _emit(self, moment: _Moment) -> Iterator[Placed]:
        if self._start is None:
            self._begin_start(moment, resumed=False)
        start = self._start
        assert start is not None
        difference = moment.step - self._last if self._last >= 0 else self.stride
        if moment.leads:
            if self._led >= 0:
                self._see(moment.step - self._led, difference, moment.step)
            self._led = moment.step
        time = self._time_of(moment, max(1, difference))
        if not self._opened:
            self._opened = True
            self._seq = 1
            yield start, 0, self._start_event(start, time, timed=self._clock is not None or moment.time is not None)
        self._seq += 1
        record = Step(
            seq=self._seq,
            step=moment.step,
            time=time,
            stride=self.stride if moment.leads or (moment.known and difference >= self.stride) else 1,
            signals=moment.signals,
        )
        yield start, 0, record
        if moment.evaluation:
            self._seq += 1
            yield (
                start,
                0,
                Event(kind="evaluation", time=time, seq=self._seq, step=moment.step, fields=dict(moment.evaluation)),
            )
        self._last = moment.step

    def _start_event(self, start: Start, time: float, *, timed: bool) -> Event:
        fields: dict[str, object] = {
            "run_uid": start.run_uid,
            "run": start.run,
            "attempt": start.attempt,
            "start_id": start.start_id,
            "rank": 0,
            "world_size": 1,
        }
        if not timed:
            fields["timed"] = False  # steps that are missing took no time
        if self._resumed_from is not None:
            fields["resumed_from"] = {"attempt": self._before, "step": self._resumed_from}
        return Event(kind="start", time=time, seq=1, step=self._resumed_from, fields=fields)

    def _see(self, difference: int, since_any: int, step: int) -> None:
        """Take the steps since the last record that leads, and since the last one of any kind, into account."""
        self._differences.append(difference)
        if difference == self.stride:
            self._say_gaps()
            return
        if since_any > 1.5 * self.stride:
            self._gaps.append((difference, since_any - self.stride, self._last, step))
        latest = list(self._differences)[-ALIKE:]
        stride = self.stride
        if len(latest) == ALIKE and len(set(latest)) == 1:
            stride = difference
        elif len(self._differences) == DIFFERENCES:
            stride = statistics.median_low(self._differences)
        if stride != self.stride:
            says = f"From about step {step} on a record covers {counted(stride, 'step')} instead of {self.stride}."
            self._notices.add("stride", says, step=step)
            self.stride = stride
            self._gaps = [gap for gap in self._gaps if gap[0] != stride]
            self._say_gaps()
        elif len(self._gaps) > ALIKE:
            self._say_gaps()

    def _say_gaps(self) -> None:
        """Say which steps are missing, now that it is known that the logging interval did not just change."""
        for _, missing, last, step in self._gaps:
            count = "One step is" if missing == 1 else f"{missing:,} steps are"
            self._notices.add("gap", f"{count} missing between steps {last} and {step}.", step=step)
        self._gaps.clear()

    def _time_of(self, moment: _Moment, steps: int) -> float:
        if self._clock is not None and moment.time is None:
            time = self._clock()
        elif moment.time is not None:
            time = moment.time
        else:
            time = steps + (0.0 if self._time == -math.inf else self._time)
        self._time = max(self._time, time)
        return self._time


def _whole(steps: Iterable[float | None]) -> list[float]:
    return [step for step in steps if step is not None and math.isfinite(step)]
