"""Which ranks hold or read what they should not: told from their records, for any cut of them, and named by most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import record
from trainwarden.record import Step, Value
from trainwarden.rules.core.block import Block, from_steps
from trainwarden.rules.core.ranks import RankWatch, advance, scan, unlike
from trainwarden.rules.core.ranks_apart import Named, kinds_of, named, twins


def block(rows: Sequence[dict[int, dict[str, Value]]], first: int = 1) -> Block:
    by_rank = [
        {rank: record(first + place, **signals) for rank, signals in row.items()} for place, row in enumerate(rows)
    ]
    return from_steps([row[min(row)] for row in by_rank], by_rank)


def watched(*blocks: Block) -> RankWatch:
    watch = RankWatch()
    for each in blocks:
        rows = scan(each)
        assert rows is not None
        advance(watch, rows, 0, len(each))
    return watch


def of(name: str, values: Sequence[float]) -> dict[int, dict[str, Value]]:
    return {rank: {name: value} for rank, value in enumerate(values)}


def test_the_rank_whose_hash_is_not_that_of_most_has_drifted() -> None:
    watch = watched(block([of("param_hash", row) for row in ((3, 3, 3, 3), (4, 4, 4, 4), (5, 5, 9, 5), (6, 6, 8, 6))]))
    assert named(watch.apart, ["drift"], 1) == {"drift": Named((2,), 2, 3)}
    assert watch.apart.equal_at == 2
    assert named(watch.apart, ["duplicate"], 1) == {}


def test_of_two_ranks_or_two_halves_none_is_named() -> None:
    for row in ((5, 9), (5, 5, 9, 9), (1, 2, 3, 4)):
        found = named(watched(block([of("param_hash", row)])).apart, ["drift"], 1)
        assert found["drift"].ranks == ()


def test_ranks_that_share_batches_are_named_and_a_model_split_in_pairs_is_not() -> None:
    rows = [(1, 2, 3, 4), (11, 12, 12, 14), (21, 22, 22, 24), (31, 31, 33, 33), (41, 41, 41, 41)]
    found = named(watched(block([of("batch_rows_hash", row) for row in rows])).apart, ["duplicate"], 1)
    assert found == {"duplicate": Named((1, 2), 2, 2)}


def test_ranges_of_samples_that_overlap_are_shared() -> None:
    spans = [[(0, 8)], [(8, 16)], [(12, 20)], [(20, 28)]]
    by_rank = [{rank: Step(seq=1, step=1, time=1.0, samples=span) for rank, span in enumerate(spans)}]
    found = from_steps([by_rank[0][0]], by_rank)
    assert [found.ranks["sample_overlap", rank].values.tolist() for rank in range(4)] == [[0], [4], [4], [0]]
    assert named(watched(found).apart, ["duplicate"], 1)["duplicate"].ranks == (1, 2)


@pytest.mark.parametrize(
    "spans",
    [
        [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 32)]],
        [[(0, 8)], [(0, 8)], [(8, 16)], [(8, 16)]],
        [[(0, 32)]] * 4,
        [[], [], [(0, 4)], []],
    ],
)
def test_ranges_that_do_not_overlap_or_belong_to_a_split_model_are_not_shared(
    spans: list[list[tuple[int, int]]],
) -> None:
    by_rank = [{rank: Step(seq=1, step=1, time=1.0, samples=span) for rank, span in enumerate(spans)}]
    assert not any(name == "sample_overlap" for name, _ in from_steps([by_rank[0][0]], by_rank).ranks)


def test_what_is_no_number_is_no_twin() -> None:
    table = np.array([[1.0, np.nan], [1.0, np.nan], [3.0, 2.0]])
    assert twins(table).tolist() == [[True, False], [True, False], [False, False]]


def test_a_rank_that_is_slow_or_has_few_tokens_most_of_the_time_is_named() -> None:
    chance = np.random.default_rng(0)
    rows = [
        {
            rank: {
                "rank_compute_seconds": float(chance.normal(1.6 if rank == 1 else 1.0, 0.1)),
                "batch_supervised_tokens": 400.0 if rank == 3 else float(chance.integers(900, 1000)),
            }
            for rank in range(4)
        }
        for _ in range(50)
    ]
    found = named(watched(block(rows)).apart, ["tokens", "slow"], 1)
    assert {kind: one.ranks for kind, one in found.items()} == {"tokens": (3,), "slow": (1,)}


def test_what_a_rule_is_about_is_told_from_what_it_reads() -> None:
    assert list(kinds_of({"param_hash"})) == ["drift"]
    assert list(kinds_of({"sample_overlap", "batch_rows_hash"})) == ["duplicate"]
    assert list(kinds_of({"loss", "grad_norm"})) == []


def test_a_batch_unlike_those_of_the_others_is_described() -> None:
    rows = [{rank: {"batch_longest_repeat_tokens": 60.0 if rank == 2 else 2.0 + rank} for rank in range(4)}]
    assert unlike(block(rows), 0, [2]) == "batch_longest_repeat_tokens 60 against 2 to 5"
    assert unlike(block(rows), 0, [1]) == ""


def test_a_rank_that_reads_a_source_of_its_own_is_described() -> None:
    mixes: list[dict[str, Value]] = [{"web": 0.5, "code": 0.5}, {"web": 0.6, "code": 0.4}, {"math": 1.0}, {"web": 1.0}]
    rows = [{rank: {"source_share": mix} for rank, mix in enumerate(mixes)}]
    assert unlike(block(rows), 0, [2]) == "100 % of source math against 0 % at most"
    assert unlike(block(rows), 0, [0]) == ""


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 59), max_size=6))
def test_any_cut_of_the_records_gives_the_same_marks(seed: int, cuts: list[int]) -> None:
    chance = np.random.default_rng(seed)
    rows: list[dict[int, dict[str, Value]]] = [
        {
            rank: {
                "rank_loss": float(chance.normal(2.0 + 4.0 * (rank == 2 and step > 40), 0.1)),
                "rank_grad_norm": float(chance.lognormal(0, 0.3)),
                "batch_rows_hash": float(chance.integers(0, 12)),
                "rank_compute_seconds": float(chance.lognormal(0, 0.3)),
                **({"param_hash": float(step + (rank == 1 and step > 30))} if step % 5 == 0 else {}),
            }
            for rank in range(4)
        }
        for step in range(60)
    ]
    places = [0, *sorted(set(cuts)), 60]
    pieces = [block(rows[first:end], first + 1) for first, end in pairwise(places)]
    assert watched(*pieces) == watched(block(rows))


def test_a_loss_that_is_no_farther_off_than_usual_marks_no_rank() -> None:
    chance = np.random.default_rng(1)
    losses = chance.normal(2.0, 0.1, (600, 4))
    losses[500:, 1] += 3.0
    watch = RankWatch()
    marks = []
    for first in range(0, 600, 100):
        part = block([of("rank_loss", row) for row in losses[first : first + 100].tolist()], first + 1)
        rows = scan(part)
        assert rows is not None
        marks += advance(watch, rows, 0, len(part))
    assert [mark.step for mark in marks if 20 < mark.step <= 500] == []
    assert [mark.step for mark in marks if mark.ranks == [1] and mark.step > 500][:80] == list(range(501, 581))
