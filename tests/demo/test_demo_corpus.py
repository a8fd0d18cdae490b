"""The demo's text and its poison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainwarden.demo.corpus import CorpusError, build, read_index, read_rows, sources
from trainwarden.demo.layout import prepare
from trainwarden.demo.main import lay_out
from trainwarden.demo.poison import junk, place
from trainwarden.demo.scale import FULL

ROW = 129
SEEDS = (1, 2, 3, 123456)


def small(seed: int, rows: int = 2000):  # type: ignore[no-untyped-def]
    return build(seed, rows=rows, row_bytes=ROW, shard_rows=(368, 480))


def test_the_text_is_the_same_for_the_same_seed_and_in_another_order_for_another() -> None:
    first, again, other = small(2), small(2), small(3)
    assert np.array_equal(first.rows, again.rows)
    assert first.shards == again.shards
    assert not np.array_equal(first.rows[:300], other.rows[:300])
    assert np.array_equal(first.held_out, other.held_out), "losses of different seeds are about the same text"


def test_no_held_out_file_is_trained_on() -> None:
    files = sources()
    corpus = small(2)
    held_out = b"".join(path.read_bytes() for path in files[::10])
    training = b"".join(path.read_bytes() for number, path in enumerate(files) if number % 10)
    assert all(row.tobytes() in held_out for row in corpus.held_out)
    assert all(row.tobytes() in training for row in corpus.rows[::20])
    # Licence headers and the like stand in several files; whole rows of held-out text do not come back.
    trained = {row.tobytes() for row in corpus.rows}
    assert not [row for row in corpus.held_out if row.tobytes() in trained]


def test_shards_tile_the_rows() -> None:
    corpus = small(2)
    ends = [shard.end for shard in corpus.shards]
    assert [shard.first for shard in corpus.shards] == [0, *ends[:-1]]
    assert ends[-1] == len(corpus.rows)
    assert all(368 <= shard.end - shard.first <= 480 for shard in corpus.shards)


def test_a_python_without_its_sources_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * 2000)
    with pytest.raises(CorpusError, match="without its sources"):
        build(2, rows=2000, row_bytes=ROW, shard_rows=(368, 480), root=tmp_path)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"index\.json"):
        read_index(tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_poisoned_shard_begins_after_the_middle_and_leaves_time_to_recover(seed: int, tmp_path: Path) -> None:
    answer = lay_out(prepare(tmp_path / "demo"), seed, FULL)
    steps = answer.samples / FULL.batch_size
    assert 40 <= steps <= 60
    assert answer.first_step > FULL.steps // 2
    assert answer.last_step <= FULL.steps - 200


def test_the_place_differs_from_seed_to_seed(tmp_path: Path) -> None:
    answers = [lay_out(prepare(tmp_path / "demo"), seed, FULL) for seed in SEEDS]
    assert len({answer.first_step for answer in answers}) >= 3


def test_exactly_the_rows_of_one_shard_are_dirty_on_disk(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "demo")
    answer = lay_out(layout, 2, FULL)
    index = read_index(layout.data)
    on_disk = read_rows(layout.data / "train.bin", index.row_bytes)
    text = set("".join(map(chr, range(9, 127))).encode())
    binary = np.array([len(set(row.tobytes()) - text) > 40 or len(set(row.tobytes())) < 4 for row in on_disk])
    (first, end) = next((first, end) for name, first, end in index.shards if name == answer.shard)
    inside = binary[first:end].mean()
    assert inside > 0.5, "most rows are a long repeat or half binary at least"
    assert not binary[:first].any()
    assert not binary[end:].any()


def test_every_batch_of_junk_shows_in_its_fingerprint() -> None:
    rows = junk(400, ROW, seed=1)
    for batch in np.random.default_rng(0).permutation(rows).reshape(-1, 8, ROW):
        longest = max(_longest_repeat(row) for row in batch)
        assert longest > 60


def _longest_repeat(row: np.ndarray) -> int:  # type: ignore[type-arg]
    changes = np.flatnonzero(np.diff(row)) + 1
    return int(np.diff(np.concatenate(([0], changes, [row.size]))).max())


def test_the_place_is_a_shard_of_the_order_that_the_loader_will_read() -> None:
    corpus = small(2, rows=5700)
    shard, answer = place(corpus, 2, FULL)
    assert shard in corpus.shards
    assert answer.shard == shard.name
    (first, end) = answer.ranges[0]
    assert 0 < (shard.end - shard.first) - (end - first) < 0.2 * (end - first), "but for the rows held in reserve"
