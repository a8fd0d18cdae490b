"""Where an incident began: back over what leads up to its first alert, and not over noise that lies apart from it."""

from __future__ import annotations

import pytest

from tests.rules.core.runs import Attempt, Change, gradients, not_a_number, spike
from trainwarden.record import Step
from trainwarden.rules.core.facts import before_onset
from trainwarden.rules.core.onset import onset
from trainwarden.rules.core.trace import Trace


def began(*changes: Change, since: int = 300) -> int:
    trace = Trace(limit=4000)
    for line in Attempt(last=since + 10, changes=changes, checkpoint_every=0).lines():
        if isinstance(line, Step):
            trace.append(line)
    return onset(trace, since, *before_onset(trace, None, since))


def test_an_abnormal_record_right_before_is_the_beginning_and_so_is_a_clear_one_with_one_between() -> None:
    assert began(not_a_number(300)) == 300
    assert began(not_a_number(300), spike({299: 0.2})) == 299
    assert began(not_a_number(300), spike({298: 1.0})) == 298
    assert began(not_a_number(300), gradients({298: 5.0})) == 298
    assert began(not_a_number(300), spike({297: 1.0})) == 300


@pytest.mark.parametrize("at", [297, 298])
def test_a_loss_that_barely_stands_out_apart_from_it_leads_up_to_nothing(at: int) -> None:
    assert began(not_a_number(300), spike({at: 0.17})) == 300
