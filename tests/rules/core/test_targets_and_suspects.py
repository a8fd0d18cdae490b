"""Where to go back to, and what to leave out."""

from __future__ import annotations

import pytest

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import BATCH, dirty
from trainwarden.record import ShardSpan, Step
from trainwarden.rules.core.state import Checkpoint, Executed
from trainwarden.rules.core.suspects import suspects
from trainwarden.rules.core.targets import choose, usable


def checkpoint(step: int, attempt: int = 0, **values: object) -> Checkpoint:
    facts_: dict[str, object] = {"complete": True, "finite": True, **values}
    return Checkpoint(attempt=attempt, step=step, path=f"c/{attempt}/{step}", **facts_)  # type: ignore[arg-type]


CHECKPOINTS = [checkpoint(step) for step in range(50, 500, 50)]


def chosen(
    onset: int = 351, uncertainty: int = 1, cause: str = "data", beta2: float | None = 0.99, **values: object
) -> object:
    found = choose(CHECKPOINTS, [], onset, uncertainty, cause, beta2, **values)  # type: ignore[arg-type]
    return found and (found.target.step, found.too_young)


def test_data_goes_back_to_the_newest_one_before_the_onset_less_its_uncertainty() -> None:
    assert chosen() == (300, False)
    assert chosen(onset=352) == (350, False)
    assert chosen(onset=352, uncertainty=10) == (300, False)


def test_what_the_optimizer_remembers_goes_back_one_memory_further() -> None:
    assert chosen(cause="numeric") == (200, False)
    assert chosen(cause="optimizer_state", beta2=0.95) == (300, False)


def test_where_none_is_that_old_the_newest_before_the_onset_is_taken_with_a_reset() -> None:
    assert chosen(cause="numeric", beta2=0.999) == (300, True)


def test_a_target_that_did_not_help_is_not_taken_again() -> None:
    assert chosen(further_than=300) == (250, False)
    assert chosen(further_than=50) is None


def test_the_older_ones_are_named_in_case_it_cannot_be_read() -> None:
    found = choose(CHECKPOINTS, [], 351, 1, "data", None)
    assert found is not None
    assert [target.step for target in found.fallbacks] == [250, 200]


@pytest.mark.parametrize(
    "bad",
    [{"complete": False}, {"complete": None}, {"finite": False}, {"deleted": True}, {"abandoned": True}],
)
def test_one_that_cannot_be_trusted_is_never_a_target(bad: dict[str, object]) -> None:
    found = usable([checkpoint(100), checkpoint(200, **bad)], [], 300)
    assert [one.step for one in found] == [100]


def test_one_whose_contents_nobody_looked_at_may_be_taken() -> None:
    assert len(usable([checkpoint(100, finite=None)], [], 300)) == 1


def test_checkpoints_of_an_abandoned_line_are_never_loaded_however_high_their_step() -> None:
    both = [checkpoint(300), checkpoint(350), checkpoint(400), checkpoint(350, attempt=1)]
    found = usable(both, [Executed("p", 1, 300)], 1000)
    assert [(one.attempt, one.step) for one in found] == [(1, 350), (0, 300)]


def test_a_dirty_shard_is_suspect_from_its_first_position_to_its_end() -> None:
    found = suspects(facts(dirty(301, 350)))
    assert found.ranges == [(300 * BATCH, 350 * BATCH)]
    assert [span.name for span in found.shards] == ["shard-006"]


def test_a_shard_that_turns_dirty_in_its_middle_is_suspect_from_there() -> None:
    found = suspects(facts(dirty(321, 350), onset=321, last=335))
    assert found.ranges == [(319 * BATCH, 350 * BATCH)]
    assert found.shards == []


def test_clean_data_after_the_dirt_is_not_suspect() -> None:
    found = suspects(facts(dirty(301, 350), last=380))
    assert found.ranges == [(300 * BATCH, 350 * BATCH)]


def test_shuffled_data_without_whole_shards_is_suspect_by_the_batch() -> None:
    def batch_only(record: Step) -> None:
        record.shards = [ShardSpan("s", *record.samples[0])]

    found = suspects(facts(dirty(301, 350), each=batch_only))
    assert found.ranges == [(300 * BATCH, 320 * BATCH)]


def test_without_dirt_the_batches_around_the_onset_are_suspect() -> None:
    found = suspects(facts(at(range(301, 303), loss=9.0)))
    assert found.ranges == [(299 * BATCH, 301 * BATCH)]
