"""Lines that an exporter cannot have meant: they cost their own run's judgement something, never the daemon."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.rules.core.runs import Attempt, core, dirty
from trainwarden.record import Event, Step, decode_line
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, Steps, Tick
from trainwarden.rules.core.state import StateError

HUGE = 10**30
UNMEANT: dict[str, dict[str, Any]] = {
    "more ranks than there can be": {"world_size": 10**12},
    "a number of ranks that is none": {"world_size": "NaN"},
    "infinitely many ranks": {"world_size": "+Inf"},
    "a resume from a step that is none": {"resumed_from": {"attempt": "+Inf", "step": "NaN", "path": "x"}},
    "a resume from a step beyond 64 bits": {"resumed_from": {"attempt": HUGE, "step": HUGE, "path": "x"}},
    "decay rates beyond a float": {"beta2": 10**400, "betas": [1, 10**400]},
    "a plan with a step beyond 64 bits": {
        "plan_applied": {"plan_id": "p", "start_step": 1, "target": {"attempt": HUGE, "step": HUGE, "path": "x"}}
    },
    "a plan with a ramp beyond 64 bits": {"plan_applied": {"plan_id": "p", "start_step": 1, "rewarmup_steps": HUGE}},
    "a plan that skips beyond 64 bits": {
        "plan_applied": {"plan_id": "p", "start_step": 1, "skip_samples": [[0, HUGE]]}
    },
}


def decoded(event: Event, **fields: Any) -> Event:
    line = {"type": "event", "kind": event.kind, "seq": event.seq, "step": event.step, "time": event.time}
    found = decode_line(json.dumps({**line, **event.fields, **fields}))
    assert isinstance(found, Event)
    return found


@pytest.mark.parametrize("what", UNMEANT)
def test_a_start_event_cannot_tell(what: str) -> None:
    played, attempt = core(), Attempt(last=80, end=None)
    for line in attempt.lines():
        if isinstance(line, Event):
            said = decoded(line, **UNMEANT[what]) if line.kind == "start" else line
            played.take(Happened(attempt.who, 0, said))
        else:
            played.take(Steps(attempt.who, 0, (line,)))
    played.take(Tick(attempt.time(80) + 3600))
    load(dump(played.state), played.state.settings, played.state.pack)
    alive = played.state.memory.runs["uid"].alive
    assert alive is not None
    assert len(alive.trace) == 80
    assert alive.plan_id is None


def test_what_a_start_event_lists_is_remembered_only_where_it_means_something() -> None:
    played, attempt = core(), Attempt(last=5, end=None)
    start = next(iter(attempt.lines()))
    assert isinstance(start, Event)
    bomb = {"can_skip": ["x" * 100] * 1000 + ["shift"], "dataset": "x" * 10**6}
    played.take(Happened(attempt.who, 0, decoded(start, **bomb)))
    alive = played.state.memory.runs["uid"].alive
    assert alive is not None
    assert (alive.can_skip, alive.dataset) == (["shift"], None)
    assert sum(map(len, dump(played.state).values())) < 50_000


@pytest.mark.parametrize("instead", [None, -1, "x", b"zz", [], {}])
def test_a_stored_state_of_another_form_is_an_error_that_says_what_to_do(instead: Any) -> None:
    """Whichever part of it: an older version had none of it, or kept it otherwise."""
    played = core()
    played.play(Attempt(last=50, end=None))
    parts = dump(played.state)
    whole = msgspec.msgpack.decode(parts["uid"])
    rules = whole["alive"]["rules"]
    said = []
    for inner in (rules, rules["alerts"], rules["nodes"]):
        for name, kept in list(inner.items()):
            inner[name] = instead
            try:
                load({**parts, "uid": msgspec.msgpack.encode(whole)}, played.state.settings, played.state.pack)
            except StateError as error:
                said.append(str(error))
            inner[name] = kept
    assert len(said) > 2
    assert all("to begin" in one for one in said)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("{}", {}),
        ("{}", {"planned": True}),
        ("stage", {"name": "{}"}),
        ("checkpoint", {"path": "{}"}),
        ("error", {"message": "{}", "reason": "{}"}),
        ("phase", {"phase": "{}"}),
        ("evaluation", {"name": "{}"}),
    ],
)
def test_a_flood_of_long_events_is_remembered_within_bounds(kind: str, fields: dict[str, Any]) -> None:
    played, attempt = core(), Attempt(last=50, end=None)
    played.play(attempt)
    for number in range(100):
        long = f"{number}{'x' * 100_000}"
        told = {name: value.format(long) if isinstance(value, str) else value for name, value in fields.items()}
        event = Event(kind=kind.format(long), time=attempt.time(50), seq=1000 + number, step=50 + number, fields=told)
        played.take(Happened(attempt.who, 0, event))
    assert sum(map(len, dump(played.state).values())) < 100_000


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(4))
def test_no_value_of_any_signal_stops_the_judgement(seed: int) -> None:
    """A run that breaks, is rolled back and verified, while signals that judgement reads are anything at all."""
    chance = np.random.default_rng(seed)
    values = (math.nan, math.inf, -math.inf, 1e300, -1e300, 2.0**60, -1.0, 0.0, 0.5, 5e-324)
    names = ("epoch", "skipped", "optimizer_step", "substituted_samples", "lr", "beta2", "loss_scale", "grad_norm")

    def anything(step: int, signals: dict[str, Any]) -> None:
        for name in names:
            if chance.random() < 0.3:
                signals[name] = values[int(chance.integers(len(values)))]

    def breaks(step: int, signals: dict[str, Any]) -> None:
        if step > 300:
            signals["loss"] = values[int(chance.integers(len(values)))]
            signals["batch_longest_repeat_tokens"] = 500.0

    played = core()
    first = Attempt(last=480, changes=(anything, breaks), end=None)
    played.play(first)
    applied = {"plan_id": "p", "start_step": 251, "skip_samples": [[4500, 5200]]}
    applied["target"] = {"attempt": 0, "step": 250, "path": "ckpt/0/250"}
    told = {"resumed_from": applied["target"], "plan_applied": applied}
    played.play(Attempt(number=1, first=251, last=700, changes=(anything,), start=told))
    load(dump(played.state), played.state.settings, played.state.pack)
    assert any(isinstance(line, Step) for line in first.lines())
    assert played.state.memory.runs["uid"].incidents


@pytest.mark.parametrize("code", [HUGE, -HUGE, 2**64, -1, "48", True, [], None])
def test_an_error_of_a_device_with_a_number_that_is_none_hides_no_incident_and_stops_nothing(code: Any) -> None:
    played = core()
    attempt = Attempt(last=400, changes=[dirty(351, 400)], end=None)
    told = False
    for line in attempt.lines():
        if isinstance(line, Event):
            played.take(Happened(attempt.who, 0, line))
            continue
        if line.step > 370 and not told:
            told = True
            event = Event(kind="hardware", time=attempt.time(370), step=370)
            fields = {"what": "xid", "code": code, "fault": True, "points_to": "device", "host": "<h>"}
            played.take(Happened(attempt.who, 0, decoded(event, **fields)))
        played.take(Steps(attempt.who, 0, (line,)))
    load(dump(played.state), played.state.settings, played.state.pack)
    run = played.state.memory.runs["uid"]
    assert run.alive is not None
    assert run.alive.devices == []
    assert "XID" not in next(iter(run.incidents.values())).summary
