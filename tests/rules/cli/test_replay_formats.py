"""``trainwarden replay`` on foreign logs: formats, maps, standard input, files that are none, and the bar of long work."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.replay.recorded import record as recorded
from trainwarden.rules.cli import progress

COMMAND = [sys.executable, "-m", "trainwarden.rules", "replay"]
CSV = "iteration,ce,lr\n" + "".join(
    f"{n},{'nan' if n > 280 else f'{2 + n * 7919 % 1009 / 10000:.4f}'},0.1\n" for n in range(1, 301)
)


def run(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], input=data, capture_output=True, check=False, timeout=120)


def test_one_object_a_file_and_a_file_that_is_none_does_not_keep_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "b.txt").write_text("not a log\n")
    (tmp_path / "c.csv").write_text(CSV.replace("nan", ""))
    done = run(*(str(tmp_path / name) for name in ("a.csv", "b.txt", "c.csv")), "--map", "loss=ce", "--output", "json")
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"{tmp_path / 'b.txt'}: is no log that is known")
    assert done.stderr.count(b"\n") == 1
    broken, healthy = json.loads(done.stdout)
    assert (broken["source"], broken["run"]) == (str(tmp_path / "a.csv"), "a")
    assert (broken["records"], broken["first_step"], broken["last_step"], broken["stride"]) == (300, 1, 300, 1)
    assert broken["signals"] == ["loss", "lr"]
    assert [(row["verdict"], row["onset_step"]) for row in broken["incidents"]] == [("nonfinite", 281)]
    assert healthy["incidents"] == []
    assert [(row["kind"], row["signal"]) for row in healthy["notices"]] == [("blank", "ce")]


def test_standard_input_packed_or_not(tmp_path: Path) -> None:
    for data in (CSV.encode(), gzip.compress(CSV.encode())):
        done = run("-", "--map", "loss=ce", "--output", "json", data=data)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)
        assert (found["source"], found["run"], found["records"]) == ("-", "stdin", 300)


def test_a_map_to_a_column_that_no_file_has_is_an_error_and_of_some_files_a_notice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "b.csv").write_text(CSV.replace("ce", "train/xe", 1))
    both = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    for command in (["replay", *both], ["tune", *both]):
        done = subprocess.run([*COMMAND[:-1], *command, "--map", "loss=train/xee"], capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (1, b"")
        says = b"--map loss=train/xee: no file has numbers in such a column; did you mean train/xe?\n"
        assert done.stderr == says
    done = run(*both, "--map", "loss=train/xe", "--output", "json")
    assert done.returncode == 0
    lacks, has = json.loads(done.stdout)
    assert [row["kind"] for row in lacks["notices"]] == ["map", "no_loss"]
    assert (lacks["judged"], lacks["columns"]) == (["lr"], ["iteration", "lr", "ce"])
    assert [row["verdict"] for row in has["incidents"]] == ["nonfinite"]

    done = run(str(tmp_path / "a.csv"))
    assert done.returncode == 0
    assert (
        b"Only lr could be judged, and nothing unusual was found there: no loss was found (columns: iter" in done.stdout
    )


def test_a_map_means_nothing_for_a_journal(tmp_path: Path) -> None:
    done = run(str(recorded(tmp_path / "rec")), "--map", "loss=train/loss")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"--map loss=train/loss: a journal has signals and no columns\n"


@pytest.mark.parametrize(("option", "says"), [("--format=what", "it is one of auto"), ("--map=loss", "SIGNAL=COLUMN")])
def test_options_that_cannot_be_meant_are_a_wrong_usage(option: str, says: str) -> None:
    done = run("x.csv", option)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.decode().replace("│", " ").split())


def test_a_bar_shows_long_work_to_who_watches_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(bytes(1000))
    for watched, small in ((False, 0), (True, 2000), (True, 0)):
        monkeypatch.setattr(progress, "SMALL", small)
        with progress.reading([path, tmp_path / "none"], watched) as told:
            told("my-run")(500)
        seen = capsys.readouterr()
        assert seen.out == ""
        assert ("my-run" in seen.err) == (watched and small == 0)
