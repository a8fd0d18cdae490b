"""Opening files: damaged and many-part gzip, and the marks that other systems put before a text."""

from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.rules.replay.logs import placed_of, records_of
from tests.rules.replay.test_journal import header, steps
from trainwarden.record import Step, encode_line
from trainwarden.rules.replay.files import ReplayError
from trainwarden.rules.replay.recordings import find_recordings, merged

ROWS = [f"{step},{2 + (step * 7919 % 1000) / 1000:.3f}\n" for step in range(1, 20_001)]
CSV = "step,loss\n" + "".join(ROWS)


def journal(count: int = 20_000) -> bytes:
    return b"".join(encode_line(line) + b"\n" for line in [header(), *steps(1, count + 1)])


def damaged(data: bytes, how: str) -> bytes:
    """Return a gzip with a wrong checksum, with a hole in its middle, or cut off."""
    packed = bytearray(gzip.compress(data))
    if how == "checksum":
        packed[-8] ^= 0xFF
    elif how == "hole":
        half = len(packed) // 2
        packed[half : half + 40] = bytes(40)
    elif how == "beginning":
        packed[10:60] = b"\xff" * 50
    elif how == "cut":
        del packed[-30:]
    return bytes(packed)


def said(notices: list[dict[str, Any]]) -> list[str]:
    return [row["says"] for row in notices if row["kind"] in ("damaged", "torn")]


def test_of_a_gzip_with_a_wrong_checksum_all_is_read_and_it_is_said(tmp_path: Path) -> None:
    for name, data in (("x.csv.gz", CSV.encode()), ("x.ndjson.gz", journal())):
        path = tmp_path / name
        path.write_bytes(damaged(data, "checksum"))
        placed, notices = placed_of(path)
        assert sum(isinstance(item, Step) for _, _, item in placed) == 20_000
        (says,) = said(notices)
        assert says.startswith(f"{name} is damaged")
        assert "what could be read was read, 20,000 records" in says


@pytest.mark.parametrize(("how", "whole"), [("hole", 9_000), ("cut", 19_900)])
def test_of_a_gzip_that_is_damaged_further_on_all_before_is_read_and_it_is_said(
    how: str, whole: int, tmp_path: Path
) -> None:
    for name, data in (("x.csv.gz", CSV.encode()), ("x.ndjson.gz", journal())):
        path = tmp_path / name
        path.write_bytes(damaged(data, how))
        placed, notices = placed_of(path)
        found = [item.step for _, _, item in placed if isinstance(item, Step)]
        assert found[:whole] == list(range(1, whole + 1))
        assert len(found) != 20_000
        assert any("damaged" in says and f"{len(found):,} records" in says for says in said(notices))


def test_what_can_be_unpacked_before_damage_is_read_to_the_last_line(tmp_path: Path) -> None:
    # What gzip itself gives out of a file that ends too early, byte for byte, is the measure.
    packed = damaged(CSV.encode(), "cut")
    path = tmp_path / "x.csv.gz"
    path.write_bytes(packed)
    whole = gzip.GzipFile(fileobj=io.BytesIO(packed))
    lines = 0
    try:
        while piece := whole.read(1):
            lines += piece == b"\n"
    except EOFError:
        pass
    assert len(records_of(path)) == lines - 1


def test_a_gzip_of_which_nothing_can_be_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    for name in ("x.csv.gz", "x.ndjson.gz"):
        path = tmp_path / name
        path.write_bytes(damaged(CSV.encode(), "beginning"))
        with pytest.raises(ReplayError, match=rf"{path}: .*damaged.* nothing of it could be read"):
            find_recordings([str(path)], io.BytesIO(), tmp_path)
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ReplayError, match="damaged"):
        find_recordings([str(path)], io.BytesIO(), tmp_path)


def test_the_whole_parts_behind_a_damaged_part_of_a_gzip_are_read(tmp_path: Path) -> None:
    # Each start of a writer that appends is a part of its own.
    middle = "".join(ROWS[5000:15_000])
    parts = [gzip.compress(CSV[: CSV.index("\n5001,") + 1].encode()), damaged(middle.encode(), "hole")]
    parts.append(gzip.compress("".join(ROWS[15_000:]).encode()))
    path = tmp_path / "x.csv.gz"
    path.write_bytes(b"".join(parts))
    placed, notices = placed_of(path)
    found = [(item.step, item.signals["loss"]) for _, _, item in placed if isinstance(item, Step)]
    wanted = [(step, float(ROWS[step - 1].split(",")[1])) for step in range(1, 20_001)]
    assert found[:5000] == wanted[:5000]
    assert found[-5000:] == wanted[15_000:]
    assert any("damaged" in says for says in said(notices))


def test_a_gzip_of_several_whole_parts_and_padding_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    half = CSV.index("\n9000,") + 20
    path.write_bytes(gzip.compress(CSV[:half].encode()) + gzip.compress(CSV[half:].encode()) + bytes(512))
    placed, notices = placed_of(path)
    assert sum(isinstance(item, Step) for _, _, item in placed) == 20_000
    assert said(notices) == []


def test_a_mark_before_the_text_changes_nothing(tmp_path: Path) -> None:
    for name, data in (("x.csv", CSV.encode()), ("x.ndjson", journal(3000))):
        plain, marked = tmp_path / name, tmp_path / f"m-{name}"
        plain.write_bytes(data)
        marked.write_bytes(b"\xef\xbb\xbf" + data)
        assert records_of(marked) == records_of(plain)
        (recording,) = find_recordings([str(marked)], io.BytesIO(), tmp_path)
        assert (recording.format == "journal") == name.endswith(".ndjson")


def test_a_marked_journal_is_one_on_standard_input_too(tmp_path: Path) -> None:
    (recording,) = find_recordings(["-"], io.BytesIO(b"\xef\xbb\xbf" + journal(10)), tmp_path)
    assert recording.format == "journal"
    assert len(list(merged(recording))) == 10


@pytest.mark.parametrize("kind", ["csv", "journal", "gzip"])
def test_a_pipe_is_read_as_the_file_behind_it(kind: str, tmp_path: Path) -> None:
    data = {"csv": CSV.encode(), "journal": journal(), "gzip": gzip.compress(CSV.encode())}[kind]
    pipes = [tmp_path / "one", tmp_path / "two"]
    for pipe in pipes:
        os.mkfifo(pipe)
        threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True).start()
    spool = tmp_path / "spool"
    spool.mkdir()
    found = find_recordings([str(pipe) for pipe in pipes], io.BytesIO(), spool)
    assert found[0].source.startswith(str(pipes[0]))
    records = [line for recording in found for line in merged(recording) if isinstance(line[2], Step)]
    assert len(records) == (20_000 if kind == "journal" else 40_000)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_text_of_two_bytes_a_character_is_read(encoding: str, end: str, tmp_path: Path) -> None:
    text = CSV[: CSV.index("\n3001,") + 1].replace("\n", end)
    mark = "" if encoding == "utf-16" else "\ufeff"
    for name in ("x.csv", "x.csv.gz"):
        path = tmp_path / name
        data = (mark + text).encode(encoding)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        found = records_of(path)
        assert [record.step for record in found] == list(range(1, 3001))
        assert found[41].signals["loss"] == float(ROWS[41].split(",")[1])
