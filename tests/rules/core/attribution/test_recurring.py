from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.recurring import find


def spikes(step: int, signals: dict[str, Any]) -> None:
    if step >= 301 and step % 40 in (21, 22, 23):
        signals["grad_norm"]["all"] *= 8
        if step % 40 != 21 and step % 80 < 40:  # every second surge has a spike of the loss behind it
            signals["loss"] += 0.8


def test_many_spikes_are_counted_and_clear_the_batches() -> None:
    (found,) = find(replace(facts(spikes, onset=301, last=620), offered=("recurring_spikes",)))
    assert (found.cause, found.weight) == ("data", -0.6)
    assert found.says.startswith("8 separate spikes in 320 steps")
    assert "followed 4 of 8" in found.says


def test_few_spikes_or_no_such_rule_say_nothing() -> None:
    assert find(replace(facts(spikes, onset=301, last=400), offered=("recurring_spikes",))) == []
    assert find(facts(spikes, onset=301, last=620)) == []
