"""Faults of the learning rate: too high, warmed up too shortly, jumping, or begun anew by a resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.random import Generator

from trainwarden.demo.scale import Scale
from trainwarden.demo.train import lr_share

from .fault import Fault, Training


class _Peak(Fault):
    """A run with another peak of the rate and another warm-up: ``times`` and ``warm_up`` of what was drawn."""

    causes = ("learning_rate",)

    def scale(self, scale: Scale) -> Scale:
        """Return that run."""
        return replace(scale, lr=scale.lr * self.values["times"], warmup_steps=self.values["warm_up"])


class TooHigh(_Peak):
    """A slow warm-up to a peak that the model cannot bear."""

    name = "lr_too_high"
    says = "a learning rate whose peak is several times too high"

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw how many times, and how long the warm-up is. ``first`` is the step at which the usual peak is passed."""
        times, warm_up = float(chance.uniform(90, 160)), int(chance.integers(220, 281))
        return {"first": round(warm_up / times), "times": times, "warm_up": warm_up}


class ShortWarmUp(_Peak):
    """A bold rate, which a warm-up of usual length would bring about slowly, from the first steps on."""

    name = "short_warm_up"
    says = "a warm-up of a few steps to a bold learning rate"

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw how many steps and how bold."""
        return {"first": 1, "times": float(chance.uniform(20, 40)), "warm_up": int(chance.integers(4, 13))}


class Jump(Fault):
    """From one step to the next the rate is many times what it was, and stays."""

    name = "lr_jump"
    says = "a learning rate that jumps and stays up"
    causes = ("learning_rate",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw where and how many times."""
        return {"first": int(chance.integers(225, 286)), "times": float(chance.uniform(25, 60))}

    def rate(self, done: int, scale: Scale) -> float:
        """Return the jumped rate."""
        return lr_share(done, scale) * (self.values["times"] if done + 1 >= self.first else 1.0)


class ReWarmUp(Fault):
    """The schedule's state is not loaded: it warms up again and goes through its course from the beginning (case A06)."""

    name = "lr_rewarm_up"
    says = "a schedule that begins anew at a resume"
    causes = ("learning_rate",)
    resumes = True

    def loaded(self, training: Training, state: dict[str, Any]) -> None:
        """Leave out the schedule's state, and the rates that the optimizer's state brought."""
        fresh = training.kept["scheduler"]
        training.scheduler.load_state_dict(fresh)
        for group, rate in zip(training.optimizer.param_groups, fresh["_last_lr"], strict=True):
            group["lr"] = rate

    def prepared(self, training: Training) -> None:
        """Keep what the schedule begins with."""
        training.kept["scheduler"] = training.scheduler.state_dict()


KINDS: tuple[type[Fault], ...] = (TooHigh, ShortWarmUp, Jump, ReWarmUp)
