"""journal: whole lines, rotation, and a disk that fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from trainwarden.exporter.notices import Notices
from trainwarden.exporter.sinks import journal as module
from trainwarden.exporter.sinks.journal import BACKLOG, Journal, bounds, first_seq, position_at, read_after, totals_at
from trainwarden.record import Header, Step, decode_lines, encode_line

HEADER = Header(run_uid="u", run="r", attempt=0, start_id="s")


def line(seq: int, **signals: float) -> bytes:
    return encode_line(Step(seq=seq, step=seq, time=float(seq), signals=dict(signals)))


def open_journal(folder: Path, rotate: int = 2**20) -> tuple[Journal, Notices]:
    notices = Notices()
    return Journal(folder, HEADER, notices, rotate), notices


def sequence(folder: Path) -> list[int]:
    found = []
    for path in sorted(folder.glob("*.ndjson")):
        lines = list(decode_lines(path.open("rb")))
        assert isinstance(lines[0], Header)
        found += [entry.seq for entry in lines[1:] if isinstance(entry, Step)]
    return found


def test_every_file_begins_with_the_header_and_none_outgrows_its_size(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path, rotate=400)
    for seq in range(1, 51):
        journal.append(line(seq))
        journal.flush()
    journal.close()
    assert sequence(tmp_path) == list(range(1, 51))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.ndjson")]
    assert len(sizes) > 5
    assert max(sizes) <= 400


def test_a_flushed_line_is_in_the_file_before_the_journal_is_closed(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.append(line(1))
    journal.flush()
    assert sequence(tmp_path) == [1]
    journal.close()


def test_lines_are_found_by_sequence_number_over_several_files(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path, rotate=300)
    for seq in range(1, 21):
        journal.append(line(seq))
        journal.flush()
    journal.close()
    assert bounds(tmp_path) == (1, 20)
    assert first_seq(tmp_path) == 1
    assert [seq for seq, _ in read_after(tmp_path, 7, 5)] == [8, 9, 10, 11, 12]
    assert [seq for seq, _ in read_after(tmp_path, 18, 5)] == [19, 20]
    assert read_after(tmp_path, 20, 5) == []
    assert json.loads(read_after(tmp_path, 11, 1)[0][1])["seq"] == 12


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.append(line(1))
    journal.flush()
    journal.close()
    with (tmp_path / "00001.ndjson").open("ab") as file:
        file.write(line(2)[:20])
    assert bounds(tmp_path) == (1, 1)
    assert [seq for seq, _ in read_after(tmp_path, 0, 9)] == [1]


def test_a_full_disk_is_said_once_and_what_waits_is_written_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, notices = open_journal(tmp_path)
    journal.append(line(1))
    journal.flush()
    real, room = os.write, [30]

    def full(descriptor: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, bytes(data)[: room[0]])  # some of it still fits
        room[0] -= written
        return written

    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(os, "write", full)
    for seq in (2, 3, 4):
        journal.append(line(seq))
        journal.flush()
    assert len(notices.said) == 1
    assert "No space left" in notices.said[0]
    assert notices.count(f"journal in {tmp_path}") >= 2
    assert sequence(tmp_path) == [1]  # not a torn line in it
    monkeypatch.setattr(os, "write", real)
    journal.append(line(5))
    journal.flush()
    journal.close()
    assert sequence(tmp_path) == [1, 2, 3, 4, 5]
    assert journal.lost == 0


def test_a_disk_that_stays_full_costs_the_oldest_lines_and_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal, _ = open_journal(tmp_path)
    for seq in range(1, BACKLOG + 11):
        journal.append(line(seq))
    journal.flush()
    assert journal.lost == 10
    journal.close()
    assert journal.lost == BACKLOG + 10
    assert list(tmp_path.glob("*.ndjson")) == []


def test_totals_are_those_of_the_newest_record_of_a_step(tmp_path: Path) -> None:
    for name, samples in (("old", 10.0), ("new", 12.0)):
        journal, _ = open_journal(tmp_path / name)
        journal.append(line(5, samples_seen=samples, tokens=samples * 8))
        journal.close()
    files = [tmp_path / "new" / "00001.ndjson", tmp_path / "old" / "00001.ndjson"]
    assert totals_at(files, 5) == (12.0, 96.0)
    assert totals_at(files, 6) is None


def test_a_position_is_that_of_the_newest_record_of_a_step_and_none_where_it_has_none(tmp_path: Path) -> None:
    for name, signals in (("old", {"epoch": 1.0, "sample_position": 40.0}), ("new", {"sample_position": 64.0})):
        journal, _ = open_journal(tmp_path / name)
        journal.append(line(5, **signals))
        journal.append(line(7 if name == "old" else 6))
        journal.close()
    files = [tmp_path / "new" / "00001.ndjson", tmp_path / "old" / "00001.ndjson"]
    assert position_at(files, 5) == (0, 64)
    assert position_at(files[1:], 5) == (1, 40)
    assert position_at(files, 6) is None
    assert position_at(files, 8) is None
