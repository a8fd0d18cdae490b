"""Which checkpoints the demo's trainer deletes: never one that a rollback or a restart may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainwarden.demo.train import surplus


def written(folder: Path, *names: str) -> Path:
    for name in names:
        of, step = name.split("-")
        path = folder / f"attempt-{of}" / f"step-{int(step):06}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def gone(folder: Path, attempt: int, begun: int, keep: int = 4) -> list[str]:
    found = surplus(folder, attempt, begun, keep)
    assert all(path.name == f"step-{step:06}.pt" for step, path in found)
    return [f"{path.parent.name.removeprefix('attempt-')}-{step}" for step, path in found]


def test_the_newest_of_a_line_stay(tmp_path: Path) -> None:
    assert gone(written(tmp_path, "0-50", "0-100", "0-150", "0-200"), 0, 0) == []
    assert gone(written(tmp_path, "0-250", "0-300"), 0, 0) == ["0-50", "0-100"]


def test_nothing_goes_before_an_attempt_has_written_one_of_its_own(tmp_path: Path) -> None:
    assert gone(written(tmp_path, "0-150", "0-200", "0-250", "0-300", "0-350", "0-356"), 1, 300) == []


def test_what_a_rollback_left_behind_counts_for_nothing_and_stays(tmp_path: Path) -> None:
    folder = written(tmp_path, "0-200", "0-250", "0-300", "0-350", "0-356", "1-350")
    assert gone(folder, 1, 300) == []
    assert gone(written(tmp_path, "1-400"), 1, 300) == ["0-200"]


def test_after_a_restart_the_line_goes_on_through_the_attempts(tmp_path: Path) -> None:
    folder = written(tmp_path, "0-250", "0-300", "1-350", "1-400", "2-450")
    assert gone(folder, 2, 400) == ["0-250"]


def test_with_none_to_keep_count_of_all_stay(tmp_path: Path) -> None:
    assert gone(written(tmp_path, "0-50", "0-100"), 0, 0, keep=0) == []
