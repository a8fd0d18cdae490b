"""What an incident cost, in steps and in time, by the records alone."""

from __future__ import annotations

import math

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import Attempt
from trainwarden.record import Step
from trainwarden.rules.core.cost import Cost, of_loss, of_rollback
from trainwarden.rules.core.trace import Trace


def trace(first: int = 1, last: int = 100) -> Trace:
    found = Trace(limit=4000)
    for line in Attempt(first=first, last=last, checkpoint_every=0).lines():
        if isinstance(line, Step):
            found.append(line)
    return found


def test_without_a_rollback_it_is_the_steps_at_a_loss_above_the_trend() -> None:
    cost = of_loss(facts(at(range(301, 311), loss=lambda old: old + 1.0)))
    assert (cost.steps, cost.seconds, cost.thrown) == (10, 5.0, False)
    assert of_loss(facts()) == Cost(0, 0.0)


def test_a_rollback_throws_away_what_is_behind_its_target_and_the_wait_is_told_apart() -> None:
    broken = trace()
    cost = of_rollback(broken, 60, float(broken.times()[-1]) + 90.0)
    assert cost == Cost(40, 20.0, thrown=True, idle=90.0)


def test_what_has_left_the_memory_is_unknown_and_a_lying_clock_is_not_believed() -> None:
    broken = trace(first=50)
    cost = of_rollback(broken, 10, float(broken.times()[-1]) - 5.0)
    assert cost is not None
    assert (cost.steps, cost.seconds, cost.idle) == (90, None, None)
    assert of_rollback(None, 10, 0.0) is None
    nan = of_rollback(broken, 60, math.nan)
    assert nan is not None
    assert nan.idle is None
