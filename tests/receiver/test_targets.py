"""What can be said of a checkpoint from its files alone."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from trainwarden.receiver.targets import UnreadableError, check_readable, inside


def safetensors(path: Path, data: bytes, cut: int = 0) -> Path:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + data
    path.write_bytes(whole[: len(whole) - cut])
    return path


def test_whole_checkpoints_are_readable(tmp_path: Path) -> None:
    torch_file = tmp_path / "a.pt"
    with zipfile.ZipFile(torch_file, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    legacy = tmp_path / "b.pth"
    legacy.write_bytes(b"\x80\x02legacy pickle")
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"shard")
    (folder / ".metadata").write_bytes(b"meta")
    marked = tmp_path / "hf"
    marked.mkdir()
    safetensors(marked / "model.safetensors", b"12345")
    (marked / "COMPLETE").touch()  # an empty marker file is what it is
    for path in (torch_file, legacy, folder, marked, safetensors(tmp_path / "c.safetensors", b"123")):
        check_readable(path)


def test_torn_missing_and_empty_ones_are_not(tmp_path: Path) -> None:
    torn = tmp_path / "torn.pt"
    with zipfile.ZipFile(torn, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 5000)
    torn.write_bytes(torn.read_bytes()[:3000])
    empty = tmp_path / "empty.pt"
    empty.touch()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    unfinished = tmp_path / "dcp"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"shard")
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    (hollow / "a.json").touch()
    (hollow / "b.json").touch()
    holed = tmp_path / "holed"
    holed.mkdir()
    (holed / "config.json").write_text("{}")
    (holed / "model.safetensors").touch()
    short = safetensors(tmp_path / "short.safetensors", b"12345", cut=2)
    garbled = tmp_path / "garbled.safetensors"
    garbled.write_bytes((5).to_bytes(8, "little") + b"nope!")
    cases = {
        torn: "did not finish",
        empty: "is empty",
        nothing: "holds no file",
        unfinished: ".metadata is missing",
        hollow: "all of its files are empty",
        holed: "is empty",
        short: "did not finish",
        garbled: "header cannot be read",
        tmp_path / "absent": "is not there",
    }
    for path, says in cases.items():
        with pytest.raises(UnreadableError, match=says):
            check_readable(path)
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(UnreadableError, match="is not there"):
        check_readable(tmp_path / "link")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "shard.bin").symlink_to(tmp_path / "absent")
    with pytest.raises(UnreadableError, match="a link to nothing"):
        check_readable(broken)


def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"w")
    os.mkfifo(folder / "pipe.pt")
    with pytest.raises(UnreadableError, match="no file that can be read"):
        check_readable(folder)


def test_a_header_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.safetensors"
    path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    with pytest.raises(UnreadableError, match="header cannot be read"):
        check_readable(path)


def test_what_is_no_path_and_what_leads_round_in_a_circle_lies_nowhere(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert not inside(tmp_path / "circle", [tmp_path])
    assert not inside(tmp_path / "a\0b", [tmp_path])


def test_a_link_that_leaves_the_roots_is_outside(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    root.mkdir()
    away.mkdir()
    (away / "x").touch()
    (root / "x").symlink_to(away / "x")
    (root / "y").touch()
    assert inside(root / "y", [root])
    assert not inside(root / "x", [root])
    assert not inside(root / ".." / "away" / "x", [root])
    assert inside(away / "x", [root, away])


def test_a_real_torch_checkpoint_is_readable_and_a_torn_one_not(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "real.pt"
    torch.save({"w": torch.arange(1000)}, path)
    check_readable(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UnreadableError):
        check_readable(path)
