"""Faults of a resume that concern the data: what comes next is not what would have come."""

from __future__ import annotations

from typing import Any

from numpy.random import Generator

from .fault import Fault, Training


class WrongPosition(Fault):
    """The loader goes on some steps before where it was: samples are read twice (case A21)."""

    name = "wrong_position"
    says = "a loader that resumes some steps too early"
    causes = ("data",)
    resumes = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw where the run is resumed and how many steps are read again."""
        return {"first": int(chance.integers(225, 286)), "again": int(chance.integers(40, 121))}

    def loaded(self, training: Training, state: dict[str, Any]) -> None:
        """Restore an older position."""
        back = self.values["again"] * training.scale.batch_size
        training.loader.load_state_dict({**state["loader"], "position": state["loader"]["position"] - back})


class OrderLost(Fault):
    """The loader is not restored at all: the epoch begins anew."""

    name = "loader_order_lost"
    says = "a loader that begins anew at a resume"
    causes = ("data",)
    resumes = True

    def loaded(self, training: Training, state: dict[str, Any]) -> None:
        """Restore the state of a loader that has read nothing."""
        training.loader.load_state_dict(training.kept["loader"])

    def prepared(self, training: Training) -> None:
        """Keep what the loader begins with."""
        training.kept["loader"] = training.loader.state_dict()


KINDS: tuple[type[Fault], ...] = (WrongPosition, OrderLost)
