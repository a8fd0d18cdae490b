"""A plan that lowers the learning rate of a running attempt: what it says, what it refuses, what the rate is at each step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trainwarden import plan as plans
from trainwarden.plan import MOST_LOWERED, Lowering, Plan, PlanError, Target

PLAN = Plan(
    plan_id="p-1",
    run_uid="u",
    for_attempt=3,
    action="lower_lr",
    lr_factor=0.25,
    at_step=100,
    lr_steps=10,
    lr_return_steps=2,
)


def changed(**fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(PLAN), **fields})


def test_it_comes_back_as_it_was_and_names_its_steps() -> None:
    plan = plans.decode_plan(plans.encode(PLAN))
    assert plan == PLAN
    lowering = plan.lowering
    assert lowering == Lowering(factor=0.25, first_step=100, steps=10, return_steps=2)
    assert (lowering.returns, lowering.end) == (110, 112)


def test_the_rate_is_lowered_for_its_steps_and_comes_back_evenly() -> None:
    lowering = PLAN.lowering
    assert lowering is not None
    assert [lowering.at(step) for step in (1, 99, 100, 109, 110, 111, 112, 10**9)] == [
        1,
        1,
        0.25,
        0.25,
        0.5,
        0.75,
        1,
        1,
    ]
    at_once = Lowering(factor=0.25, first_step=100, steps=10)
    assert [at_once.at(step) for step in (99, 100, 109, 110)] == [1, 0.25, 0.25, 1]


def test_a_plan_of_another_action_or_without_its_step_yet_lowers_nothing() -> None:
    assert msgspec.structs.replace(PLAN, at_step=None).lowering is None
    assert Plan(plan_id="p", run_uid="u", for_attempt=1, lr_factor=0.5).lowering is None


def test_a_plan_of_an_older_version_is_read_without_them() -> None:
    older = {"plan_id": "p", "run_uid": "u", "for_attempt": 1, "action": "rollback", "lr_factor": 0.5, "at_step": 7}
    plan = plans.decode_plan(msgspec.json.encode(older))
    assert (plan.lr_steps, plan.lr_return_steps, plan.lowering) == (0, 0, None)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed(at_step=None), "x: at_step: is missing"),
        (changed(at_step=0), "x: at_step: 0 is no step"),
        (changed(at_step=2**53), "x: at_step: "),
        (changed(at_step=1.5), "at_step"),
        (changed(lr_factor=1.0), "x: lr_factor: 1.0 lowers nothing"),
        (changed(lr_factor=0.0), "x: lr_factor: 0.0 is not in (0, 1]"),
        (changed(lr_steps=0), "x: lr_steps: 0 is not in 1 to"),
        (changed(lr_steps=MOST_LOWERED + 1), "x: lr_steps: 1000001 is not in"),
        (changed(lr_steps=True), "lr_steps"),
        (changed(lr_return_steps=-1), "x: lr_return_steps: -1 is not in 0 to"),
        (changed(action="rollback"), "x: lr_steps: belongs to a plan whose action is lower_lr"),
        (changed(action="rollback", lr_steps=0), "x: lr_return_steps: belongs to a plan"),
        (changed(reset_optimizer=True), "x: reset_optimizer: cannot be asked of a running attempt"),
        (changed(rewarmup_steps=5), "x: rewarmup_steps: cannot be asked"),
        (changed(skip_samples=[[0, 5]]), "x: skip_samples: cannot be asked"),
        (changed(target=msgspec.to_builtins(Target(attempt=0, step=1, path="c"))), "x: target: cannot be asked"),
        (changed(exclude_hosts=["a"]), "x: exclude_hosts: cannot be asked"),
    ],
)
def test_one_that_cannot_be_meant_is_refused_with_source_and_field(data: bytes, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plans.decode_plan(data, "x")
    assert says in str(caught.value)
