"""Made-up runs with the statistics of real ones: a healthy, noisy decline, and what can happen to it.

A run is played into the core as its exporters would send it: a start event, step records, checkpoint events, an exit. Everything is
a function of the run's seed and the step, so that two attempts of a run that read the same samples have the same losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainwarden import rules
from trainwarden.plan import Applied, Plan
from trainwarden.record import Event, ShardSpan, Step
from trainwarden.rules.core.effects import Deliver, Effect, Save
from trainwarden.rules.core.feed import feed, new_state
from trainwarden.rules.core.inputs import Happened, Input, SourceSeen, Start, Steps
from trainwarden.rules.core.language import Pack, load_pack
from trainwarden.rules.core.settings import Settings

BATCH = 16
SHARD_STEPS = 50
BEGIN = 1_700_000_000.0
Change = Callable[[int, dict[str, Any]], None]
One = TypeVar("One")

#: The rules of these tests: few, and independent of what the shipped pack becomes.
RULES = """
groups:
  - name: test
    rules:
      - alert: LossSpike
        expr: loss / ema(loss, beta=0.98) > 1.5
        for: 3 steps
        labels: {severity: warning, verdict: transient_spike}
      - alert: LossHigh
        expr: zscore(loss) > 8 and loss > 1.05 * baseline(loss)
        for: 3 steps
        labels: {severity: warning, verdict: transient_spike}
      - alert: GradSurge
        expr: zscore(grad_norm) > 10 and grad_norm > 3 * baseline(grad_norm)
        labels: {severity: warning, verdict: grad_surge}
      - alert: NotFinite
        expr: isnan(loss) or isinf(loss)
        labels: {severity: critical, verdict: nonfinite}
"""


def small_pack() -> Pack:
    return load_pack(RULES, "test.yml")


def default_pack() -> Pack:
    path = Path(rules.__file__).parent / "packs" / "default.yml"
    return load_pack(path.read_text(), path.name)


def healthy_loss(step: int, seed: int = 0, noise: float = 0.03) -> float:
    chance = np.random.default_rng((seed, step))
    return float(1.8 + 3.0 * step**-0.35 + noise * chance.standard_normal())


@dataclass
class Attempt:
    """One attempt: which steps it runs, what happens in it, and what its start event says."""

    run_uid: str = "uid"
    run: str = "demo"
    number: int = 0
    first: int = 1
    last: int = 600
    seed: int = 0
    changes: Sequence[Change] = ()
    checkpoint_every: int = 50
    start: dict[str, Any] = field(default_factory=dict)
    end: str | None = "finished"
    start_id: str | None = None
    began: float = BEGIN
    world_size: int = 1
    finite: bool | None = True

    @property
    def who(self) -> Start:
        return Start(self.run_uid, self.run, self.number, self.start_id or f"{self.run_uid}-{self.number}")

    def lines(self) -> Iterator[Step | Event]:
        seq = 1
        said = {
            "run_uid": self.run_uid,
            "run": self.run,
            "attempt": self.number,
            "start_id": self.who.start_id,
            "world_size": self.world_size,
            "can_skip": ["substitute", "shift"],
            "dataset": None,
            "beta2": 0.999,
            "betas": [0.9, 0.999],
            "resumed_from": None,
            "plan_applied": None,
            **self.start,
        }
        yield Event(kind="start", time=self.began, seq=seq, step=self.first - 1, fields=said)
        for step in range(self.first, self.last + 1):
            seq += 1
            yield self.record(step, seq)
            if self.checkpoint_every and step % self.checkpoint_every == 0:
                seq += 1
                fields = {"path": f"ckpt/{self.number}/{step}", "complete": True, "finite": self.finite}
                yield Event(
                    kind="checkpoint", time=self.time(step), seq=seq, step=step, fields={"step": step, **fields}
                )
        if self.end is not None:
            ended = {"reason": self.end, "code": 0}
            yield Event(kind="exit", time=self.time(self.last) + 1, seq=seq + 1, step=self.last, fields=ended)

    def time(self, step: int) -> float:
        return self.began + 0.5 * (step - self.first + 1)

    def record(self, step: int, seq: int) -> Step:
        chance = np.random.default_rng((self.seed, 7, step))
        position = (step - 1) * BATCH
        shard = position // (SHARD_STEPS * BATCH)
        signals: dict[str, Any] = {
            "loss": healthy_loss(step, self.seed),
            "grad_norm": {"all": float(np.exp(0.15 * chance.standard_normal()))},
            "lr": {"all": 1e-3 * min(1.0, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / 1200))},
            "skipped": 0.0,
            "epoch": 0.0,
            "batch_longest_repeat_tokens": float(chance.integers(14, 30)),
            "batch_unique_token_ratio": float(0.30 + 0.01 * chance.standard_normal()),
            "substituted_samples": 0.0,
        }
        if step % 10 == 0:
            signals["optimizer_step"] = float(step)
            signals["update_ratio"] = {"all": float(1e-3 * np.exp(0.1 * chance.standard_normal()))}
        for change in self.changes:
            change(step, signals)
        span = SHARD_STEPS * BATCH
        return Step(
            seq=seq,
            step=step,
            time=self.time(step),
            signals=signals,
            samples=[(position, position + BATCH)],
            shards=[ShardSpan(f"shard-{shard:03d}", shard * span, (shard + 1) * span)],
        )


def dirty(first: int, last: int, damage: float = 0.4) -> Change:
    """A poisoned shard from step ``first`` to ``last``; what it leaves in the weights decays slowly."""

    def change(step: int, signals: dict[str, Any]) -> None:
        if first <= step <= last:
            signals["loss"] += 2.0 * math.exp(-(step - first) / 40) + 0.6
            signals["grad_norm"]["all"] *= 6.0
            signals["batch_longest_repeat_tokens"] = 300.0 + step % 7
            signals["batch_unique_token_ratio"] = 0.8
        elif step > last:
            signals["loss"] += damage * math.exp(-(step - last) / 400)

    return change


def spike(peaks: dict[int, float], heals: int = 0, until: int = 0) -> Change:
    """Losses added at given steps, then a log-linear return from ``heals`` to ``until``."""

    def change(step: int, signals: dict[str, Any]) -> None:
        if step in peaks:
            signals["loss"] += peaks[step]
        elif heals <= step < until:
            height = peaks[heals - 1]
            signals["loss"] += height * (0.02 / height) ** ((step - heals + 1) / (until - heals))

    return change


def gradients(norms: dict[int, float]) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        if step in norms:
            signals["grad_norm"]["all"] = norms[step]

    return change


def not_a_number(first: int) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        if step >= first:
            signals["loss"] = math.nan
            signals["grad_norm"]["all"] = math.nan

    return change


def shifted(first: int, by: float) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        if step >= first:
            signals["loss"] += by

    return change


def substituted(plan: Plan) -> Change:
    """What a loader reports that substitutes the plan's samples."""

    def change(step: int, signals: dict[str, Any]) -> None:
        first, end = (step - 1) * BATCH, step * BATCH
        signals["substituted_samples"] = float(sum(max(0, min(end, b) - max(first, a)) for a, b in plan.skip_samples))

    return change


def under(plan: Plan, **changed: Any) -> dict[str, Any]:
    """The start event of an attempt that applied the plan."""
    assert plan.target is not None
    applied = Applied(
        plan_id=plan.plan_id,
        start_step=plan.target.step + 1,
        target=plan.target,
        reset_optimizer=plan.reset_optimizer,
        lr_factor=plan.lr_factor,
        rewarmup_steps=plan.rewarmup_steps,
        skip_samples=plan.skip_samples,
        exclude=plan.exclude,
    )
    import msgspec

    return {
        "resumed_from": msgspec.to_builtins(plan.target),
        "plan_applied": {**msgspec.to_builtins(applied), **changed},
    }


@dataclass
class Played:
    """The core with all that came out of it."""

    state: Any
    effects: list[Effect] = field(default_factory=list)

    def take(self, value: Input) -> list[Effect]:
        found = feed(self.state, value)
        self.effects += found
        return found

    def play(
        self, attempt: Attempt, chunk: int = 1, rank: int = 0, live: bool = False, upto: int | None = None
    ) -> None:
        """Feed an attempt; ``live`` adds a poll after every chunk, ``upto`` stops after that step."""
        held: list[Step] = []
        last = 0

        def hand_over() -> None:
            if held:
                self.take(Steps(attempt.who, rank, tuple(held)))
                if live:
                    self.take(seen(attempt, held[-1].time, last))
                held.clear()

        for line in attempt.lines():
            if upto is not None and isinstance(line, Step) and line.step > upto:
                break
            last = line.seq
            if isinstance(line, Step):
                held.append(line)
                if len(held) >= chunk:
                    hand_over()
            else:
                hand_over()
                self.take(Happened(attempt.who, rank, line))
        hand_over()

    @property
    def incidents(self) -> list[dict[str, Any]]:
        rows = {one.key: one.row for one in self.effects if isinstance(one, Save) and one.kind == "incident"}
        return list(rows.values())

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [one.row for one in self.effects if isinstance(one, Save) and one.kind == "notice"]

    def sent(self, kind: str = "webhook", of_type: str | None = None) -> list[Deliver]:
        return [
            one
            for one in self.effects
            if isinstance(one, Deliver) and one.kind == kind and (of_type is None or one.body.get("type") == of_type)
        ]

    @property
    def rollbacks(self) -> list[Deliver]:
        return self.sent(of_type="training.rollback.requested")


def seen(attempt: Attempt, time: float, last_seq: int, **changed: Any) -> SourceSeen:
    facts = {"caught_up": True, "authenticated": True, "may_act": True, "reachable": True, **changed}
    return SourceSeen(attempt.who, 0, time, last_seq, **facts)


def core(pack: Pack | None = None, **settings: Any) -> Played:
    return Played(new_state(Settings(**settings), pack or small_pack()))


def acting(pack: Pack | None = None, **settings: Any) -> Played:
    return core(pack, **{"mode": "act", "receiver": True, **settings})


def only(found: Iterable[One]) -> One:
    (one,) = found
    return one


def plan_in(incident: dict[str, Any]) -> Plan:
    import msgspec

    return msgspec.convert(incident["plan"], Plan)


def following(
    played: Played, number: int, *changes: Change, start: dict[str, Any] | None = None, **changed: Any
) -> Attempt:
    """Return the attempt that the newest plan asks for, which does what the plan says; ``start`` is told by its start event besides."""
    plan = plan_in(played.incidents[-1])
    assert plan.target is not None
    first = plan.target.step + 1

    def as_planned(step: int, signals: dict[str, Any]) -> None:
        if plan.reset_optimizer and "optimizer_step" in signals:
            signals["optimizer_step"] = float(step - first + 1)
        if plan.rewarmup_steps:
            signals["lr"] = {"all": signals["lr"]["all"] * min(1.0, (step - first + 1) / plan.rewarmup_steps)}

    values: dict[str, Any] = {
        "number": number,
        "first": first,
        "changes": [substituted(plan), as_planned, *changes],
        "start": under(plan, **(start or {})),
        "began": BEGIN + 10_000 * number,
    }
    return Attempt(**{**values, **changed})


def recovered() -> Played:
    """A dirty shard, the rollback, and the attempt behind it, which is verified."""
    played = acting()
    broken = Attempt(last=420, changes=[dirty(301, 420)], end="rollback")
    played.play(broken, live=True)
    plan = plan_in(only(played.incidents))
    assert plan.target is not None
    first, start = plan.target.step + 1, under(plan)
    began = broken.time(420) + 60
    played.play(Attempt(number=1, first=first, last=900, start=start, changes=[substituted(plan)], began=began))
    return played
