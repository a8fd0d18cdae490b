"""A lower learning rate for a while: decided, named, asked for, and read from the records whether it was done and came back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.rules.core.runs import Attempt, Played, acting, default_pack, only, plan_in, seen, small_pack
from trainwarden.plan import Lowering, Plan, check_plan
from trainwarden.record import Event, Step
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Command, Happened, Receipt, Steps
from trainwarden.webhook import decode_envelope, request_id

ASKED = "training.learning_rate.lower.requested"
JUMP = 300
#: Half a second a step: twenty steps ahead.
SETTINGS: dict[str, Any] = {
    "lower_lr": True,
    "lower_lr_steps": 60,
    "lower_lr_return_steps": 20,
    "lower_lr_ahead_seconds": 10.0,
    "persist_steps": 150,
}


class Live:
    """A run whose rate jumps at step 300 and whose loss stays high from there on, until the rate is lowered.

    ``obeys``: by rank, whether its exporter does what is asked (None: it says that it does not); ``heals``: the lowering helps.
    """

    def __init__(
        self,
        obeys: tuple[bool | None, ...] = (True,),
        heals: bool = True,
        returns: bool = True,
        events: bool = True,
        tells_rate: bool = True,
        last: int = 900,
        played: Played | None = None,
        **settings: Any,
    ) -> None:
        self.obeys, self.heals, self.returns, self.events, self.tells_rate = obeys, heals, returns, events, tells_rate
        self.played = played or acting(small_pack(), **{**SETTINGS, **settings})
        self.attempt = Attempt(last=last, world_size=len(obeys), end=None, changes=[self._change])
        self.lowering: Lowering | None = None
        self.plan: Plan | None = None
        self.says: Any = "executed"
        self.helped = False
        self.at = 0
        self._lines: Iterator[Step | Event] = self.attempt.lines()
        self._seq = [0] * len(obeys)
        self._answered: set[str] = set()

    def _change(self, step: int, signals: dict[str, Any]) -> None:
        if step >= JUMP:
            signals["lr"]["all"] *= 1.6
            signals["loss"] += 0.0 if self.helped else 0.5

    def multiplier(self, rank: int, step: int) -> float:
        if self.lowering is None or self.obeys[rank] is not True:
            return 1.0
        return self.lowering.at(step if self.returns else min(step, self.lowering.returns - 1))

    def _take(self, rank: int, line: Step | Event) -> None:
        self._seq[rank] += 1
        line = msgspec.structs.replace(line, seq=self._seq[rank])
        if isinstance(line, Event):
            self.played.take(Happened(self.attempt.who, rank, line))
            return
        signals = dict(line.signals, lr={"all": line.signals["lr"]["all"] * self.multiplier(rank, line.step)})  # type: ignore[index, call-overload, operator]
        if not self.tells_rate:
            del signals["lr"]
        self.played.take(Steps(self.attempt.who, rank, (msgspec.structs.replace(line, signals=signals),)))
        self.played.take(seen(self.attempt, line.time, self._seq[rank]) if rank == 0 else _seen(self, line, rank))

    def play(self, upto: int) -> dict[str, Any]:
        """Go on up to a step and return the incident of the jump."""
        for line in self._lines:
            if isinstance(line, Step):
                self.at = line.step
                if self.lowering is not None and self.heals and self.lowering.at(line.step) < 1:
                    self.helped = True
                for rank, obeys in enumerate(self.obeys):
                    self._tell(rank, obeys, line.step - 1, line.time)
            for rank in range(len(self.obeys)):
                self._take(rank, line)
            self._answer()
            if isinstance(line, Step) and line.step >= upto:
                break
        return next((one for one in self.played.incidents[::-1] if one["severity"] != "info"), {})

    def asked(self) -> Lowering:
        """Go on until the request has left."""
        while self.lowering is None and self.at < JUMP + 150:
            self.play(self.at + 1)
        assert self.lowering is not None
        return self.lowering

    def _answer(self) -> None:
        """Do as receiver and exporters do with a request."""
        for sent in self.played.sent(of_type=ASKED):
            if sent.key in self._answered:
                continue
            self._answered.add(sent.key)
            plan = decode_envelope(msgspec.json.encode(sent.body)).data.plan
            self.plan, self.lowering = plan, plan.lowering
            self.played.take(Receipt(sent.key, self.says, self.attempt.time(self.at), "", "a file"))

    def _tell(self, rank: int, obeys: bool | None, step: int, time: float) -> None:
        if self.lowering is None or self.plan is None or not self.events:
            return
        state = {
            self.lowering.first_step - 1: "began",
            self.lowering.returns - 1: "returns",
            self.lowering.end - 1: "ended",
        }
        fields: dict[str, Any] = {"plan_id": self.plan.plan_id, **msgspec.to_builtins(self.lowering)}
        if obeys and step in state:
            self._take(rank, Event(kind="lower_lr", time=time, step=step, fields={**fields, "state": state[step]}))
        elif obeys is None and step == self.lowering.first_step - 5:
            why = {"state": "not_applied", "reason": "not every rank had read it"}
            self._take(rank, Event(kind="lower_lr", time=time, step=step, fields={**fields, **why}))


def _seen(live: Live, line: Step, rank: int) -> Any:
    return msgspec.structs.replace(seen(live.attempt, line.time, live._seq[rank]), rank=rank)


def says(incident: dict[str, Any]) -> str:
    return "\n".join(line["says"] for line in incident["timeline"])


def test_it_is_asked_for_with_a_step_that_lies_ahead_and_the_attempt_goes_on() -> None:
    live = Live()
    live.asked()
    incident = live.play(live.at + 5)
    sent = only(live.played.sent(of_type=ASKED))
    envelope = decode_envelope(msgspec.json.encode(sent.body))
    plan = envelope.data.plan
    check_plan(plan)
    assert sent.key == request_id("uid", 0, "lower_lr", 0) == incident["webhook_id"]
    assert (plan.action, plan.for_attempt, plan.target) == ("lower_lr", 0, None)
    assert (plan.lr_factor, plan.lr_steps, plan.lr_return_steps) == (0.5, 60, 20)
    asked_at = next(line["step"] for line in incident["timeline"] if "is requested" in line["says"])
    assert plan.at_step == asked_at + 20
    assert sent.expires_at == sent.created + 10.0  # behind its step it is worth nothing
    assert set(plan.reasons) == {"lr_factor", "lr_steps", "at_step"}
    assert incident["cause"]["name"] == "learning_rate"
    assert (incident["action"], incident["state"]) == ("lower_lr", "confirmed")
    assert incident["severity"] == "warning"  # of soft actions nobody is called
    assert plan_in(incident) == plan
    assert live.played.rollbacks == []


def test_the_records_show_that_it_is_lowered_and_that_it_is_back_and_then_it_heals() -> None:
    live = Live(played=acting(default_pack(), **SETTINGS, heal_steps=20, level_steps=20))
    lowering = live.asked()
    first, end = lowering.first_step, lowering.end
    assert live.play(first - 1)["done"] == "executed"
    assert live.play(first)["done"] == "lowered"
    held = live.play(end - 1)
    assert (held["done"], held["state"]) == (
        "lowered",
        "confirmed",
    )  # healthy for long, and not healed before it is back
    assert live.play(end)["done"] == "returned"
    incident = live.play(end + 260)
    assert incident["state"] == "recovered", says(incident)
    assert f"The learning rate at step {first} is " in says(incident)
    assert "it is lowered, 0.5 times was asked" in says(incident)
    assert f"The learning rate at step {end} is " in says(incident)
    assert len(live.played.sent(of_type=ASKED)) == 1
    assert live.played.rollbacks == []
    changes = [one for one in live.played.notices if one["kind"] == "planned_change"]
    assert list(dict.fromkeys(one["step"] for one in changes)) == [first - 1, lowering.returns - 1]
    assert all("lower lr" in one["says"] and "the loss is judged as ever" in one["says"] for one in changes)


def test_records_without_any_event_are_believed_all_the_same() -> None:
    live = Live(events=False)
    live.asked()
    assert live.lowering is not None
    assert live.play(live.lowering.end)["done"] == "returned"


def test_reports_of_ranks_whose_records_show_nothing_are_not_believed() -> None:
    live = Live(obeys=(False,))
    live.asked()
    assert live.lowering is not None
    live._tell(0, True, live.lowering.first_step - 1, live.attempt.time(live.at))
    incident = live.play(live.lowering.first_step)
    assert incident["done"] == "not_applied"
    assert "it is not lowered, 0.5 times was asked" in says(incident)


def test_what_all_ranks_refuse_is_not_applied_and_a_rollback_follows_where_it_stays_high() -> None:
    live = Live(obeys=(None, None), heals=False)
    live.asked()
    assert live.lowering is not None
    incident = live.play(live.lowering.first_step - 3)
    assert incident["done"] == "not_applied"
    assert "Rank 0 says that the learning rate is not lowered: not every rank had read it." in says(incident)
    incident = live.play(JUMP + 180)
    assert (incident["action"], incident["state"]) == ("rollback", "acting")
    assert only(live.played.rollbacks)
    assert len(live.played.sent(of_type=ASKED)) == 1


def test_one_rank_that_does_not_take_part_is_seen_in_the_records_and_a_person_is_called() -> None:
    live = Live(obeys=(True, False))
    live.asked()
    assert live.lowering is not None
    incident = live.play(live.lowering.first_step)
    assert incident["severity"] == "critical"
    assert f"At step {live.lowering.first_step} the ranks do not have one learning rate: rank 0 " in says(incident)
    assert says(incident).count("do not have one learning rate") == 1


def test_a_rate_that_does_not_come_back_calls_a_person() -> None:
    live = Live(returns=False)
    live.asked()
    assert live.lowering is not None
    incident = live.play(live.lowering.end)
    assert (incident["done"], incident["severity"]) == ("not_returned", "critical")
    assert "it should be back, and is not" in says(incident)


def test_a_rollback_follows_where_the_lower_rate_does_not_help() -> None:
    live = Live(heals=False)
    live.asked()
    assert live.lowering is not None
    incident = live.play(live.lowering.end - 2)
    assert (incident["action"], incident["state"]) == ("lower_lr", "confirmed")  # it has its time to show
    incident = live.play(live.lowering.end + 30)
    assert (incident["action"], incident["state"]) == ("rollback", "acting"), says(incident)
    plan = plan_in(incident)
    check_plan(plan)
    assert plan.target is not None
    assert plan.target.step < JUMP
    assert incident["webhook_id"] == only(live.played.rollbacks).key == request_id("uid", 0, "rollback", 0)


@pytest.mark.parametrize("status", ["refused", "expired", "failed"])
def test_what_the_receiver_refuses_calls_a_person_and_more_may_be_done(status: Any) -> None:
    live = Live(heals=False)
    live.says = status
    live.asked()
    live.lowering = None
    incident = live.play(live.at + 1)
    assert (incident["done"], incident["severity"], incident["state"]) == (status, "critical", "confirmed")
    assert live.play(JUMP + 180)["action"] == "rollback"


def test_a_further_one_of_the_attempt_is_another_request_with_another_plan() -> None:
    live = Live(last=1400, heals=False, persist_steps=5000, open_steps=10_000)
    live.play(1000)
    first, second, *_ = live.played.sent(of_type=ASKED)
    assert second.key == request_id("uid", 0, "lower_lr", 1)
    plans = [decode_envelope(msgspec.json.encode(one.body)).data.plan for one in (first, second)]
    assert plans[0].plan_id != plans[1].plan_id
    assert plans[0].lowering is not None
    assert plans[1].at_step is not None
    assert plans[1].at_step > plans[0].lowering.end
    assert "request 2 of this attempt" in plans[1].reasons["lr_steps"]
    assert len(live.played.sent(of_type=ASKED)) <= 3  # max_lower_lr


def test_it_waits_for_approval_without_a_step_and_keeps_its_name_when_it_leaves() -> None:
    live = Live(mode="approve")
    incident = live.play(JUMP + 90)
    waiting = plan_in(incident)
    assert (incident["state"], incident["held_by"]) == ("awaiting_approval", "approval")
    assert waiting.at_step is None
    live.played.take(
        Command("approve", "ann", live.attempt.time(live.at), incident=incident["id"], plan_id=waiting.plan_id)
    )
    sent = only(live.played.sent(of_type=ASKED))
    plan = decode_envelope(msgspec.json.encode(sent.body)).data.plan
    assert plan.plan_id == waiting.plan_id
    assert plan.at_step == live.at + 20


def test_what_another_daemon_asked_for_is_read_from_the_records_too() -> None:
    asking = Live()
    asking.asked()
    other = Live(mode="observe")
    other.play(asking.at)
    assert other.played.sent(of_type=ASKED) == []
    other.plan, other.lowering = asking.plan, asking.lowering
    assert other.lowering is not None
    incident = other.play(other.lowering.end)
    assert incident["done"] == "returned", says(incident)
    assert incident["webhook_id"] == request_id("uid", 0, "lower_lr", 0)


def test_records_without_a_rate_say_that_nothing_can_be_said() -> None:
    live = Live()
    live.asked()
    live.tells_rate = False
    assert live.lowering is not None
    incident = live.play(live.lowering.end + 60)
    assert incident["done"] == "unverified"


def test_a_state_that_was_stored_on_the_way_goes_on_alike() -> None:
    live = Live()
    live.asked()
    assert live.lowering is not None
    live.play(live.lowering.first_step + 3)
    state = live.played.state
    live.played.state = load(dump(state), state.settings, state.pack)
    assert live.play(live.lowering.end)["done"] == "returned"
    assert live.play(live.lowering.end + 260)["state"] == "recovered"


def test_without_leave_nothing_of_it_is_decided() -> None:
    live = Live(lower_lr=False)
    live.play(JUMP + 120)
    assert live.played.sent(of_type=ASKED) == []


@pytest.mark.parametrize("where", ["before", "within", "behind"])
def test_a_start_that_resumes_from_within_it_runs_at_its_schedule_and_that_is_no_mismatch(where: str) -> None:
    live = Live(last=520, played=acting(default_pack(), **SETTINGS))
    live.asked()
    assert live.lowering is not None
    first = live.lowering.first_step
    live.play(first + 50)
    source = {"before": first - 30, "within": first + 20, "behind": first + 45}[where]
    again = Attempt(
        number=1,
        first=source + 1,
        last=source + 120,
        end=None,
        began=live.attempt.began + 5000,
        start={"resumed_from": {"attempt": 0, "step": source, "path": f"ckpt/0/{source}"}},
        changes=[lambda step, signals: signals["lr"].update(all=signals["lr"]["all"] * 1.6)],
    )
    live.played.play(again, live=True)
    mismatched = [one for one in live.played.incidents if one["attempt"] == 1 and "TrainingResumeLr" in one["alerts"]]
    assert mismatched == []
    assert len(live.played.sent(of_type=ASKED)) == 1
