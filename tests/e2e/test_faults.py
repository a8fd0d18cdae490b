"""The fault bench as a user runs it: a few kinds, really trained, and what it says of them."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.faulty.kinds import KINDS
from bench.faulty.rows import figures, row_of
from bench.faulty.runs import lay_out
from tests.real import wait_until

ROOT = Path(__file__).parents[2]
#: One of each family that is quick: a reference, the data, the rate, the optimizer's state, the numbers, an instrument.
SIX = ("plain", "dirty_binary", "lr_jump", "huge_gradient", "bit_flip", "logging_scale")

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def command(folder: Path, *kinds: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "bench" / "faults.py"), "--no-act", "--kinds", *kinds),
        *("--cache", str(folder / "runs"), "--output", str(folder / "faults.json")),
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    subprocess.run(command(folder, *SIX), check=True, timeout=540, cwd=folder)
    found: dict[str, Any] = json.loads((folder / "faults.json").read_text())
    return found


def of_kind(measured: dict[str, Any], kind: str) -> dict[str, Any]:
    (row,) = [row for row in measured["kinds"] if row["kind"] == kind]
    return dict(row)


def test_all_kinds_that_were_asked_for_have_a_row_and_the_file_is_whole(measured: dict[str, Any]) -> None:
    assert [row["kind"] for row in measured["kinds"]] == [kind for kind in KINDS if kind in SIX]
    assert "partial" not in measured
    assert measured["failed"] == []
    assert measured["fault_kinds"] == 5


@pytest.mark.parametrize("kind", ["dirty_binary", "lr_jump", "huge_gradient", "bit_flip"])
def test_a_fault_that_does_harm_is_seen_with_its_cause(measured: dict[str, Any], kind: str) -> None:
    row = of_kind(measured, kind)
    assert row["harmful"], row
    assert row["detected"], row
    assert row["top1"], row["found"]
    assert abs(row["onset_error"]) <= 3
    assert row["confident_wrong"] == 0


def test_nobody_is_woken_by_a_run_that_is_well_or_by_the_unit_of_its_log(measured: dict[str, Any]) -> None:
    for kind in ("plain", "logging_scale"):
        row = of_kind(measured, kind)
        assert row["pages"] == row["actions"] == 0
        assert not row["harmful"]
    assert "logging_scale_change" in of_kind(measured, "logging_scale")["notices"]


def test_places_and_sizes_are_the_seeds(tmp_path: Path) -> None:
    drawn = [lay_out("label_shift", seed, tmp_path / str(turn)) for turn, seed in enumerate((1, 1, 2))]
    texts = [(tmp_path / str(turn) / "train.bin").read_bytes() for turn in range(3)]
    assert drawn[0].values == drawn[1].values != drawn[2].values
    assert texts[0] == texts[1] != texts[2]


INCIDENT = {
    "severity": "warning",
    "action": "none",
    "verdict": "level_shift",
    "state": "confirmed",
    "onset_step": 205,
    "opened_step": 207,
    "alerts": [],
    "cause": {"name": "data", "confidence": 0.7, "scores": {"data": 0.8, "numeric": 0.2}},
}


def row_with(loss: float | None, *incidents: dict[str, Any], hung: bool = False) -> dict[str, Any]:
    ended = {"loss": loss, "hung": hung, "seconds": 1.0}
    return row_of("lr_jump", 1, {"first": 205, "times": 9.0}, ended, 2.0, {"incidents": [*incidents], "notices": []})


def test_harm_is_measured_and_not_assumed() -> None:
    assert [row_with(loss)["harmful"] for loss in (2.0, 2.03, 2.05, math.nan, math.inf)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert row_with(None, hung=True)["harmful"]


def test_a_wrong_cause_counts_against_it_and_more_so_with_confidence() -> None:
    wrong = row_with(2.5, INCIDENT)
    assert (wrong["detected"], wrong["top1"], wrong["confident_wrong"]) == (True, False, 1)
    unsure = {**INCIDENT, "cause": {**INCIDENT["cause"], "name": "undetermined", "confidence": 0.4}}  # type: ignore[dict-item]
    assert (row_with(2.5, unsure)["top1"], row_with(2.5, unsure)["confident_wrong"]) == (False, 0)
    early = {**INCIDENT, "onset_step": 100}
    assert (row_with(2.5, early)["detected"], row_with(2.5, early)["before"]) == (False, 1)
    found = figures([wrong, row_with(2.5), row_with(2.5, {**INCIDENT, "severity": "info"})], [])
    assert (found["harmful"], found["detected"], found["missed"], found["top1"]) == (3, 1, ["lr_jump", "lr_jump"], 0.0)


def test_a_bench_that_is_interrupted_leaves_what_it_measured(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "logging_scale", "stale_metric", "lr_jump", "huge_gradient"), cwd=tmp_path
    )
    try:
        wait_until((tmp_path / "faults.json").exists, 300, what="a first run is measured")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    finally:
        process.kill()
        process.wait()
    found = json.loads((tmp_path / "faults.json").read_text())
    assert found["partial"] is True
    assert 1 <= len(found["kinds"]) < 4
