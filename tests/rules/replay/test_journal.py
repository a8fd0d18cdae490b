"""Reading journals: whatever way they are named, each line once, in the order of time."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.replay.attempts import Placed
from trainwarden.rules.replay.files import ReplayError
from trainwarden.rules.replay.recordings import find_recordings, merged


def write(path: Path, header: Header, lines: list[Step | Event], tail: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(encode_line(line) + b"\n" for line in [header, *lines]) + tail
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def header(start: str = "s0", attempt: int = 0, rank: int = 0, run: str = "toy") -> Header:
    return Header(run_uid=f"uid-{run}", run=run, attempt=attempt, start_id=start, rank=rank)


def steps(first: int, end: int, begin: float = 0.0) -> list[Step | Event]:
    return [Step(seq=n, step=n, time=begin + n, signals={"loss": float(n)}) for n in range(first, end)]


def read(names: list[str], tmp_path: Path, piped: bytes = b"") -> list[list[Placed]]:
    spool = tmp_path / "spool"
    spool.mkdir(exist_ok=True)
    return [list(merged(recording)) for recording in find_recordings(names, io.BytesIO(piped), spool)]


def places(lines: list[Placed]) -> list[tuple[str, int, int]]:
    return [(start.start_id, rank, item.seq) for start, rank, item in lines]


def run_folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "toy"
    for rank in (0, 1):
        folder = run / "attempt-0" / "s0" / f"rank-{rank}"
        write(folder / "00001.ndjson", header(rank=rank), steps(1, 4))
        write(folder / "00002.ndjson.gz", header(rank=rank), steps(4, 6))
    write(run / "attempt-1" / "s1" / "rank-0" / "00001.ndjson", header("s1", 1), steps(1, 3, begin=100.0))
    return run


def test_a_run_folder_is_one_recording_merged_by_time(tmp_path: Path) -> None:
    (lines,) = read([str(run_folder(tmp_path))], tmp_path)
    expected = [("s0", rank, seq) for seq in range(1, 6) for rank in (0, 1)]
    assert places(lines) == [*expected, ("s1", 0, 1), ("s1", 0, 2)]


def test_files_globs_and_folders_of_one_run_are_one_recording(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    whole = read([str(run)], tmp_path)
    assert read([str(run / "attempt-1"), str(run / "attempt-0" / "**" / "*.ndjson*")], tmp_path) == whole
    assert read([str(run), str(run)], tmp_path) == whole


def test_two_runs_are_two_recordings(tmp_path: Path) -> None:
    first = write(tmp_path / "a.ndjson", header(), steps(1, 3))
    second = write(tmp_path / "b.ndjson", header(run="other"), steps(1, 2))
    assert [len(lines) for lines in read([str(first), str(second)], tmp_path)] == [2, 1]


def test_standard_input_is_split_at_its_headers(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    files = sorted(run.rglob("*.ndjson*"))
    piped = b"".join(
        gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes() for file in files
    )
    assert read(["-"], tmp_path, piped) == read([str(run)], tmp_path)


def test_a_torn_last_line_is_left_out_and_nothing_before_it_is_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", header(), steps(1, 4), tail=b'{"type":"step","seq":4,"st')
    assert len(read([str(path)], tmp_path)[0]) == 3


def test_a_gzip_that_was_cut_off_gives_what_it_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson.gz", header(), steps(1, 2000))
    path.write_bytes(path.read_bytes()[:-2000])
    (lines,) = read([str(path)], tmp_path)
    assert 0 < len(lines) < 1999


def test_a_clock_that_goes_back_does_not_change_the_order_of_a_stream(tmp_path: Path) -> None:
    lines: list[Step | Event] = [*steps(1, 3, begin=50.0), *steps(3, 5, begin=0.0)]
    path = write(tmp_path / "a.ndjson", header(), lines)
    assert places(read([str(path)], tmp_path)[0]) == [("s0", 0, seq) for seq in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", ": the file is empty"),
        (b'{"type":"step","seq":1,"step":1,"time":1}\n', ":1: no header"),
        (b'{"schema":99,"run_uid":"u","run":"r","attempt":0,"start_id":"s"}\n', ":1: "),
        (encode_line(header()) + b'\n{"type":"step","seq":1,"step":"x","time":1}\n', ":2: step"),
        (encode_line(header()) + b'\n{"type":"step","seq":1,"step":1}\n', ":2: time"),
    ],
)
def test_what_is_no_journal_is_an_error_with_file_and_line(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ndjson"
    path.write_bytes(data)
    with pytest.raises(ReplayError) as caught:
        read([str(path)], tmp_path)
    assert str(caught.value).startswith(f"{path}{says}")


def test_a_name_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "absent-*", "empty"):
        with pytest.raises(ReplayError, match=name.replace("*", ".")):
            read([str(tmp_path / name)], tmp_path)
