from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import gradients, spike
from trainwarden.record import Step
from trainwarden.rules.core.attribution.gradient_lead import find
from trainwarden.rules.core.facts import NotPossible


def test_a_lead_of_four_steps_points_to_the_optimisation() -> None:
    norms = gradients(dict.fromkeys(range(301, 310), 5.0))
    found = find(facts(norms, spike({305: 2.0, 306: 2.0})))
    assert {one.cause for one in found} == {"optimizer_state", "learning_rate"}
    assert "4 steps before" in found[0].says


def test_both_within_a_step_point_to_the_batch() -> None:
    found = find(facts(gradients({301: 9.0}), spike({302: 2.0})))
    assert {one.cause for one in found} == {"data", "numeric"}


def test_one_odd_record_before_the_loss_rises_is_no_rise() -> None:
    norms = gradients(dict.fromkeys(range(301, 312), 5.0))
    found = find(facts(norms, spike({302: 0.3, 305: 3.0, 306: 2.0})))
    assert {one.cause for one in found} == {"optimizer_state", "learning_rate"}
    assert "4 steps before" in found[0].says
    # What is as high as all that follows is one, and so is what comes long before.
    assert {one.cause for one in find(facts(norms, spike({302: 2.9, 305: 3.0, 306: 2.0})))} == {"data", "numeric"}
    assert {one.cause for one in find(facts(norms, spike({302: 0.3, 309: 3.0, 310: 2.0})))} == {"data", "numeric"}


def test_the_batch_whose_update_did_the_harm_is_named_once_the_loss_stays_up() -> None:
    high = spike(dict.fromkeys(range(302, 360), 2.0))
    weights = {one.cause: one.weight for one in find(facts(gradients({301: 9.0}), high, last=340))}
    assert weights["data"] > 0.5 > weights["numeric"] + weights["hardware"]
    assert "data show --step 301" in find(facts(gradients({301: 9.0}), high, last=340))[0].test
    # Too soon to tell, a gradient that had been rising, one that is not as large, a loss that came back: no more than before.
    for made in (
        facts(gradients({301: 9.0}), high, last=320),
        facts(gradients({300: 4.0, 301: 9.0}), high, last=340, onset=300),
        facts(gradients({301: 4.0}), high, last=340),
        facts(gradients({301: 9.0}), spike({302: 2.0, 303: 2.0}), last=340),
    ):
        assert max(one.weight for one in find(made)) <= 0.25


def test_a_loss_without_any_change_of_the_gradient_is_a_hard_batch() -> None:
    (found,) = find(facts(spike({301: 2.0})))
    assert found.cause == "data"
    assert "hard batch" in found.says


def test_a_loss_that_stays_high_is_no_hard_batch() -> None:
    stays = dict.fromkeys(range(301, 360), 2.0)
    assert "hard batch" in find(facts(spike(stays), last=325))[0].says
    assert find(facts(spike(stays), last=345)) == []
    # Also once it has come back, and of a hard batch long ago it is still said.
    assert find(facts(spike(stays), last=420)) == []
    assert "hard batch" in find(facts(spike({301: 2.0}), last=420))[0].says


def test_a_level_that_single_records_hardly_show_is_no_hard_batch_either() -> None:
    def raised(signals: Any) -> Any:
        return signals + 0.11 if isinstance(signals, float) else signals

    shifted = at(range(301, 500), loss=raised)
    found = facts(shifted, spike({330: 0.5}), last=400)
    assert 0 < int(found.loss_high.sum()) < 30
    assert find(found) == []


def test_a_record_that_stands_out_long_behind_the_onset_says_nothing_of_it() -> None:
    assert "hard batch" in find(facts(spike({320: 2.0}), last=400))[0].says
    assert find(facts(spike({372: 2.0}), last=400)) == []


def test_a_loss_that_is_no_number_is_no_hard_batch() -> None:
    assert find(facts(spike({301: float("nan")}))) == []


def test_an_order_within_the_cadence_is_no_evidence() -> None:
    def every_tenth(record: Step) -> None:
        if record.step % 10:
            del record.signals["grad_norm"]

    def large(signals: Any) -> Any:
        return {"all": 9.0}

    found = find(facts(at(range(301, 340), grad_norm=large), spike({308: 2.0, 309: 2.0}), each=every_tenth, onset=300))
    assert found == []


def test_without_an_abnormal_loss_there_is_no_order() -> None:
    assert isinstance(find(facts(gradients({301: 9.0}))), NotPossible)
