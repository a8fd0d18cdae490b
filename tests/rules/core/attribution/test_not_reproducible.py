from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import Attempt, Change
from trainwarden.record import Step
from trainwarden.rules.core.attribution.not_reproducible import find
from trainwarden.rules.core.facts import Facts, NotPossible
from trainwarden.rules.core.resumed import Planned
from trainwarden.rules.core.trace import Trace

HIGH = at(range(301, 321), loss=lambda old: old + 2.0)


def trace(*changes: Change, last: int = 330) -> Trace:
    found = Trace(limit=4000)
    for line in Attempt(last=last, changes=changes, checkpoint_every=0).lines():
        if isinstance(line, Step):
            found.append(line)
    return found


def broken(other: Trace) -> Facts:
    return replace(facts(HIGH), traces={0: other})


def test_steps_that_another_attempt_passed_with_the_same_data_clear_the_data() -> None:
    found = {one.cause: one.weight for one in find(broken(trace()))}
    assert found["hardware"] == 0.4
    assert found["data"] == -0.8


def test_an_attempt_that_broke_there_too_rules_it_out() -> None:
    assert find(broken(trace(HIGH))) == []


def test_an_attempt_that_did_not_come_so_far_or_one_changed_on_purpose_cannot_tell() -> None:
    assert isinstance(find(broken(trace(last=300))), NotPossible)
    assert isinstance(find(replace(broken(trace()), planned=Planned(0.5, ("factor",)))), NotPossible)
