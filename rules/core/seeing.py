"""What judgement needs of the rule language: feed a block, get alert changes. Which rules there are is not its business."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from .block import Block


class Change(Protocol):
    """One change of an alert, as :class:`~trainwarden.rules.core.alerts.AlertChange`."""

    @property
    def rule(self) -> str:
        """Name of the alert."""

    @property
    def state(self) -> str:
        """One of pending, firing, resolved, unknown."""

    @property
    def row(self) -> int:
        """Row of the block."""

    @property
    def step(self) -> int:
        """Step of the row."""

    @property
    def since(self) -> int:
        """First step at which the expression held."""

    @property
    def value(self) -> float | None:
        """What the expression compared, where there is such a number; possibly not finite."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels, among them severity and verdict."""


class AlertEngine(Protocol):
    """The rules of one start with their windows."""

    def feed(self, block: Block) -> Sequence[Change]:
        """Evaluate a block; changes come ordered by row and rule."""

    def tick(self, time: float, step: int, idle: float | None, budget: float | None) -> Sequence[Change]:
        """Evaluate the rules of the clock behind the record of ``step``; None is unknown, all in seconds."""

    @property
    def waits(self) -> bool:
        """Whether an alert of the clock is pending or firing."""

    def begin_anew(self, rules: Collection[str]) -> None:
        """Forget what these rules remember, as at a new start; the others go on."""

    def labels(self) -> Mapping[str, Mapping[str, str]]:
        """Return each rule's labels."""

    def reads(self, rule: str) -> frozenset[str]:
        """Return the names of the signals that a rule reads."""

    def dump(self) -> Any:
        """Return the state as plain data."""


class AlertSource(Protocol):
    """Makes engines."""

    def fresh(self, pack: Any) -> AlertEngine:
        """Return an engine without any history."""

    def revive(self, pack: Any, stored: Any) -> AlertEngine:
        """Return an engine from what ``dump`` gave."""
