"""Cases of what happens beside the steps: A39 (evaluations that break the next updates) and A29 (what comes at even distances)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Verdicts, pack
from tests.cases.registry import case
from trainwarden.record import Event, Step
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay

WHO = Start("uid", "case", 0, "start-0")


def judge(
    first: int,
    last: int,
    make: Callable[[int, float], dict[str, Any]],
    events: Iterable[tuple[int, str, dict[str, Any]]] = (),
    samples: int = 16,
) -> Verdicts:
    """Play ``make(step, noise)`` for each step, each event behind the record of its step."""
    chance = np.random.default_rng(0)
    said = {"world_size": 1, "attempt": 0, "start_id": WHO.start_id, "can_skip": ["substitute", "shift"]}
    lines: list[Step | Event] = [Event(kind="start", time=0.0, seq=1, step=first - 1, fields=said)]
    behind: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for step, kind, fields in events:
        behind.setdefault(step, []).append((kind, fields))
    for step in range(first, last + 1):
        lines.append(
            Step(
                seq=len(lines) + 1,
                step=step,
                time=float(step - first + 1),
                signals=make(step, float(chance.normal())),
                samples=[((step - 1) * samples, step * samples)],
            )
        )
        for kind, fields in behind.get(step, ()):
            time = float(step - first + 1)
            lines.append(Event(kind=kind, time=time, seq=len(lines) + 1, step=step, fields=fields))
    found = Replay(Settings(), pack()).run((WHO, 0, line) for line in lines)
    incidents = sorted(found.incidents.values(), key=lambda one: one["opened_step"])
    return Verdicts(incidents, list(found.notices.values()))


def a39(breaks: dict[int, float], every: int = 2500, how: str = "evaluation") -> Verdicts:
    """Case A39: a loss of 4.69; behind the evaluations in ``breaks`` the loss jumps by so much and comes down slowly."""

    def make(step: int, noise: float) -> dict[str, Any]:
        loss = 4.692 + 0.02 * noise
        for at, height in breaks.items():
            if step > at:
                loss += height * math.exp(-(step - at - 1) / (30 if at < 10_000 else 1500))
        return {"loss": loss}

    events: list[tuple[int, str, dict[str, Any]]] = []
    for step in range(every, 10_301, every):
        if how == "phase":
            events += [(step, "phase", {"phase": "evaluation"}), (step, "phase", {"phase": "train"})]
        else:
            events.append((step, how, {"loss": 4.7}))
    events += [(step, "checkpoint", {"path": f"c{step}", "complete": True}) for step in (2436, 9936)]
    return judge(1, 10_400, make, events)


@case("A39")
@pytest.mark.parametrize("how", ["evaluation", "phase"])
def test_a39_what_breaks_behind_two_evaluations_is_their_side_effect_and_no_bad_batch(how: str) -> None:
    found = a39({2500: 1.5, 10_000: 2.84}, how=how)
    first, last = found.told  # what is still high behind the second is no further event
    assert (first["onset_step"], last["onset_step"]) == (2501, 10_001)
    assert first["cause"]["name"] == "undetermined"
    assert "without the evaluation" in first["cheapest_test"]
    assert last["cause"]["name"] == "optimizer_state"
    assert last["cause"]["confidence"] >= 0.8
    assert last["severity"] == "critical"
    assert last["plan"] is None
    assert (last["action"], last["state"]) == ("escalate", "escalated")
    assert last["cheapest_test"].startswith("Resume from before step 10000 and run past it without the evaluation")
    assert "it began right behind the evaluation at step 10000, as behind 1 of the 3 before it" in last["summary"]
    assert all(one["plan"] is None or not one["plan"]["skip_samples"] for one in found.incidents)


@case("A39")
def test_a39_evaluations_without_an_effect_say_nothing() -> None:
    assert a39({}).told == []


@case("A39")
def test_a39_spikes_anywhere_are_none_of_the_evaluations() -> None:
    found = a39({2600: 1.5, 6100: 1.5, 9000: 1.5})
    assert len(found.told) == 3
    assert "after_event" not in [one["kind"] for incident in found.told for one in incident["evidence"]]


@case("A39")
def test_a39_evaluations_at_every_tenth_step_prove_nothing() -> None:
    found = a39({2600: 1.5, 6100: 1.5}, every=10)
    assert "after_event" not in [one["kind"] for incident in found.told for one in incident["evidence"]]


def bumps(offset: int = 0, more: Callable[[int], dict[str, Any]] = lambda step: {}) -> Any:
    """Case A29: a bump of 0.4 that decays over 30 steps, every thousand."""

    def make(step: int, noise: float) -> dict[str, Any]:
        since = (step - offset) % 1000
        bump = 0.4 * math.exp(-since / 10) if since < 30 and step > 900 else 0.0
        return {"loss": 1.5 + bump + 0.01 * noise, **more(step)}

    return make


def periodic(found: Verdicts) -> dict[str, Any]:
    (last,) = [one for one in found.told if one["verdict"] == "periodic_spikes"]
    return last


@case("A29")
def test_a29_bumps_at_the_ends_of_epochs_are_a_matter_of_the_data() -> None:
    one = periodic(judge(1, 8500, bumps(more=lambda step: {"epoch": float(step // 1000)})))
    assert one["cause"]["name"] == "data"
    assert one["severity"] == "warning"
    assert one["action"] == "none"
    assert "the spikes come every 1000 steps, as the epochs do" in one["summary"]


@pytest.mark.parametrize(
    ("kind", "words", "cause"),
    [
        ("checkpoint", "the checkpoints", "optimizer_state"),
        ("evaluation", "the evaluations", "optimizer_state"),
        ("epoch", "the epochs", "data"),
        ("lr_phase", "the learning rate's phases", "learning_rate"),
    ],
)
def test_spikes_at_the_distance_of_something_else_are_matched_to_it(kind: str, words: str, cause: str) -> None:
    events = [(step, kind, {"path": f"c{step}", "complete": True}) for step in range(1000, 8501, 1000)]
    other = "evaluation" if kind != "evaluation" else "checkpoint"
    events += [(step, other, {"path": f"d{step}", "complete": True}) for step in range(350, 8501, 350)]
    one = periodic(judge(1, 8500, bumps(offset=1), events))
    assert f"the spikes come every 1000 steps, as {words} do, 1 step behind" in one["summary"]
    assert one["cause"]["name"] == cause
    assert [each["kind"] for each in one["evidence"]].count("period") == 1


def test_spikes_behind_every_second_evaluation_are_matched_too() -> None:
    events: list[tuple[int, str, dict[str, Any]]] = [(step, "evaluation", {}) for step in range(500, 8501, 500)]
    assert "as the evaluations do" in periodic(judge(1, 8500, bumps(offset=1), events))["summary"]


def test_a_period_of_nothing_that_is_known_is_said_to_be_so() -> None:
    events: list[tuple[int, str, dict[str, Any]]] = [(step, "evaluation", {}) for step in range(300, 8501, 300)]
    one = periodic(judge(1, 8500, bumps(), events))
    assert "as nothing does that is known of (the evaluations every 300)" in one["summary"]
    assert one["cause"]["name"] == "undetermined"
