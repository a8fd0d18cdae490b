from __future__ import annotations

from typing import Any

import numpy as np

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import dirty
from trainwarden.rules.core.attribution.batch_fingerprint import find
from trainwarden.rules.core.facts import NotPossible


def test_batches_that_stay_dirty_speak_strongly_for_the_data() -> None:
    (found,) = find(facts(dirty(301, 350)))
    assert (found.cause, found.step) == ("data", 301)
    assert found.weight >= 0.9
    assert "20 of 20" in found.says
    assert "batch_longest_repeat_tokens" in found.says


def test_one_odd_batch_at_the_onset_speaks_weakly() -> None:
    (found,) = find(facts(at(range(301, 302), batch_longest_repeat_tokens=500.0)))
    assert found.cause == "data"
    assert 0 < found.weight <= 0.5


def test_recovery_afterwards_does_not_dilute_what_was_dirty() -> None:
    (found,) = find(facts(dirty(301, 310), last=400))
    assert found.weight >= 0.9


def test_clean_batches_speak_against_the_data() -> None:
    (found,) = find(facts(at(range(301, 321), loss=9.0)))
    assert (found.cause, found.weight) == ("data", -0.5)


def test_batches_that_turn_odd_after_the_onset_did_not_start_it() -> None:
    (found,) = find(facts(at(range(310, 320), batch_unique_token_ratio=0.9)))
    assert (found.cause, found.weight) == ("", 0.0)


def test_without_a_fingerprint_nothing_is_said() -> None:
    def forget(record: object) -> None:
        for name in list(record.signals):  # type: ignore[attr-defined]
            if name.startswith("batch_"):
                del record.signals[name]  # type: ignore[attr-defined]

    assert isinstance(find(facts(each=forget)), NotPossible)


def test_batches_none_of_which_is_far_off_may_be_so_together() -> None:
    def noisy(step: int, signals: dict[str, Any]) -> None:
        chance = np.random.default_rng(step)
        signals["batch_unique_token_ratio"] = float(chance.normal(0.15 if step >= 301 else 0.24, 0.03))

    together = facts(noisy, last=340)
    assert not together.dirty.any()
    answer = find(together)
    assert isinstance(answer, list)
    assert (answer[0].cause, answer[0].weight) == ("data", 0.6)
    assert "as a whole" in answer[0].says
    few = find(facts(noisy, last=310))
    assert isinstance(few, list)
    assert few[0].weight < 0
