from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.attention_logits import find
from trainwarden.rules.core.facts import NotPossible


def logits(high: float) -> Any:
    def change(step: int, signals: dict[str, Any]) -> None:
        if step % 10 == 0:
            signals["attention_logit"] = {"sampled": 12.0 if step < 200 else 12.0 + (high - 12.0) * (step - 200) / 100}

    return change


def test_logits_that_grew_speak_for_the_model_and_with_a_broken_loss_for_numerics() -> None:
    (found,) = find(facts(logits(120.0)))
    assert (found.cause, found.weight) == ("model", 0.35)
    assert "from 12" in found.says
    broken = find(facts(logits(120.0), at(range(301, 321), loss=math.nan)))
    assert [(one.cause, one.weight) for one in broken] == [("model", 0.35), ("numeric", 0.3)]


def test_beside_a_rule_on_the_same_numbers_it_is_no_second_witness() -> None:
    (found,) = find(replace(facts(logits(120.0)), blamed=(("TrainingAttentionLogitGrowth", "model", 250, 90.0),)))
    assert found.weight == 0.0


def test_logits_that_grew_to_what_a_softmax_bears_say_nothing() -> None:
    assert find(facts(logits(40.0))) == []
    assert find(facts()) == NotPossible("no attention logit is recorded")
