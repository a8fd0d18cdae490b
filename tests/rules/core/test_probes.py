"""Probes: what is asked of an unclear incident, what an attempt answers, and which plan follows (cases A24, A38, A39)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import (
    BATCH,
    BEGIN,
    Attempt,
    Change,
    Played,
    acting,
    core,
    following,
    only,
    plan_in,
    seen,
)
from trainwarden.plan import check_plan
from trainwarden.record import Event
from trainwarden.rules.core.attribution import probe_answer
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, Receipt, Steps
from trainwarden.webhook import decode_envelope, request_id

#: Enough of persistence for these short runs.
ALLOWED: dict[str, Any] = {"probe": True, "persist_steps": 30, "warmup_steps": 20}


def bad(first: int, last: int, by: float = 1.5) -> Change:
    """Samples that nothing betrays but the loss and, as a shock, the gradient; what they leave behind decays."""

    def change(step: int, signals: dict[str, Any]) -> None:
        if first <= step <= last:
            signals["loss"] += by
            signals["grad_norm"]["all"] *= 4.0
        elif step > last:
            signals["loss"] += 0.3 * by * math.exp(-(step - last) / 300)

    return change


def asked(*changes: Change, upto: int = 420, **settings: Any) -> Played:
    """A run that breaks at step 351, up to where a probe was asked for."""
    played = acting(**{**ALLOWED, **settings})
    played.play(Attempt(changes=changes or [bad(351, 470)], end="signal"), live=True, upto=upto)
    return played


def probing(played: Played, *changes: Change, **changed: Any) -> Attempt:
    """The attempt that the newest plan asks for, with what happens in it."""
    plan = plan_in(played.incidents[-1])
    extra = {} if plan.probe is None else {"probe": msgspec.to_builtins(plan.probe)}
    return following(played, plan.for_attempt, *changes, start=extra, **changed)


def says(incident: dict[str, Any]) -> str:
    return "\n".join(line["says"] for line in incident["timeline"])


def test_an_unclear_incident_asks_for_the_same_samples_again_and_says_what_either_answer_would_mean() -> None:
    played = asked()
    incident = only(played.incidents)
    plan = plan_in(incident)
    check_plan(plan)
    assert (incident["action"], incident["state"]) == ("probe", "acting")
    assert plan.probe is not None
    assert plan.probe.kind == "replay"
    assert plan.probe.first_step <= 351 < 371 <= plan.probe.end
    assert plan.probe.samples
    assert plan.skip_samples == []
    assert plan.reset_optimizer  # beta2 0.999: no checkpoint is older by its memory
    assert set(plan.reasons) >= {"target", "probe", "fallback_targets", "reset_optimizer", "rewarmup_steps"}
    assert "it is the data" in plan.reasons["probe"]
    assert "the optimizer's state or the hardware" in plan.reasons["probe"]
    (sent,) = played.sent(of_type="training.probe.requested")
    assert sent.key == request_id("uid", 0, "probe", 0)
    assert decode_envelope(msgspec.json.encode(sent.body)).data.plan == plan
    assert played.rollbacks == []


def test_observing_says_what_a_probe_would_tell_and_asks_for_none() -> None:
    watched = core(**ALLOWED)
    watched.play(Attempt(changes=[bad(351, 470)], end="signal"), upto=420)
    incident = only(watched.incidents)
    assert (incident["action"], incident["held_by"]) == ("probe", "mode")
    assert "if step 351 goes wrong again it is the data" in says(incident)
    assert incident["cheapest_test"].startswith("Make steps 350 to 371 again with the same samples: if step 351 goes")
    assert incident["plan"] == only(asked().incidents)["plan"]
    assert watched.sent() == []


def test_samples_that_do_it_again_are_dirty_and_the_plan_behind_leaves_them_out() -> None:
    played = asked()
    first_plan = plan_in(only(played.incidents))
    played.play(probing(played, bad(351, 470), end="signal"), live=True, upto=380)
    before, after = played.incidents
    assert before["verification"]["answer"] == "again"
    assert (before["state"], before["cause"]["name"]) == ("not_recovered", "data")
    assert "broke at step 351 again" in says(before)
    assert after["follows"] == before["id"]
    assert after["cause"]["name"] == "data"
    assert after["cause"]["confidence"] >= 0.5
    assert "probe" in {one["kind"] for one in after["evidence"]}
    plan = plan_in(after)
    check_plan(plan)
    assert (plan.action, plan.probe, plan.lr_factor, plan.reset_optimizer) == ("rollback", None, 1.0, False)
    assert first_plan.probe is not None
    assert all(any(a <= first and end <= b for a, b in plan.skip_samples) for first, end in first_plan.probe.samples)
    assert any(first <= 350 * BATCH and end >= 400 * BATCH for first, end in plan.skip_samples)  # its whole shard
    assert plan.target is not None
    assert plan.target.attempt == 0  # nothing of a probe that did not pass is a target
    (sent,) = played.rollbacks
    assert sent.key == request_id("uid", 1, "rollback", 0)

    played.play(probing(played), live=True)
    last = played.incidents[-1]
    assert (last["state"], last["done"]) == ("recovered", "executed"), says(last)


def test_samples_that_pass_were_met_by_a_bad_state_and_the_attempt_goes_on() -> None:
    played = asked()
    played.play(probing(played), live=True)
    incident = only(played.incidents)
    assert incident["verification"]["answer"] == "passed"
    assert incident["state"] == "recovered", says(incident)
    assert incident["cause"]["name"] == "optimizer_state"  # it was reset
    assert incident["cause"]["scores"].get("data", 0.0) < 0.1
    assert incident["suspect_samples"] == []
    assert "they passed" in says(incident)
    assert played.rollbacks == []
    assert len(played.sent(of_type="training.probe.requested")) == 1


def test_with_a_state_older_than_the_optimizers_memory_nothing_is_reset_and_a_pass_suspects_the_machine() -> None:
    start = {"beta2": 0.98, "betas": [0.9, 0.98]}
    played = acting(**ALLOWED)
    played.play(Attempt(changes=[bad(351, 470)], end="signal", start=start), live=True, upto=420)
    plan = plan_in(only(played.incidents))
    assert plan.target is not None
    assert plan.target.step == 250  # a memory of fifty steps
    assert (plan.reset_optimizer, plan.rewarmup_steps) == (False, 0)
    attempt = probing(played)
    attempt.start = {**start, **attempt.start}
    played.play(attempt, live=True)
    incident = only(played.incidents)
    assert incident["state"] == "recovered", says(incident)
    assert incident["cause"]["name"] == "hardware"
    assert "passing fault of the hardware" in says(incident)


def test_checkpoints_of_a_probe_become_targets_once_it_has_passed() -> None:
    played = asked()
    played.play(probing(played, bad(520, 700), last=700), live=True)
    first, second = played.incidents
    assert first["verification"]["answer"] == "passed"
    plan = plan_in(second)
    assert plan.target is not None
    assert plan.target.attempt == 1
    assert plan.target.step >= 450


def test_another_order_of_the_data_answers_nothing_and_is_not_taken_for_an_answer() -> None:
    played = asked()
    attempt = probing(played)
    record = attempt.record

    def elsewhere(step: int, seq: int) -> Any:
        found = record(step, seq)
        found.samples = [(first + 3 * BATCH, end + 3 * BATCH) for first, end in found.samples]
        return found

    attempt.record = elsewhere  # type: ignore[method-assign]
    played.play(attempt, live=True)
    incident = played.incidents[0]
    assert incident["verification"]["answer"] != "passed"
    assert (incident["state"], incident["verdict"]) == ("escalated", "mismatch")
    assert "other samples" in says(incident)


def test_losses_of_other_batches_answer_nothing_where_no_record_tells_the_samples() -> None:
    played = asked()
    attempt = probing(played, seed=1)
    record = attempt.record

    def silent(step: int, seq: int) -> Any:
        found = record(step, seq)
        found.samples, found.shards = [], []
        return found

    attempt.record = silent  # type: ignore[method-assign]
    played.play(attempt, live=True)
    incident = played.incidents[0]
    assert incident["verification"]["answer"] == "unclear", says(incident)
    assert "not those of the same batches" in says(incident)
    assert incident["suspect_samples"]


def test_what_breaks_at_another_step_clears_no_cause() -> None:
    played = asked()
    played.play(probing(played, bad(365, 480)), live=True, upto=385)
    incident = played.incidents[0]
    assert incident["verification"]["answer"] == "unclear", says(incident)
    assert "broke at step 365" in says(incident)


def test_a_probe_is_not_made_twice() -> None:
    played = asked(max_probes=5)
    played.play(probing(played, bad(365, 480), end="signal"), live=True, upto=420)
    again = played.incidents[-1]
    assert again["action"] != "probe"
    assert len(played.sent(of_type="training.probe.requested")) == 1


def test_a_run_has_so_many_probes_and_no_more() -> None:
    played = asked(max_probes=0)
    incident = only(played.incidents)
    assert incident["action"] == "rollback"
    assert incident["held_by"] == "approval"


def test_without_a_checkpoint_that_is_old_enough_a_person_takes_over_with_advice() -> None:
    played = acting(**ALLOWED)
    played.play(Attempt(changes=[bad(351, 470)], checkpoint_every=0, end="signal"), live=True, upto=420)
    incident = only(played.incidents)
    assert incident["action"] == "escalate"
    assert incident["advice"] == [
        "No complete checkpoint was ever reported: let the run save some, and tell the exporter of each."
    ]


def evaluations(attempt: Attempt, *steps: int) -> Attempt:
    """The attempt with evaluations behind these steps."""
    lines = list(attempt.lines())

    def told() -> Any:
        shift = 0
        for line in lines:
            line = msgspec.structs.replace(line, seq=line.seq + shift)
            yield line
            if hasattr(line, "signals") and line.step in steps:
                shift += 1
                yield Event(kind="evaluation", time=line.time, seq=line.seq + 1, step=line.step, fields={"loss": 2.0})

    attempt.lines = told  # type: ignore[method-assign]
    return attempt


def behind_an_evaluation() -> Played:
    played = acting(**ALLOWED)
    attempt = Attempt(changes=[bad(351, 470)], end="signal", checkpoint_every=40)
    played.play(evaluations(attempt, 100, 350), live=True, upto=420)
    return played


def test_what_began_behind_an_evaluation_is_tried_without_it() -> None:
    played = behind_an_evaluation()
    incident = only(played.incidents)
    plan = plan_in(incident)
    assert plan.probe is not None, says(incident)
    assert plan.probe.kind == "without_evaluation"
    assert plan.target is not None
    assert plan.target.step == 320
    assert not plan.reset_optimizer
    assert "without any evaluation" in plan.reasons["probe"]
    played.play(probing(played), live=True)
    incident = only(played.incidents)
    assert incident["state"] == "recovered", says(incident)
    assert incident["cause"]["name"] == "optimizer_state"
    assert "side effect of the evaluation" in incident["summary"]


def test_what_comes_again_without_the_evaluation_is_not_its_doing() -> None:
    played = behind_an_evaluation()
    played.play(probing(played, bad(351, 470), end="signal"), live=True, upto=380)
    before, after = played.incidents
    assert "it is not the evaluation" in says(before)
    assert after["cause"]["name"] == "data"
    assert plan_in(after).action == "rollback"


def test_a_trainer_that_evaluates_all_the_same_answers_nothing() -> None:
    played = behind_an_evaluation()
    played.play(evaluations(probing(played, bad(351, 470)), 350), live=True, upto=385)
    incident = played.incidents[0]
    assert incident["verification"]["answer"] == "unclear"
    assert "it evaluated behind step 350 all the same" in says(incident)


def test_a_probe_that_could_not_be_applied_is_handed_to_a_person() -> None:
    played = asked()
    attempt = probing(played)
    attempt.start["plan_applied"]["not_applied"] = {"probe": "it asks about step 350"}
    played.play(attempt, live=True, upto=310)
    incident = only(played.incidents)
    assert (incident["state"], incident["verdict"]) == ("escalated", "mismatch")


def test_a_probe_that_nobody_carries_out_is_handed_to_a_person() -> None:
    played = asked()
    (sent,) = played.sent(of_type="training.probe.requested")
    played.take(Receipt(sent.key, "refused", BEGIN + 500, "unreadable_target", "gone"))
    assert only(played.incidents)["state"] == "escalated"


def test_state_that_is_stored_and_read_back_anywhere_answers_the_same() -> None:
    whole, broken = asked(), asked()
    for played in (whole, broken):
        attempt = probing(played, bad(351, 470), end="signal")
        for number, line in enumerate(attempt.lines()):
            if isinstance(line, Event):
                played.take(Happened(attempt.who, 0, line))
            elif line.step <= 380:
                played.take(Steps(attempt.who, 0, (line,)))
                played.take(seen(attempt, line.time, line.seq))
            if played is broken and number % 7 == 0:
                parts = dump(played.state)
                played.state = load(parts, played.state.settings, played.state.pack)
    assert [one["cause"] for one in whole.incidents] == [one["cause"] for one in broken.incidents]
    assert whole.incidents[-1]["plan"] == broken.incidents[-1]["plan"]


def test_an_answer_speaks_of_its_own_step_alone() -> None:
    played = asked()
    played.play(probing(played, bad(351, 470), end="signal"), live=True, upto=380)
    run = played.state.memory.runs["uid"]
    assert [one.answer for one in run.probed] == ["again"]
    made = facts(at(range(301, 321), loss=lambda old: old + 2))
    assert probe_answer.find(dataclasses.replace(made, probed=tuple(run.probed))) == []
    near = facts(at(range(351, 361), loss=lambda old: old + 2), onset=351, last=360)
    found = probe_answer.find(dataclasses.replace(near, probed=tuple(run.probed)))
    assert isinstance(found, list)
    assert {one.cause: one.weight > 0 for one in found}["data"] is True
    assert isinstance(probe_answer.find(near), NotPossible)
