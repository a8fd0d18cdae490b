"""Following log files: what arrives is what replay reads, once, however the file grows, is rotated or written anew."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.core.inputs import Happened, SourceSeen, Start, Steps
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.sources.follow import FollowedFile
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions
from trainwarden.rules.store import Cursor

HEADER = "step,loss,grad_norm\n"


def csv(*steps: int, loss: float = 2.0) -> str:
    return "".join(f"{step},{loss + step / 1000:.4f},0.{step}\n" for step in steps)


class Counted:
    def malformed(self, lines: int) -> None:
        self.lines = lines

    def missing(self, lines: int) -> None:
        raise AssertionError


class Following:
    """A followed file with the database's memory of it."""

    def __init__(self, path: Path, cursors: list[Cursor] | None = None, **options: Any) -> None:
        self.now = 1.7e9
        self.reads: list[Read] = []
        self.positions = Positions(cursors or [])
        self.file = FollowedFile(path, self.positions, self._put, Counted(), clock=lambda: self.now, **options)

    def _put(self, read: Read) -> bool:
        self.reads.append(read)
        return True

    def poll(self, seconds: float = 100.0) -> None:
        self.now += seconds
        assert self.file.poll()

    @property
    def records(self) -> list[tuple[int, Step]]:
        found = []
        for read in self.reads:
            for value in read.inputs:
                if isinstance(value, Steps):
                    found += [(value.start.attempt, record) for record in value.records]
        return found

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [(attempt, record.step) for attempt, record in self.records]

    def cursors(self) -> list[Cursor]:
        """Return what the database holds once all reads were fed; they must follow each other."""
        at: dict[str, Cursor] = {}
        for read in self.reads:
            before = at.get(read.start.start_id)
            assert read.after == (before.seq if before else 0)
            at[read.start.start_id] = Cursor(read.start, read.rank, read.upto)
        return list(at.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.csv"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_file_that_comes_late_and_grows_is_read_as_it_grows(path: Path) -> None:
    following = Following(path)
    following.poll()
    path.write_text(HEADER + csv(*range(1, 21)))
    following.poll()
    assert following.steps[-1] == (0, 20)  # the last row waits for no next one once the file has been read
    append(path, "21,2.")
    following.poll()
    assert following.steps[-1] == (0, 20)
    append(path, "5,0.1\n")
    following.poll()
    assert following.records[-1][1].signals == {"loss": 2.5, "grad_norm": 0.1}
    assert [step for _, step in following.steps] == list(range(1, 22))


def test_it_is_observed_and_never_acted_upon(path: Path) -> None:
    path.write_text(HEADER + csv(*range(1, 21)))
    following = Following(path)
    following.poll()
    seen = [value for read in following.reads for value in read.inputs if isinstance(value, SourceSeen)]
    assert seen
    assert not any(one.may_act or one.authenticated for one in seen)


@given(st.lists(st.integers(1, 400), max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_in_any_pieces_it_is_what_replay_reads(path: Path, pieces: list[int]) -> None:
    whole = (HEADER + csv(*range(40)) + csv(*range(20, 60), loss=3)).encode()
    path.write_bytes(b"")
    following = Following(path)
    at = 0
    for piece in [*pieces, len(whole)]:
        with path.open("ab") as file:
            file.write(whole[at : at + piece])
        at += piece
        following.poll(1.0)
    following.poll()
    (recording,) = find_recordings([str(path)], io.BytesIO(), path.parent)
    lines = list(merged(recording))
    assert [(start.start_id, line.seq) for start, _, line in lines] == [
        (value.start.start_id, line.seq)
        for read in following.reads
        for value in read.inputs
        if not isinstance(value, SourceSeen)
        for line in (
            value.records if isinstance(value, Steps) else [value.event] if isinstance(value, Happened) else []
        )
    ]
    found = [record for _, record in following.records]
    assert [(record.step, record.stride, record.signals) for record in found] == [
        (line.step, line.stride, line.signals) for _, _, line in lines if isinstance(line, Step)
    ]
    times = [record.time for record in found]
    assert times == sorted(times)


def test_a_short_file_is_read_after_a_long_pause(path: Path) -> None:
    path.write_text(HEADER + csv(1, 2, 3))
    following = Following(path)
    following.poll(1)
    assert following.steps == []
    following.poll(100)
    assert following.steps == [(0, 1), (0, 2), (0, 3)]


def test_a_rotated_file_is_read_to_its_end_before_its_successor(path: Path) -> None:
    path.write_text(HEADER + csv(*range(1, 21)))
    following = Following(path)
    following.poll()
    append(path, csv(21, 22))
    path.rename(path.with_suffix(".1"))
    following.poll()
    path.write_text(HEADER + csv(23, 24))
    following.poll()
    assert [step for _, step in following.steps] == list(range(1, 25))
    assert len(following.cursors()) == 1


@pytest.mark.parametrize("again", [HEADER + csv(21, 22), "step,loss\n" + "".join(f"{n},2.5\n" for n in range(21, 90))])
def test_a_truncated_file_is_read_from_its_start_also_once_it_is_longer_again(path: Path, again: str) -> None:
    path.write_text(HEADER + csv(*range(1, 21)))
    following = Following(path)
    following.poll()
    path.write_text(again)
    following.poll()
    assert [step for _, step in following.steps][:22] == list(range(1, 23))


def test_a_run_that_starts_again_is_a_new_attempt(path: Path) -> None:
    path.write_text(HEADER + csv(*range(1, 21)))
    following = Following(path)
    following.poll()
    path.write_text(HEADER + csv(*range(1, 6), loss=4))
    following.poll()
    following.poll()
    assert following.steps[20:] == [(1, step) for step in range(1, 6)]


def test_after_a_restart_of_the_daemon_nothing_is_fed_twice_and_attempts_count_on(path: Path) -> None:
    path.write_text(HEADER + csv(*range(1, 21)) + csv(*range(10, 31), loss=3))
    before = Following(path)
    before.poll()
    assert before.steps[-1] == (1, 30)
    append(path, csv(31, 32, loss=3))
    after = Following(path, before.cursors())
    after.poll()
    assert after.steps == [(1, 31), (1, 32)]
    append(path, csv(*range(25, 30), loss=5))
    after.poll()
    after.poll()
    assert after.steps[2:] == [(2, step) for step in range(25, 30)]


def test_what_the_core_had_to_throw_away_is_read_again(path: Path) -> None:
    path.write_text(HEADER + csv(*range(1, 21)) + csv(*range(10, 31), loss=3))
    following = Following(path)
    following.poll()
    first = following.steps
    following.reads.clear()
    following.positions.rewind([])
    following.poll()
    assert following.steps == first
    following.reads.clear()
    append(path, csv(31, loss=3))
    following.poll()
    assert following.steps == [(1, 31)]


def test_a_document_that_is_replaced_brings_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    history = [{"step": step, "loss": 2.0, "learning_rate": 0.1} for step in range(10, 210, 10)]
    following = Following(path)
    for count in (10, 10, 20):
        new = tmp_path / "new.json"
        new.write_text(json.dumps({"log_history": history[:count]}, indent=2) + "\n")
        os.replace(new, path)  # noqa: PTH105
        following.poll()
    assert [step for _, step in following.steps] == list(range(10, 210, 10))


def test_a_journal_keeps_its_run_and_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "00001.ndjson"
    header = Header(run_uid="u", run="r", attempt=3, start_id="s", rank=1)
    lines = [
        Event(kind="start", time=1.0, seq=1),
        *(Step(seq=n, step=n, time=float(n), signals={"loss": 2.0}) for n in (2, 3)),
    ]
    path.write_bytes(b"".join(encode_line(line) + b"\n" for line in [header, *lines]) + b'{"type":"st')
    following = Following(path)
    following.poll()
    following.poll()
    (read,) = following.reads
    assert (read.start, read.rank, read.upto) == (Start("u", "r", 3, "s"), 1, 3)


def test_lines_without_a_time_lie_between_two_looks_and_a_backlog_before_the_files_own_time(path: Path) -> None:
    path.write_text(HEADER + csv(*range(1, 21)))
    os.utime(path, (1.6e9, 1.6e9))
    following = Following(path)
    following.poll()
    backlog = [record.time for _, record in following.records]
    assert 1.6e9 - 25 <= backlog[0] < backlog[-2] <= 1.6e9
    append(path, csv(21, 22))
    following.poll(10)
    assert [round(record.time - following.now) for _, record in following.records[-2:]] == [-5, 0]


def test_text_before_the_first_step_is_waited_out(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_text("loading data, please wait\n" * 50)
    following = Following(path)
    following.poll()
    append(path, "".join(f"iter {n}: loss 2.{n:04d}, time 340.00ms, mfu 38.21%\n" for n in range(0, 200, 10)))
    following.poll()
    assert [step for _, step in following.steps] == list(range(0, 200, 10))


def test_a_map_and_a_format_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    path.write_text("n,ce\n" + "".join(f"{n},2\n" for n in range(1, 21)))
    following = Following(path, format="csv", maps={"n": "step", "ce": "loss"})
    following.poll()
    assert following.records[-1][1].signals == {"loss": 2.0}
