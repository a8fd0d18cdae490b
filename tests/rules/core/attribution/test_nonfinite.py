from __future__ import annotations

import math

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import not_a_number, spike
from trainwarden.rules.core.attribution.nonfinite import find


def test_a_value_that_turns_non_finite_out_of_usual_ones_is_numeric() -> None:
    (found,) = find(facts(not_a_number(301)))
    assert (found.cause, found.step) == ("numeric", 301)


def test_after_a_growing_loss_it_is_a_consequence() -> None:
    (found,) = find(facts(spike({301: 3.0, 302: 5.0}), not_a_number(303)))
    assert (found.cause, found.weight) == ("", 0.0)


def test_a_batch_without_targets_explains_it() -> None:
    changes = [
        at(range(400), batch_supervised_tokens=4000.0),
        at(range(301, 302), batch_supervised_tokens=0.0, loss=math.nan),
    ]
    (found,) = find(facts(*changes))
    assert found.cause == "data"


def test_finite_values_say_nothing() -> None:
    assert find(facts(spike({301: 3.0}))) == []
