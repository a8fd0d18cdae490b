"""Real runs of four processes, judged from the records of rank 0 alone: they hold the mean loss, and name the rank that is worst."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.ranks.harness import records, run
from tests.exporter.ranks.test_named import BODY


@pytest.mark.slow
def test_a_rank_that_is_fed_junk_is_named_where_rank_0_is_watched_alone(tmp_path: Path) -> None:
    said = {"KIND": "fsdp", "CASES": json.dumps({"run": ("random", 60, 80)})}
    for ended in run(BODY, tmp_path, environment=said, seconds=300):
        assert ended.said == {"run": []}

    ranks = [records(tmp_path, rank) for rank in range(4)]
    for place, step in enumerate(ranks[0]):
        losses = [own[place].value("rank_loss") or 0.0 for own in ranks]
        assert step.value("loss") == pytest.approx(sum(losses) / 4, rel=1e-9)
        assert step.ranks["loss"].argmax == losses.index(max(losses))
        assert step.ranks["batch_supervised_tokens"].sum == 4 * 8 * 25

    for journal in tmp_path.glob("run/attempt-*/*/rank-[123]"):
        shutil.rmtree(journal)
    command = [sys.executable, "-m", "trainwarden.rules", "replay", str(tmp_path / "run"), "--output", "json"]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replayed.returncode == 0, replayed.stderr
    (found,) = json.loads(replayed.stdout)
    incidents: list[dict[str, Any]] = found["incidents"]
    assert [incident["scope"]["ranks"] for incident in incidents] == [[2]]
    (told,) = [one for one in incidents[0]["evidence"] if one["kind"] == "one_rank"]
    assert 60 <= told["step"] <= 61
    assert "Rank 2 alone" in told["says"]
