"""Which records of a run's folder a step has, and what is said where there is none, several, or half of one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.data.records import DataError, Found, find, open_run
from trainwarden.runfolder import RunFolder


def journal(base: Path, attempt: int, start_id: str, steps: range, rank: int = 0, file: int = 1, **start: Any) -> Path:
    """Write one file of a rank's journal; the first has the start event."""
    path = RunFolder("run", base).journal(attempt, start_id, rank) / f"{file:05}.ndjson"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[Any] = [Header(run_uid="u", run="run", attempt=attempt, start_id=start_id, rank=rank)]
    if file == 1:
        lines.append(Event(kind="start", time=100.0 * attempt, fields={"world_size": 1, "resumed_from": None, **start}))
    for step in steps:
        samples = [(8 * step, 8 * step + 8)]
        lines.append(Step(seq=step, step=step, time=float(step), signals={"loss": 1.0 * attempt}, samples=samples))
        lines.append(
            Event(kind="evaluation", time=float(step), step=step, fields={"resumed_from": {"step": step, "x": 1}})
        )
    path.write_bytes(b"".join(encode_line(line) + b"\n" for line in lines))
    return path


def look(base: Path, *wanted: int, **arguments: Any) -> Found:
    return find(open_run("run", base), wanted, **arguments)


def test_a_step_is_found_in_whichever_file_of_the_journal_it_lies(tmp_path: Path) -> None:
    journal(tmp_path, 0, "s", range(1, 50))
    journal(tmp_path, 0, "s", range(50, 100), file=2)
    found = look(tmp_path, 3, 34, 77)
    assert {number: records[0].step.samples for number, records in found.steps.items()} == {
        number: [(8 * number, 8 * number + 8)] for number in (3, 34, 77)
    }
    assert found.steps[77][0].start is not None
    assert found.notices == []


def test_the_newest_attempt_that_made_the_step_is_shown_and_the_others_are_named(tmp_path: Path) -> None:
    journal(tmp_path, 0, "old", range(1, 60))
    journal(tmp_path, 1, "new", range(31, 50), resumed_from={"attempt": 0, "step": 30})
    found = look(tmp_path, 40)
    assert [record.attempt for record in found.steps[40]] == [1]
    assert found.notices == ["attempt 0 made step 40 as well; --attempt 0 shows what it read"]
    assert [record.attempt for record in look(tmp_path, 55).steps[55]] == [0]
    assert look(tmp_path, 20, 40).steps[20][0].attempt == 0


def test_what_a_later_attempt_left_behind_is_called_so(tmp_path: Path) -> None:
    journal(tmp_path, 0, "old", range(1, 60))
    journal(tmp_path, 1, "new", range(31, 50), resumed_from={"attempt": 0, "step": 30})
    found = look(tmp_path, 40, attempt=0)
    assert found.steps[40][0].attempt == 0
    assert found.notices == ["attempt 1 went on from step 30: what attempt 0 did from step 31 on was left behind"]
    assert look(tmp_path, 30, attempt=0).notices == []


def test_of_several_starts_of_one_attempt_the_newest_is_shown(tmp_path: Path) -> None:
    first = journal(tmp_path, 0, "b-first", range(1, 20))
    journal(tmp_path, 0, "a-second", range(10, 30), resumed_from={"attempt": 0, "step": 9})
    text = first.read_text().replace('"time":0.0', '"time":-5.0')
    first.write_text(text)
    found = look(tmp_path, 15)
    assert found.steps[15][0].start_id == "a-second"
    assert found.notices == ["start b-first of attempt 0 made step 15 before; the newer start is shown"]


def test_ranks_that_left_no_record_are_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        journal(tmp_path, 0, "s", range(1, 9), rank=rank, world_size=4)
    found = look(tmp_path, 5)
    assert [record.rank for record in found.steps[5]] == [0, 2]
    assert found.notices == ["step 5: ranks 1, 3 of 4 left no record here; their samples are not shown"]
    assert [record.rank for record in look(tmp_path, 5, rank=2).steps[5]] == [2]
    with pytest.raises(DataError, match="rank 1 left no journal; there are ranks 0, 2"):
        look(tmp_path, 5, rank=1)


def test_a_record_that_was_cut_off_or_damaged_is_said_to_be(tmp_path: Path) -> None:
    path = journal(tmp_path, 0, "s", range(1, 9))
    whole = path.read_bytes()
    place = whole.index(b'"step":8,')
    path.write_bytes(whole[: place + 30])
    with pytest.raises(DataError, match=r"(?s)the record of step 8 was cut off while it was written.*steps 1 to 7"):
        look(tmp_path, 8)
    path.write_bytes(whole.replace(b'"step":5,"time":5.0', b'"step":5,"time":5.0}{', 1))
    found = look(tmp_path, 4, 5)
    assert list(found.steps) == [4]
    assert "the record of step 5 is damaged: not a JSON line" in found.notices[0]
    assert found.notices[1] == "step 5: not recorded"


def test_a_step_that_was_never_recorded_is_told_from_those_that_were(tmp_path: Path) -> None:
    journal(tmp_path, 0, "old", range(1, 60))
    journal(tmp_path, 1, "new", range(31, 50))
    with pytest.raises(
        DataError, match="step 70 was not recorded; attempt 0 has steps 1 to 59, attempt 1 has steps 31 to 49"
    ):
        look(tmp_path, 70)
    with pytest.raises(DataError, match="none of the steps 70 to 72 was recorded; attempt 1 has steps 31 to 49"):
        look(tmp_path, 70, 71, 72, attempt=1)
    with pytest.raises(DataError, match="there is no attempt 3; there are attempts 0 to 1"):
        look(tmp_path, 5, attempt=3)


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    journal(tmp_path, 0, "s", range(1, 3))
    with pytest.raises(DataError, match=r"no run 'rum'; did you mean run\?"):
        open_run("rum", tmp_path)
    with pytest.raises(DataError, match="no run 'gpt-7b'; there are run"):
        open_run("gpt-7b", tmp_path)
    with pytest.raises(DataError, match="no such folder of runs"):
        open_run("run", tmp_path / "nowhere")
    with pytest.raises(DataError, match="use letters, digits"):
        open_run("../run", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no journal"):
        find(open_run("empty", tmp_path), [1])


def test_a_run_whose_journal_holds_no_step_says_so(tmp_path: Path) -> None:
    journal(tmp_path, 0, "s", range(0))
    with pytest.raises(DataError, match="run run: no step was recorded"):
        look(tmp_path, 1)
    with pytest.raises(DataError, match="attempt 0 of run run: no step was recorded"):
        look(tmp_path, 1, attempt=0)


def test_a_range_of_steps_over_several_files_is_found_without_reading_each_file_for_each(tmp_path: Path) -> None:
    for file in range(1, 5):
        journal(tmp_path, 0, "s", range(1000 * file, 1000 * file + 1000), file=file)
    began = time.process_time()
    found = look(tmp_path, *range(3500, 4400))
    assert list(found.steps) == list(range(3500, 4400))
    assert time.process_time() - began < 2
    assert list(look(tmp_path, 4999, 1000, 2500).steps) == [1000, 2500, 4999]


@pytest.mark.parametrize("world", ["x", 2.5, -1, 10**12, [2], None, True])
def test_a_start_event_that_is_damaged_costs_what_it_would_have_told(tmp_path: Path, world: Any) -> None:
    journal(tmp_path, 0, "s", range(1, 4), world_size=world, loader=[1], dataset={"a": 1}, dataset_size="x", seed=3)
    found = look(tmp_path, 2)
    start = found.steps[2][0].start
    assert start is not None
    assert "seed" in start
    assert not {"loader", "dataset", "dataset_size", "world_size"} & set(start)
    assert found.notices == []
