"""Skipped steps that a log counts from its beginning are told from those of each record, and count by what they grew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rules.replay.logs import records_of
from trainwarden.rules.replay.running_total import RunningTotal


def taken(values: Sequence[float], stride: int) -> list[float]:
    column = RunningTotal()
    return [column.take(value, stride) for value in values]


@pytest.mark.parametrize("stride", [1, 10])
def test_a_records_own_count_is_left_as_it_is(stride: int) -> None:
    for own in ([0.0, 1, 0, 0, 1, 1, 0], [0.0, 0, *[float(stride)] * 9], [1.0, 1, 1, 0, 0], [float("nan"), 0, 1]):
        assert taken(own, stride)[1:] == own[1:]


@pytest.mark.parametrize(
    ("values", "stride", "counts"),
    [
        ([0, 0, 1, 2, 2, 2, 2, 3], 1, [0, 0, 1, 1, 0, 0, 0, 1]),
        ([0, 1, 2, 2, 2, 2, 5, 5], 10, [0, 1, 2, 2, 0, 0, 3, 0]),
        ([7, 7, 8], 1, [0, 0, 1]),  # a log that begins in the middle
        ([0, 12, 12, 0, 0, 1], 10, [0, 12, 0, 0, 0, 1]),  # begun anew with a restart
    ],
)
def test_a_running_total_counts_by_what_it_grew(values: list[float], stride: int, counts: list[float]) -> None:
    assert taken(values, stride) == counts


def test_in_a_table_a_total_under_the_plain_name_is_no_standstill(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    rows = [f"{step},{2 + step % 3},{min(step // 100, 3)}" for step in range(1, 900)]
    log.write_text("step,loss,skipped\n" + "\n".join(rows) + "\n")
    counts = {record.step: record.value("skipped") for record in records_of(log)}
    assert (counts[50], counts[200], counts[300]) == (0, 1, 1)
    assert sum(counts[step] or 0 for step in range(200, 900)) == 2
