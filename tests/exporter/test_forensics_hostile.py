"""A copy that is interrupted, and a quarantine folder in which somebody has put other things."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.quarantines import Run, ask, copy_of, outcome, trained_for
from tests.real import wait_until


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_save_that_is_interrupted_stops_the_trainer_and_its_half_written_copy_is_never_whole(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    run = Run(tmp_path)

    def save(path: Path) -> None:
        (path / "half.pt").write_bytes(b"half")
        raise kind

    run.exporter.forensics(save)
    run.step(5)
    ask(tmp_path)
    with pytest.raises(kind):
        wait_until(lambda: run.step(), 30)
    assert outcome(tmp_path)["error"].startswith(kind.__name__)
    run.exporter.close()
    assert not copy_of(tmp_path).exists()
    assert not list(copy_of(tmp_path).parent.glob("*.partial"))


@pytest.mark.parametrize("what", ["a link", "a file"])
def test_what_is_no_folder_and_has_the_name_of_an_unfinished_copy_is_taken_away_and_hides_no_request(
    tmp_path: Path, what: str
) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    left = copy_of(tmp_path).with_name("incident-other.partial")
    left.parent.mkdir(parents=True, exist_ok=True)
    if what == "a link":
        left.symlink_to(elsewhere)
    else:
        left.touch()
    ask(tmp_path)
    run.step_until(copy_of(tmp_path) / "WHOLE")
    run.exporter.close()
    assert (elsewhere / "kept").exists()
    assert not os.path.lexists(left)


def test_what_cannot_be_taken_away_is_why_there_is_no_copy_and_the_request_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    left = copy_of(tmp_path).with_name("incident-other.partial")
    left.mkdir(parents=True)
    remove = shutil.rmtree

    def refuse(path: Path, *arguments: Any, **named: Any) -> None:
        if Path(path) == left:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, *arguments, **named)

    monkeypatch.setattr(
        shutil, "rmtree", refuse
    )  # a user who may do everything is refused nothing by the modes of files
    ask(tmp_path)
    assert "Permission denied" in outcome(tmp_path)["error"]
    run.exporter.close()


def test_two_requests_at_once_are_both_answered_with_copies_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    ask(tmp_path, "run-0-5")
    ask(tmp_path, "run-0-6")
    trained_for(run, 0.1)
    run.step_until(copy_of(tmp_path, "run-0-5") / "WHOLE")
    run.step_until(copy_of(tmp_path, "run-0-6") / "WHOLE")
    run.exporter.close()
