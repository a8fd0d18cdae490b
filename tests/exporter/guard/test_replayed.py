"""What the daemon makes of a guarded run: a batch that was kept out is recorded, a run that skips on and on pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import loss_of, make, watch
from trainwarden.exporter.guard import Guard


def replayed(folder: Path, poison: range, guarded: bool, steps: int = 160) -> list[dict[str, Any]]:
    """Train with batches that make loss and gradient NaN, and return the incidents that a replay finds."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    exporter = watch(model, optimizer, folder)
    if guarded:
        Guard(exporter)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (float("nan") if step in poison else 1.0)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    command = [sys.executable, "-m", "trainwarden.rules.cli", "replay", str(folder / "run"), "--output", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [incident for report in json.loads(ran.stdout) for incident in report["incidents"]]


@pytest.mark.slow
def test_a_batch_that_was_kept_out_is_an_outlier_and_nothing_to_go_back_for(tmp_path: Path) -> None:
    (incident,) = replayed(tmp_path / "guarded", range(100, 101), True)
    assert (incident["severity"], incident["verdict"], incident["action"]) == ("info", "outlier", "none")
    assert incident["alerts"] == ["TrainingGuardSkipped"]
    assert incident["onset_step"] == 100
    (bare, *_) = replayed(tmp_path / "bare", range(100, 101), False)
    assert (bare["severity"], bare["verdict"]) == ("critical", "nonfinite")


@pytest.mark.slow
def test_a_run_that_skips_on_and_on_pages(tmp_path: Path) -> None:
    found = replayed(tmp_path, range(100, 161), True)
    worst = max(found, key=lambda incident: incident["severity"] == "critical")
    assert worst["severity"] == "critical"
    assert "TrainingGuardSkipsOn" in worst["alerts"]
    assert worst["verdict"] == "stall"
    assert worst["action"] != "rollback"
    assert worst["cause"]["name"] != "numeric" or "loss scale" not in json.dumps(worst["evidence"])
