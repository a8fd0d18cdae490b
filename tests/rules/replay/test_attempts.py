"""From rows to records: starts, strides, duplicates, gaps, times, and that a torn file never invents anything."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rules.replay.logs import events_of, placed_of, records_of
from trainwarden.record import Event, Step
from trainwarden.rules.replay.attempts import Attempts
from trainwarden.rules.replay.columns import Columns
from trainwarden.rules.replay.files import ReplayError
from trainwarden.rules.replay.recordings import Problem, find_recordings, merged
from trainwarden.rules.replay.rows import Notices, Row


def made(rows: list[dict[str, float]], **options: Any) -> tuple[list[Step], list[Event], list[str]]:
    notices = Notices()
    attempts = Attempts("u", "r", Columns({}, notices), notices, **options)
    lines = [*attempts.feed([Row(values, n + 1) for n, values in enumerate(rows)]), *attempts.end()]
    steps = [line for _, _, line in lines if isinstance(line, Step)]
    events = [line for _, _, line in lines if isinstance(line, Event)]
    return steps, events, [f"{row['kind']} {row['step']}" for row in notices.rows()]


def losses(*steps: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": 2.0} for step in steps]


def test_steps_that_go_backwards_are_a_new_start_and_numbers_from_zero_stay() -> None:
    steps, events, notices = made(losses(0, 1, 2, 3, 1, 2, 3, 4))
    assert [(record.seq, record.step) for record in steps] == [
        (2, 0), (3, 1), (4, 2), (5, 3), (2, 1), (3, 2), (4, 3), (5, 4),
    ]  # fmt: skip
    assert [(event.kind, event.fields["attempt"], event.fields.get("resumed_from")) for event in events] == [
        ("start", 0, None),
        ("start", 1, {"attempt": 0, "step": 0}),
    ]
    assert events[0].fields["start_id"] != events[1].fields["start_id"]
    assert notices == []


def test_a_line_that_is_out_of_order_alone_is_no_new_start() -> None:
    steps, _, notices = made(losses(1, 2, 3, 1, 4, 5))
    assert [record.step for record in steps] == [1, 2, 3, 4, 5]
    assert notices == ["unordered 1"]


def test_rows_of_a_step_are_one_record_and_a_repeated_one_is_a_duplicate() -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "lr": 0.1}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    steps, _, notices = made(rows)
    assert [record.signals for record in steps] == [{"loss": 2.0, "lr": 0.1}, {"loss": 2.0}]
    assert notices == ["duplicate_step 2"]


def test_the_stride_is_the_median_of_differences_and_missing_steps_are_said() -> None:
    steps, _, notices = made(losses(10, 20, 30, 60, 70, 80))
    assert {record.stride for record in steps} == {10}
    assert notices == ["gap 60"]


def test_a_logging_interval_that_changes_is_followed_and_said() -> None:
    steps, _, notices = made(losses(*range(1, 101), *range(110, 1110, 10)))
    assert [record.stride for record in steps[99:104]] == [1, 1, 1, 10, 10]
    assert notices == ["stride 130"]


def test_times_that_are_not_there_lie_a_second_a_step_apart_and_never_go_back() -> None:
    steps, _, _ = made(losses(10, 20, 30, 20, 30))
    assert [record.time for record in steps] == [10, 20, 30, 40, 50]


def test_times_that_are_there_are_taken_in_seconds_or_milliseconds() -> None:
    steps, _, _ = made([{"step": n, "loss": 2.0, "_timestamp": 1.7e9 + n} for n in (1, 2)])
    assert [record.time for record in steps] == [1.7e9 + 1, 1.7e9 + 2]
    steps, _, _ = made([{"step": n, "loss": 2.0, "time": (1.7e9 + n) * 1000} for n in (2, 1)])
    assert [record.time for record in steps] == [1.7e9 + 2, 1.7e9 + 2]
    steps, _, _ = made([{"step": n, "loss": 2.0, "time": n * 0.5} for n in (1, 2)])
    assert [(record.time, record.signals["log_time"]) for record in steps] == [(1, 0.5), (2, 1.0)]


def test_without_a_step_column_rows_are_counted() -> None:
    steps, _, notices = made([{"loss": 2.0}, {"loss": 1.9}])
    assert [record.step for record in steps] == [1, 2]
    assert notices == ["no_step None"]


def test_steps_that_are_none_are_left_out() -> None:
    rows = [*losses(1, float("nan"), 2.5, -1, 2), {"loss": 2.0}]
    steps, _, notices = made(rows)
    assert [record.step for record in steps] == [1, 2]
    assert notices == ["unreadable None"]


def test_names_become_signals_that_the_rule_language_takes() -> None:
    row: dict[str, float] = {
        "train/global_step": 1,
        "train/loss": 2.0,
        "eval/loss": 2.1,
        "grad_norm/embedding": 0.3,
        "train/grad-norm": 0.5,
        "Learning Rate": 0.1,
        "tokens": 4096,
        "samples": 8,
        "mean": 1,
        "phase": 2,
        "7b score": 3,
        "GPU Mem (%)": 4,
    }
    (record,), events, _ = made([row])
    assert record.signals == {
        "loss": 2.0,
        "eval_loss": 2.1,
        "grad_norm": {"embedding": 0.3, "all": 0.5},
        "lr": 0.1,
        "tokens": 4096,
        "samples_seen": 8,
        "log_mean": 1,
        "log_phase": 2,
        "_7b_score": 3,
        "GPU_Mem": 4,
    }
    assert [event.kind for event in events] == ["start", "evaluation"]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_pieces_make_no_difference_and_steps_of_a_start_ascend(numbers: list[int], piece: int) -> None:
    rows = [Row(values, n + 1) for n, values in enumerate(losses(*numbers))]
    whole = made(losses(*numbers))
    notices = Notices()
    attempts = Attempts("u", "r", Columns({}, notices), notices)
    lines = [line for at in range(0, len(rows), piece) for line in attempts.feed(rows[at : at + piece])]
    lines += attempts.end()
    assert [line for _, _, line in lines if isinstance(line, Step)] == whole[0]
    for _, before, after in zip(range(len(lines)), lines, lines[1:], strict=False):
        assert before[0].start_id != after[0].start_id or before[2].seq + 1 == after[2].seq
        if before[0] == after[0] and isinstance(before[2], Step) and isinstance(after[2], Step):
            assert before[2].step < after[2].step


CSV = b"step,loss,grad_norm,lr\n" + b"".join(
    b"%d,%.3f,%.2f,1e-0%d\n" % (n, 10 - n / 9, n / 7, n % 9 + 1) for n in range(8, 40)
)


@given(st.integers(23, len(CSV)))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_torn_at_any_byte_every_value_is_one_that_was_written(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "whole.csv"
    path.write_bytes(CSV)
    written = {record.step: record.signals for record in records_of(path)}
    path = tmp_path / "torn.csv"
    path.write_bytes(CSV[:cut])
    try:
        torn = records_of(path)
    except ReplayError:
        assert cut <= CSV.index(b"\n") + 10
        return
    assert [record.step for record in torn] == list(written)[: len(torn)]
    assert all(written[record.step].get(name) == value for record in torn for name, value in record.signals.items())
    assert len(torn) >= CSV[:cut].count(b"\n") - 1


def test_gzip_and_a_cut_one_and_standard_input_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.csv.gz"
    packed = gzip.compress(CSV * 1)
    path.write_bytes(packed)
    lines, notices = placed_of(path)
    assert len(lines) == 33
    assert lines[0][0].run == "run"
    assert notices == []
    path.write_bytes(packed[:-30])
    lines, notices = placed_of(path)
    assert 1 <= len(lines) < 33
    assert "torn" in {row["kind"] for row in notices}
    for data in (CSV, packed):
        spool = tmp_path / f"spool{len(data)}"
        spool.mkdir()
        (recording,) = find_recordings(["-"], io.BytesIO(data), spool)
        assert (recording.source, recording.run, len(list(merged(recording)))) == ("-", "stdin", 33)


def test_a_map_names_columns_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"n,ce,x\n1,2.5,7\n")
    (record,) = records_of(path, {"n": "step", "ce": "loss", "x": "grad_norm.head"})
    assert (record.step, record.signals) == (1, {"loss": 2.5, "grad_norm": {"head": 7}})
    _, notices = placed_of(path, {"n": "step", "lost": "loss"})
    assert [row["says"] for row in notices] == [
        "--map loss=lost: there is no such column; there are: n, ce, x.",
        "No column is known to be the loss; name it with --map loss=COLUMN. There are: n, ce, x.",
    ]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (b"Dear all,\nthis is no log\n", "is no log that is known"),
        (bytes(range(256)) * 9, "is no log that is known"),
        (b"step,loss\n", "holds no step"),
    ],
)
def test_what_is_no_log_is_one_sentence_with_its_name_and_the_others_are_read(
    data: bytes, says: str, tmp_path: Path
) -> None:
    bad, good = tmp_path / "bad.csv", tmp_path / "good.csv"
    bad.write_bytes(data)
    good.write_bytes(CSV)
    problems: list[Problem] = []
    found = find_recordings([str(bad), str(good), str(tmp_path / "none")], io.BytesIO(), tmp_path, problems=problems)
    read = 0
    for recording in found:
        try:
            read += len(list(merged(recording)))
        except ReplayError as error:
            problems.insert(0, Problem(recording.source, str(error)))
    assert read == 33
    assert [str(bad) in problems[0].says, says in problems[0].says] == [True, True]
    assert problems[1].says == f"{tmp_path / 'none'}: no such file"


def test_a_folder_of_checkpoints_is_the_last_ones_history(tmp_path: Path) -> None:
    for number in (900, 1000):
        folder = tmp_path / "run" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": number, "loss": 2.0}]}))
    (recording,) = find_recordings([str(tmp_path / "run")], io.BytesIO(), tmp_path)
    assert recording.run == "run"
    assert [line.step for _, _, line in merged(recording) if isinstance(line, Step)] == [1000]
    assert events_of(recording.files[0])[0].kind == "start"
