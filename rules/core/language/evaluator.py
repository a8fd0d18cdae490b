"""Evaluates a pack over the blocks of one start: every node once a block, then every alert's life.

The result does not depend on how the stream is cut into blocks, nor on a dump and load between two of them: alerts
change at the same steps, and numbers agree to 1e-9.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from trainwarden.rules.core.alerts import Alert, AlertChange, Record
from trainwarden.rules.core.block import Block, Column, Key

from .pack import Pack
from .running import Running
from .series import Frame, Series

#: Format of what ``dump`` returns.
SCHEMA = 1


class Evaluator:
    """The state of one start under one pack. Nothing is shared by two of them but the immutable pack."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._operators = pack.program.operators()
        self._running = Running(pack.program, self._operators)
        self._alerts = [Alert(rule.alert) for rule in pack.rules.values()]
        nodes, outputs = pack.program.nodes, pack.program.outputs
        lives = list(enumerate(zip(outputs, self._alerts, strict=True)))
        self._lives = [one for one in lives if not nodes[one[1][0].truth].clock]
        self._clocked = [one for one in lives if nodes[one[1][0].truth].clock]
        self._last_step: int | None = None

    def feed(self, block: Block) -> list[AlertChange]:
        """Take a block in and return what changed, ordered by row and then by rule.

        Raises:
            ValueError: a step is not greater than the one before it. The stream sees to that; state is unchanged.
        """
        if not len(block):
            return []
        first = block.step[0]
        if (self._last_step is not None and first <= self._last_step) or (block.step[1:] <= block.step[:-1]).any():
            raise ValueError(f"steps must grow: {block.step.tolist()[:5]}… after {self._last_step}")
        running = self._running
        with np.errstate(all="ignore"):  # 1 / 0 is an infinity here, and 0 / 0 is NaN: values, not accidents
            frame = running.begin(block)
            self._last_step = frame.steps[-1]
            found = [(change.row, order, change) for order, change in self._ended(frame)]
            for order, (output, alert) in self._lives:
                truth: Series = running.result(output.truth)
                if alert.idle and not frame.any(truth.values):
                    alert.skip(frame.steps[-1])
                    continue
                about: Series | None = None if output.value is None else running.result(output.value)
                for change in self._live(frame, alert, truth, about):
                    found.append((change.row, order, change))
        running.end()
        found.sort(key=lambda item: item[:2])
        return [change for _, _, change in found]

    def tick(self, time: float, step: int, idle: float | None, budget: float | None) -> list[AlertChange]:
        """Evaluate the rules of the clock between two records, ``step`` being the last one; None is unknown, in seconds."""
        if not self._clocked:
            return []
        told = {"idle()": idle, "budget()": budget}
        columns: dict[Key, Column] = {
            (name,): Column(np.array([value], dtype=np.float64), np.array([True]))
            for name, value in told.items()
            if value is not None
        }
        one = np.array([step], dtype=np.int64)
        frame = Frame.of(Block(one, np.array([time]), np.zeros(1, dtype=np.int64), columns, {}))
        nodes = self.pack.program.nodes
        results: dict[int, Series] = {}

        def result(number: int) -> Series:
            if number not in results:
                inputs = [result(of) for of in nodes[number].inputs]
                results[number] = self._operators[number].feed(frame, inputs)
            return results[number]

        changes: list[AlertChange] = []
        with np.errstate(all="ignore"):
            for _, (output, alert) in self._clocked:
                truth = result(output.truth)
                changes += self._live(frame, alert, truth, None if output.value is None else result(output.value))
        return changes

    @property
    def waits(self) -> bool:
        """Whether an alert of the clock is pending or firing."""
        return any(not alert.idle for _, (_, alert) in self._clocked)

    def _ended(self, frame: Frame) -> Iterator[tuple[int, AlertChange]]:
        """End the alerts of the clock, since a record came: it is what they waited for."""
        for order, (_, alert) in self._clocked:
            for row in range(frame.rows):
                if alert.idle:
                    break
                time = float(frame.block.time[row])
                change = alert.feed(Record(row, frame.steps[row], frame.strides[row], time, False, True, True, None))
                if change is not None:
                    yield order, change

    def begin_anew(self, rules: Collection[str]) -> None:
        """Forget what these rules remember: their windows and alerts begin empty, as at a new start.

        What a rule that goes on is made of goes on too, and so does how often a signal is measured.
        """
        program = self.pack.program
        going = {
            number
            for name, output in zip(self.pack.rules, program.outputs, strict=True)
            if name not in rules
            for number in program.below(output)
        }
        for number, fresh in enumerate(program.operators()):
            if number not in going and program.nodes[number].inputs:
                self._operators[number] = fresh
        self._running = Running(program, self._operators)
        for rule, alert in zip(self.pack.rules.values(), self._alerts, strict=True):
            if rule.name in rules:
                alert.load(Alert(rule.alert).dump())

    def labels(self) -> dict[str, Mapping[str, str]]:
        """Return each rule's labels."""
        return {name: rule.labels for name, rule in self.pack.rules.items()}

    def reads(self, rule: str) -> frozenset[str]:
        """Return the names of the signals that a rule reads; none for a rule that the pack does not have."""
        return self.pack.reads(rule)

    def dump(self) -> dict[str, Any]:
        """Return the whole state as plain values, the same in JSON and in msgpack. Its size is bounded by the pack."""
        nodes = {}
        for node, operator in zip(self.pack.program.nodes, self._operators, strict=True):
            state = operator.dump()
            if state is not None:
                nodes[node.key] = state
        alerts = {
            rule.name: {"expr": self.pack.program.nodes[output.truth].key, **alert.dump()}
            for rule, output, alert in zip(
                self.pack.rules.values(), self.pack.program.outputs, self._alerts, strict=True
            )
        }
        return {"schema": SCHEMA, "last_step": self._last_step, "nodes": nodes, "alerts": alerts}

    @classmethod
    def load(cls, pack: Pack, state: Mapping[str, Any]) -> Evaluator:
        """Return an evaluator that goes on where ``dump`` was called.

        The pack may have been edited since: expressions that are still in it keep their state, new ones start empty,
        and an alert whose expression changed starts inactive.

        Raises:
            ValueError: the state is of another format.
        """
        if state.get("schema") != SCHEMA:
            raise ValueError(f"state of the rules has schema {state.get('schema')!r}, not {SCHEMA}")
        evaluator = cls(pack)
        evaluator._last_step = state["last_step"]
        for node, operator in zip(pack.program.nodes, evaluator._operators, strict=True):
            if node.key in state["nodes"]:
                operator.load(state["nodes"][node.key])
        for rule, output, alert in zip(pack.rules.values(), pack.program.outputs, evaluator._alerts, strict=True):
            saved = state["alerts"].get(rule.name)
            if saved is not None and saved["expr"] == pack.program.nodes[output.truth].key:
                alert.load(saved)
        return evaluator

    @staticmethod
    def _live(frame: Frame, alert: Alert, truth: Series, about: Series | None) -> list[AlertChange]:
        true, known, fresh = truth.values.tolist(), truth.known.tolist(), truth.fresh.tolist()
        holds = np.flatnonzero(truth.values)
        changes = []
        row = 0
        while row < frame.rows:
            if alert.idle and not true[row]:
                # Nothing can change before the next row at which it holds.
                following = int(np.searchsorted(holds, row))
                row = int(holds[following]) if following < len(holds) else frame.rows
                alert.skip(frame.steps[row - 1])
                continue
            step = frame.steps[row]
            value = None
            if about is not None and about.known[row]:
                value = float(about.values[row])
            record = Record(
                row,
                step,
                frame.strides[row],
                float(frame.block.time[row]),
                true[row],
                known[row],
                fresh[row],
                value,
            )
            change = alert.feed(record)
            if change is not None:
                changes.append(change)
            row += 1
        return changes
