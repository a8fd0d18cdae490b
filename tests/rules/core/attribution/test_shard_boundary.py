from __future__ import annotations

from collections.abc import Callable

from tests.rules.core.made_up_facts import at, facts
from trainwarden.record import ShardSpan, Step
from trainwarden.rules.core.attribution import attribute
from trainwarden.rules.core.attribution.shard_boundary import find


def test_a_shard_that_begins_at_the_onset_is_named() -> None:
    (found,) = find(facts(onset=301))
    assert (found.cause, found.step) == ("data", 301)
    assert "shard-006" in found.says


def test_a_boundary_far_from_the_onset_says_nothing() -> None:
    assert find(facts(onset=320, last=330)) == []


def test_the_range_of_one_batch_is_no_shard() -> None:
    def batch_only(record: Step) -> None:
        ((first, end),) = record.samples
        record.shards = [ShardSpan("s", first, end)]

    assert find(facts(each=batch_only)) == []


def shards_of(steps: int) -> Callable[[Step], None]:
    """Give the run shards of so many steps, one of which begins at step 301."""

    def change(record: Step) -> None:
        ((first, end),) = record.samples
        each = end - first
        number = (record.step - 301) // steps
        begin = (301 - 1 + number * steps) * each
        record.shards = [ShardSpan(f"shard-{number}", begin, begin + steps * each)]

    return change


def test_the_longer_the_shard_the_less_it_is_a_coincidence() -> None:
    weights = []
    for steps in (10, 150):
        answer = find(facts(each=shards_of(steps)))
        assert isinstance(answer, list)
        weights.append(answer[0].weight)
    assert weights == [0.3, 0.5]


def test_what_ends_with_the_shard_is_the_shards() -> None:
    raised = at(range(301, 351), loss=lambda old: old + 1.0)
    answer = find(facts(raised, each=shards_of(50), last=370))
    assert isinstance(answer, list)
    assert answer[0].weight == 0.8
    assert "those behind its end are not" in answer[0].says
    goes_on = find(facts(at(range(301, 371), loss=lambda old: old + 1.0), each=shards_of(50), last=370))
    assert isinstance(goes_on, list)
    assert goes_on[0].weight == 0.3


def test_batches_that_look_as_ever_say_less_against_a_shard_that_was_bad_from_end_to_end() -> None:
    raised = at(range(301, 351), loss=lambda old: old + 1.0, grad_norm=lambda old: {"all": 5.0})
    assert attribute(facts(raised, each=shards_of(50), last=330)).name == "undetermined"
    cause = attribute(facts(raised, each=shards_of(50), last=370))
    assert (cause.name, cause.confidence > 0.5) == ("data", True)
