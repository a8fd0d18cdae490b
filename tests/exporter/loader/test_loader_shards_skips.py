from __future__ import annotations

import numpy as np
import pytest

from trainwarden.exporter.loader.shards import Shards
from trainwarden.exporter.loader.skips import Excluded, Refusals, Skip, Skips, excluded_rows
from trainwarden.plan import Exclusion


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ([("a", 0)], TypeError, r"shards\[0\]"),
        ([("a", 0, 0)], ValueError, "'a': rows \\[0, 0\\)"),
        ([("a", 0, 11)], ValueError, "not within the 10 rows"),
        ([("a", 0, 5), ("b", 4, 8)], ValueError, "'b' begins at row 4, inside 'a'"),
        ([("a", 0, 5), ("a", 5, 8)], ValueError, "'a' is there twice"),
    ],
)
def test_shards_that_cannot_be_are_refused_by_name(given: list[object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        Shards(given, 10)


def test_a_row_finds_its_shard_in_any_order_of_shards() -> None:
    shards = Shards([("late", 6, 9), ("early", 0, 4)], 10)
    assert shards.of(np.arange(10)).tolist() == [1, 1, 1, 1, -1, -1, 0, 0, 0, -1]
    assert shards.named("early") == shards.all[1]
    assert shards.named("none") is None


def test_skips_of_an_epoch_are_merged_over_entries_and_told_apart_by_mode() -> None:
    skips = Skips((Skip(0, [(0, 5)]), Skip(0, [(3, 8)], "shift"), Skip(1, [(1, 2)])))
    assert skips.in_epoch(0) == [(0, 8)]
    assert skips.in_epoch(0, "shift") == [(3, 8)]
    assert skips.in_epoch(2) == []
    assert skips.epochs() == {0, 1}


def exclusion(dataset: str, shard: str, first: int, end: int) -> Excluded:
    return Excluded(Exclusion(dataset=dataset, shard=shard, first=first, end=end))


def test_exclusions_become_rows_and_an_open_end_is_the_rest_of_the_shard() -> None:
    shards = Shards([("a", 0, 10), ("b", 10, 30)], 30)
    refusals = Refusals()
    entries = [exclusion("d", "b", 5, 10**9), exclusion("d", "a", 2, 4)]
    rows = excluded_rows(entries, "d", shards, refusals)
    assert rows["substitute"].ranges == [(2, 4), (15, 30)]
    assert not refusals.reasons


def test_exclusions_that_cannot_be_found_are_refused_with_the_reason() -> None:
    shards = Shards([("a", 0, 10)], 10)
    refusals = Refusals()
    entries = [exclusion("other", "a", 0, 1), exclusion("d", "z", 0, 1), exclusion("d", "a", 10, 12)]
    assert not excluded_rows(entries, "d", shards, refusals)["substitute"]
    says = refusals.reasons["exclude"]
    assert "reads the data set 'd'" in says
    assert "no such shard" in says
    assert "has 10 rows" in says
    nameless = Refusals()
    excluded_rows([exclusion("d", "a", 0, 1)], None, shards, nameless)
    assert "without the data set's name" in nameless.reasons["exclude"]


def test_a_data_set_without_shards_is_excluded_from_by_its_own_rows() -> None:
    refusals = Refusals()
    rows = excluded_rows([exclusion("d", "", 3, 10**9)], "d", None, refusals, 20)
    assert rows["substitute"].ranges == [(3, 20)]
    assert not refusals.reasons
    beyond = Refusals()
    entries = [exclusion("d", "", 20, 21), exclusion("other", "", 0, 1), exclusion("d", "a", 0, 1)]
    assert not excluded_rows(entries, "d", None, beyond, 20)["substitute"]
    assert "the data set has 20 rows" in beyond.reasons["exclude"]
    assert beyond.reasons["exclude"].count("without the data set's shards") == 2
