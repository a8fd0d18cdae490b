from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import spike
from trainwarden.record import Step
from trainwarden.rules.core.attribution.expected_loss import find
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.ranks import Whose
from trainwarden.rules.core.trace import Trace
from trainwarden.signals import MOST_SOURCES


def mixed(hard: Callable[[int], float], level: float = 2.0) -> Callable[[Step], None]:
    """Let records tell their sources: ``hard`` gives the share of code at a step, whose loss lies ``level`` higher."""

    def tell(record: Step) -> None:
        share = hard(record.step)
        usual = 3.0 + 0.2 * np.log(400 / max(record.step, 1))
        record.signals["source_share"] = {"web": 1 - share, "code": share} if share < 1 else {"code": 1.0}
        loss = record.value("loss") or usual
        record.signals["loss_expected"] = loss if share < 0.5 else loss + level - 2.0

    return tell


def test_a_batch_of_a_hard_source_is_called_one() -> None:
    (found,) = find(facts(spike({301: 2.0}), each=mixed(lambda step: 0.9 if step == 301 else 0.25)))
    assert found.kind == "expected_loss"
    assert (found.cause, found.weight, found.step) == ("", 0.0, 301)
    assert found.test.endswith("trainwarden data show --step 301.")
    assert "(90 % code, usually 25 %): a hard batch, not a harmful one." in found.says


def test_of_several_ranks_no_mix_is_named_for_the_records_name_that_of_one() -> None:
    several = facts(spike({301: 2.0}), each=mixed(lambda step: 0.9 if step == 301 else 0.25))
    (found,) = find(replace(several, whose=Whose(of_ranks=2)))
    assert "was to be expected of its sources: a hard batch" in found.says


def test_a_loss_that_the_sources_do_not_explain_is_called_so() -> None:
    def told(record: Step) -> None:
        record.signals["source_share"] = {"web": 1.0}
        loss = record.value("loss")
        assert loss is not None
        record.signals["loss_expected"] = loss - (2.0 if record.step == 301 else 0.0)

    (found,) = find(facts(spike({301: 2.0}), each=told))
    assert found.says.startswith("The batch's sources do not explain the loss of step 301: ")


def test_half_an_explanation_and_no_sources_say_nothing() -> None:
    def half(record: Step) -> None:
        record.signals["loss_expected"] = (record.value("loss") or 0.0) - (1.0 if record.step == 301 else 0.0)

    assert find(facts(spike({301: 2.0}), each=half)) == []
    assert isinstance(find(facts(spike({301: 2.0}))), NotPossible)
    assert find(facts(each=mixed(lambda step: 0.25))) == []
    assert find(facts(spike({301: float("nan")}), each=mixed(lambda step: 0.25))) == []


def test_without_names_of_sources_the_expected_loss_still_speaks() -> None:
    def told(record: Step) -> None:
        record.signals["loss_expected"] = record.value("loss") or 0.0

    (found,) = find(facts(spike({301: 2.0}), each=told))
    assert "was to be expected of its sources: a hard batch" in found.says


def remembered(sources: int) -> tuple[Trace, Trace]:
    """Return the traces of the same records, taken one by one and in blocks; each names three of so many sources."""
    chance = np.random.default_rng(0)
    records = []
    for step in range(1, 60):
        shares: dict[str, Any] = {f"s{number}": float(chance.random()) for number in chance.integers(0, sources, 3)}
        signals: dict[str, Any] = {"loss": 1.0} if step % 7 == 0 else {"loss": 1.0, "source_share": shares}
        records.append(Step(seq=step, step=step, time=float(step), signals=signals))
    one, other = Trace(limit=16), Trace(limit=16)
    for record in records:
        one.append(record)
    for first in range(0, len(records), 5):
        part = records[first : first + 5]
        other.extend(from_steps(part), part, 0, len(part))
    return one, other


def test_a_trace_remembers_the_same_sources_from_records_and_from_blocks() -> None:
    one, other = remembered(sources=20)
    assert set(one.sources()) == set(other.sources()) == {f"s{number}" for number in range(20)}
    np.testing.assert_array_equal(one.steps, other.steps)
    for source in one.sources():
        name = f"source_share/{source}"
        np.testing.assert_array_equal(one.measured(name), other.measured(name))
        np.testing.assert_array_equal(one.column(name), other.column(name))


def test_a_trace_remembers_no_more_sources_than_an_exporter_tells_apart() -> None:
    for trace in remembered(sources=200):
        assert len(trace.sources()) == MOST_SOURCES + 1
