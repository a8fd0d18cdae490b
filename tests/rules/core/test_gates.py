"""Each gate shut and open; all of them answer, each time, in the order of the list."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from tests.rules.core.runs import Attempt, acting, dirty, seen
from trainwarden.rules.core.gates import DAY, DECIDING, DELIVERED, ENDING, GATES, Present, answers, held_by
from trainwarden.rules.core.grounds import Past
from trainwarden.rules.core.policy import Wanted
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.state import Alive, GateAnswer, Incident, Memory, Requested, Run, Silence, Window

ATTEMPT = Attempt(changes=[dirty(351, 400)], end="signal")
NOW = ATTEMPT.time(372) + 1
PLAYED = acting()
PLAYED.play(ATTEMPT, upto=372)
PLAYED.take(seen(ATTEMPT, ATTEMPT.time(372), 372 + 7 + 1))
RUN: Run = PLAYED.state.memory.runs["uid"]
INCIDENT: Incident = next(iter(RUN.incidents.values()))


@dataclass
class Made:
    """A situation in which every gate is open, but for what a test changes."""

    incident: dict[str, Any] = field(default_factory=dict)
    past: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    polled: bool = True
    ended: bool = False
    rerun: int | None = None
    now: float = NOW

    def present(self) -> Present:
        source = dict(self.source)
        last_seq = source.pop("last_seq", 380)
        alive: Alive = copy.copy(RUN.alive)  # type: ignore[assignment]
        alive.sources = {0: seen(ATTEMPT, NOW, last_seq, **source)} if self.polled else {}
        alive.ended = "signal" if self.ended else None
        alive.rerun = self.rerun
        incident = copy.copy(INCIDENT)
        incident.needs_approval, incident.webhook_id, incident.decided_time = False, None, NOW
        for name, value in self.incident.items():
            setattr(incident, name, value)
        past = {"rollbacks": 0, "rolled_back": False, "steps_run": 372, **self.past}
        settings = Settings(**{"mode": "act", "receiver": True, **self.settings})
        return Present(incident, RUN, alive, Memory(now=NOW, **self.memory), settings, Past(**past))

    def answers(self, wanted: Wanted = "rollback") -> list[GateAnswer]:
        return answers(wanted, self.present(), self.now)


def requested(*ago: float, run_uid: str = "uid") -> dict[str, Any]:
    return {"requested": [Requested(NOW - one, run_uid, f"{run_uid}{one}") for one in ago]}


SHUT = [
    ("warm_up", "hold", Made(past={"steps_run": 50})),
    ("warm_up", "hold", Made(past={"steps_run": 149, "ramp_steps": 100})),
    ("cool_down", "hold", Made(past={"rolled_back": True, "steps_run": 60}, settings={"cooldown_steps": 60})),
    ("mode", "deny", Made(settings={"mode": "observe"})),
    ("silenced", "hold", Made(memory={"silences": [Silence({"run": "demo"}, NOW + 60, "ann")]})),
    ("acknowledged", "hold", Made(incident={"acknowledged_by": "ann"})),
    ("maintenance", "hold", Made(memory={"maintenance": [Window("de*", NOW + 3600, "storage")]})),
    ("start_ended", "deny", Made(ended=True)),
    ("start_ended", "deny", Made(incident={"start_id": "another"})),
    ("rerun", "hold", Made(rerun=372)),
    ("run_limit", "deny", Made(past={"rollbacks": 2})),
    ("day_limit", "hold", Made(memory=requested(10.0, 20.0, 30.0))),
    ("fleet_limit", "hold", Made(memory=requested(1.0, 2.0, run_uid="x"), settings={"max_actions_per_day": 2})),
    ("approval", "hold", Made(settings={"mode": "approve"})),
    ("approval", "hold", Made(incident={"needs_approval": True, "approved_plan": "plan_of_yesterday"})),
    ("expired", "deny", Made(incident={"decided_time": NOW - 86_401})),
    ("no_receiver", "deny", Made(settings={"receiver": False})),
    ("not_live", "deny", Made(polled=False)),
    ("unauthenticated", "deny", Made(source={"authenticated": False})),
    ("not_allowed", "deny", Made(source={"may_act": False})),
    ("catching_up", "hold", Made(source={"caught_up": False})),
    ("catching_up", "hold", Made(source={"reachable": False})),
    ("catching_up", "hold", Made(source={"last_seq": 381})),
    ("stale", "hold", Made(now=NOW + 60)),
    ("evidence", "hold", Made(incident={"evidence_until": NOW + 5})),
]


@pytest.mark.parametrize(("name", "answer", "made"), SHUT)
def test_a_gate_that_is_shut_is_the_first_that_holds_and_says_why(name: str, answer: str, made: Made) -> None:
    given = made.answers()
    assert held_by(given) == name
    shut = next(one for one in given if one.gate == name)
    assert shut.answer == answer
    assert shut.why.endswith(".") or "storage" in shut.why


def test_every_gate_is_shown_shut() -> None:
    assert {name for name, _, _ in SHUT} == {gate.name for gate in GATES}


def test_with_all_gates_open_nothing_holds_and_all_have_answered() -> None:
    for wanted in DELIVERED:
        given = Made().answers(wanted)
        assert held_by(given) is None, wanted
        assert [one.gate for one in given] == [gate.name for gate in GATES if wanted in gate.of]
        assert len(given) >= 15


def test_what_hands_over_waits_for_the_runs_own_steps_alone_and_a_stop_does_not_even_for_those() -> None:
    assert [one.gate for one in Made().answers("escalate")] == list(DECIDING)
    young = Made(past={"steps_run": 3})
    assert held_by(young.answers("escalate")) == "warm_up"
    assert held_by(young.answers("stop")) is None


def test_what_a_probe_has_answered_does_not_wait_for_the_probes_own_warm_up() -> None:
    assert held_by(Made(past={"steps_run": 3, "answered": True}).answers()) is None


def test_a_gate_says_when_it_opens_where_it_knows() -> None:
    def until(name: str, made: Made) -> float | None:
        return next(one.until for one in made.answers() if one.gate == name)

    silences = [
        Silence({}, NOW + 60, "ann"),
        Silence({"run": "demo"}, NOW + 90, "bob"),
        Silence({"run": "x"}, None, "c"),
    ]
    assert until("silenced", Made(memory={"silences": silences})) == NOW + 90
    assert until("silenced", Made(memory={"silences": [*silences, Silence({}, None, "d")]})) is None
    windows = [Window("*", NOW + 60), Window("demo", NOW + 600), Window("other", NOW + 6000)]
    assert until("maintenance", Made(memory={"maintenance": windows})) == NOW + 600
    assert until("day_limit", Made(memory=requested(100.0, 200.0, 300.0, 400.0))) == NOW - 300 + DAY
    assert until("evidence", Made(incident={"evidence_until": NOW + 5})) == NOW + 5
    assert until("approval", Made(settings={"mode": "approve"})) is None


def test_a_gate_opens_at_the_time_that_it_said() -> None:
    made = Made(memory=requested(100.0, 200.0, 300.0))
    for wanted in ENDING:
        assert held_by(made.answers(wanted)) == "day_limit"
    assert held_by(made.answers("lower_lr")) is None
    made.now = NOW - 300 + DAY
    open_again = next(one for one in answers("rollback", made.present(), made.now) if one.gate == "day_limit")
    assert open_again.answer == "allow"


def test_requests_of_other_runs_count_for_the_fleet_alone() -> None:
    others = Made(memory=requested(*map(float, range(1, 20)), run_uid="x"))
    assert held_by(others.answers()) is None
    assert held_by(Made(memory=requested(*map(float, range(1, 21)), run_uid="x")).answers()) == "fleet_limit"


def test_an_approval_of_the_very_plan_opens_what_waits_for_a_person() -> None:
    assert INCIDENT.plan is not None
    approved = {"acknowledged_by": "ann", "needs_approval": True, "approved_plan": INCIDENT.plan.plan_id}
    assert held_by(Made(incident=approved, settings={"mode": "approve"}).answers()) is None
    assert held_by(Made(incident={**approved, "approved_plan": "another"}).answers()) == "acknowledged"


@how(max_examples=100, deadline=None)
@given(
    st.sampled_from(DELIVERED),
    st.lists(st.sampled_from([made for _, _, made in SHUT]), max_size=3),
    st.booleans(),
)
def test_whatever_is_shut_the_answers_are_those_of_the_list_and_the_first_shut_one_holds(
    wanted: Wanted, shut: list[Made], observing: bool
) -> None:
    made = Made()
    for one in shut:
        for name in ("incident", "past", "settings", "memory", "source"):
            getattr(made, name).update(getattr(one, name))
        made.polled &= one.polled
        made.ended |= one.ended
        made.rerun = made.rerun or one.rerun
        made.now = max(made.now, one.now)
    if observing:
        made.settings["mode"] = "observe"
    given = made.answers(wanted)
    assert [one.gate for one in given] == [gate.name for gate in GATES if wanted in gate.of]
    first = next((one.gate for one in given if one.answer != "allow"), None)
    assert held_by(given) == first
    if observing:
        assert first is not None
    assert all(bool(one.why) is (one.answer != "allow") for one in given)


def test_the_list_names_each_gate_once_with_its_question_and_its_way_to_open() -> None:
    assert len({gate.name for gate in GATES}) == len(GATES)
    assert all(gate.question.endswith((".", "?")) and gate.opens.endswith(".") for gate in GATES)
    assert set(DECIDING) == {gate.name for gate in GATES if "escalate" in gate.of}
