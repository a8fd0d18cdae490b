"""CSV exports of Weights & Biases."""

from __future__ import annotations

from pathlib import Path

from tests.rules.replay.logs import records_of, rows_of

CHART = b""""Step","noble-sun-7 - train/loss","noble-sun-7 - train/loss__MIN","noble-sun-7 - train/loss__MAX"
"1","2.5","2.5","2.5"
"2","NaN","NaN","NaN"
"3","","",""
"4","2.3","2.3","2.3"
"""
SEVERAL = b""""Step","a - b - train/loss","a - b - train/loss__MIN","a - b - train/loss__MAX","c - train/loss","c - train/loss__MIN","c - train/loss__MAX"
"1","","","","2.5","2.5","2.5"
"2","1.5","1.5","1.5","2.4","2.4","2.4"
"""
HISTORY = b"""_step,_runtime,_timestamp,train/loss,train/global_step,lr
0,1.2,1717000000.5,2.5,10,0.1
1,2.2,1717000010.5,2.4,20,0.1
"""


def test_a_chart_of_one_run(tmp_path: Path) -> None:
    rows, notices = rows_of("wandb", CHART)
    assert notices == []
    assert rows[0] == {"Step": 1, "train/loss": 2.5}
    assert rows[2] == {"Step": 3}
    path = tmp_path / "chart.csv"
    path.write_bytes(CHART)
    assert [record.step for record in records_of(path)] == [1, 2, 4]


def test_of_several_runs_the_first_is_read_and_the_others_are_named() -> None:
    rows, notices = rows_of("wandb", SEVERAL.replace(b"a - b", b"a"))
    assert rows == [{"Step": 1}, {"Step": 2, "train/loss": 1.5}]
    assert [row["says"] for row in notices] == ["The export holds 2 runs; a is read. The others: c."]


def test_a_history_has_a_step_of_the_training_beside_its_own(tmp_path: Path) -> None:
    rows_of("wandb", HISTORY)
    path = tmp_path / "history.csv"
    path.write_bytes(HISTORY)
    first, second = records_of(path)
    assert (first.step, second.step, second.stride) == (10, 20, 10)
    assert first.time == 1717000000.5
    assert first.signals["runtime"] == 1.2
