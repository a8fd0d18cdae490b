"""Data that a script leaves out from the first step on, as a file of exclusions names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwarden.exporter import Exporter
from trainwarden.plan import Exclusion, PlanError, decode_exclusions

SHARDS = [("a", 0, 100), ("b", 100, 200)]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([row])


def file_of(folder: Path, *entries: dict[str, Any], **more: Any) -> Path:
    path = folder / "bad-rows.json"
    path.write_text(json.dumps({"exclude": list(entries), **more}))
    return path


def entry(shard: str = "a", first: int = 10, end: int = 30, dataset: str = "web") -> dict[str, Any]:
    return {"dataset": dataset, "shard": shard, "first": first, "end": end}


def read(folder: Path, exclude: Any, shards: Any = SHARDS, **how: Any) -> tuple[list[int], Exporter]:
    """Return the rows of one epoch in their order."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter(model, optimizer, run="r", dir=folder / "runs", port=0, exclude=exclude, reader_seconds=0.0)
    loader = exporter.wrap(DataLoader(Rows(), batch_size=4, shuffle=True), shards=shards, dataset="web", **how)
    rows = [int(row) for batch in loader for row in batch.flatten()]
    exporter.close()
    return rows, exporter


def test_the_rows_of_the_file_are_substituted_for_and_every_other_position_keeps_its_row(tmp_path: Path) -> None:
    plain, _ = read(tmp_path, None, reserve=0.1)
    rows, exporter = read(tmp_path, file_of(tmp_path, entry(), entry("b", 90, 10**6)), reserve=0.1)
    gone = {*range(10, 30), *range(190, 200)}
    assert not gone.intersection(rows)
    assert gone.intersection(plain)
    assert len(rows) == len(plain)
    assert [row for row in plain if row not in gone] == [
        row for row, was in zip(rows, plain, strict=True) if was not in gone
    ]
    assert not any("not left out" in says for says in exporter.notices)


def test_a_data_set_without_shards_leaves_out_its_own_rows(tmp_path: Path) -> None:
    rows, _ = read(tmp_path, str(file_of(tmp_path, entry("", 50, 60))), shards=None, reserve=0.1)
    assert not set(range(50, 60)).intersection(rows)


def test_a_plan_reads_as_such_a_file_and_nothing_is_left_out_without_one(tmp_path: Path) -> None:
    rows, _ = read(tmp_path, file_of(tmp_path, entry(), plan_id="p", run_uid="u", for_attempt=1), reserve=0.1)
    assert not set(range(10, 30)).intersection(rows)
    assert sorted(read(tmp_path, None, reserve=0)[0]) == list(range(200))


def test_what_the_loader_cannot_leave_out_is_a_notice_and_the_run_goes_on(tmp_path: Path) -> None:
    rows, exporter = read(tmp_path, file_of(tmp_path, entry("zz"), entry(dataset="other")), reserve=0)
    assert sorted(rows) == list(range(200))
    (says,) = [says for says in exporter.notices if says.startswith("not left out: ")]
    assert "no such shard" in says
    assert "this loader reads the data set 'web'" in says


def test_it_is_left_out_also_where_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = read(tmp_path, file_of(tmp_path, entry()), reserve=0.1)
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    assert read(tmp_path, file_of(tmp_path, entry()), reserve=0.1)[0] == watched


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "bad.json"),
        ("[]", "bad.json"),
        ('{"skip": []}', "exclude"),
        ('{"exclude": [{"dataset": "web", "shard": "a", "first": 3}]}', "end"),
        ('{"exclude": [{"dataset": "web", "shard": "a", "first": 3, "end": 3}]}', r"exclude\[0\]"),
        ('{"exclude": [{"dataset": "", "shard": "a", "first": 3, "end": 4}]}', "name the data set"),
        ('{"exclude": [], "schema": 2}', "schema 2"),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_error_that_names_file_and_field(
    text: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=f"exclude: .*bad.json.*{says}|exclude: .*{says}"):
        Exporter(model, torch.optim.SGD(model.parameters(), lr=0.1), run="r", dir=tmp_path, exclude=path)
    with pytest.raises(PlanError, match=says):
        decode_exclusions(text.encode(), "bad.json")


def test_a_missing_file_and_a_thing_that_is_no_path_are_errors_at_once(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"exclude: .*absent.json: cannot be read: No such file"):
        Exporter(model, optimizer, run="r", dir=tmp_path, exclude=tmp_path / "absent.json")
    with pytest.raises(TypeError, match="exclude: 7 is no path"):
        Exporter(model, optimizer, run="r", dir=tmp_path, exclude=7)


def test_exclusions_may_be_given_themselves(tmp_path: Path) -> None:
    given = [Exclusion(dataset="web", shard="a", first=10, end=30)]
    assert not set(range(10, 30)).intersection(read(tmp_path, given, reserve=0.1)[0])
