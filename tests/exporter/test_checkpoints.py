from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from trainwarden.exporter.checkpoints import catalogue
from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.runfolder import RunFolder


def journal(base: Path, attempt: int, *lines: bytes, start: str = "s", rank: int = 0) -> Path:
    folder = RunFolder("r", base).journal(attempt, start, rank)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "00001.ndjson"
    header = encode_line(Header(run_uid="u", run="r", attempt=attempt, start_id=start, rank=rank))
    file.write_bytes(b"\n".join([header, *lines, b""]))
    return file


def reported(step: int | None, path: str, **fields: Any) -> bytes:
    return encode_line(Event(kind="checkpoint", time=1000.0 + (step or 0), step=step, fields={"path": path, **fields}))


def test_a_run_without_a_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert catalogue(RunFolder("r", tmp_path)) == []


def test_checkpoints_come_ascending_with_what_later_events_say_of_them(tmp_path: Path) -> None:
    journal(
        tmp_path,
        0,
        reported(20, "b", complete=True, finite=None),
        reported(10, "a", complete=True, finite=True),
        reported(20, "b", pinned=True),
        reported(30, "a", deleted=True),
        reported(30, "c", complete=False),
        reported(None, "unknown", pinned=True),
    )
    journal(tmp_path, 1, reported(5, "d", complete=True, finite=False), reported(6, "b", abandoned=True))
    found = catalogue(RunFolder("r", tmp_path))
    assert [(each.attempt, each.step, each.path) for each in found] == [(0, 10, "a"), (0, 20, "b"), (1, 5, "d")]
    assert [(each.finite, each.deleted, each.pinned, each.abandoned) for each in found] == [
        (True, True, False, False),
        (None, False, True, True),
        (False, False, False, False),
    ]


def test_a_path_that_is_written_again_holds_the_newer_state_alone(tmp_path: Path) -> None:
    journal(tmp_path, 0, reported(10, "last", complete=True, finite=False), reported(20, "last", complete=True))
    journal(tmp_path, 1, reported(15, "last", complete=True, finite=True))
    found = catalogue(RunFolder("r", tmp_path))
    assert [(each.attempt, each.step, each.finite) for each in found] == [(1, 15, True)]


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    file = journal(
        tmp_path,
        0,
        b'{"kind": "checkpoint", torn',
        b'["checkpoint"]',
        reported(5, "", complete=True),
        encode_line(Event(kind="note", time=1.0, fields={"about": "checkpoint"})),
        encode_line(Step(seq=1, step=1, time=1.0, phase="checkpoint")),
        reported(7, "good", complete=True),
    )
    file.write_bytes(file.read_bytes() + b'{"type":"event","kind":"checkpoint","path":"late","comp')
    assert [each.path for each in catalogue(RunFolder("r", tmp_path))] == ["good"]
    file.write_bytes(b"")
    assert catalogue(RunFolder("r", tmp_path)) == []


def test_other_ranks_are_asked_only_where_rank_0_reported_none(tmp_path: Path) -> None:
    journal(tmp_path, 0, reported(9, "of-1", complete=True), rank=1)
    assert [(each.path, each.rank) for each in catalogue(RunFolder("r", tmp_path))] == [("of-1", 1)]
    journal(tmp_path, 0, reported(9, "of-0", complete=True), rank=0)
    assert [(each.path, each.rank) for each in catalogue(RunFolder("r", tmp_path))] == [("of-0", 0)]


def test_one_save_reported_by_two_ranks_is_one_checkpoint_and_broken_if_either_says_so(tmp_path: Path) -> None:
    journal(tmp_path, 0, reported(9, "shared", complete=True, finite=True), rank=1)
    journal(tmp_path, 0, reported(9, "shared", complete=True, finite=False), rank=2)
    found = catalogue(RunFolder("r", tmp_path))
    assert [(each.path, each.rank, each.finite) for each in found] == [("shared", 1, False)]


def test_a_long_journal_is_searched_in_a_moment(tmp_path: Path) -> None:
    step = encode_line(Step(seq=1, step=1, time=1.0, signals={f"signal_{number}": 1.5 for number in range(40)}))
    lines = [step] * 100_000
    lines.insert(50_000, reported(50_000, "middle", complete=True))
    journal(tmp_path, 0, *lines)
    began = time.perf_counter()
    found = catalogue(RunFolder("r", tmp_path))
    assert [each.path for each in found] == ["middle"]
    assert time.perf_counter() - began < 2  # parsing 75 MB takes ten times as long
