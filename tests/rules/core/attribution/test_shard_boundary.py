from __future__ import annotations

from tests.rules.core.made_up_facts import facts
from trainwarden.record import ShardSpan, Step
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
