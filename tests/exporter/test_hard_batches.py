"""A hard batch in a real training, judged from its journal: the evidence says that its sources explain it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.exporter.two_sources import ROWS, TwoSources, train_on
from trainwarden.runfolder import RunFolder

BATCHES, HARD = 430, 400


@pytest.mark.parametrize("told", [True, False], ids=["sources-told", "sources-untold"])
def test_the_incident_of_a_hard_batch_says_that_its_sources_explain_the_loss(tmp_path: Path, told: bool) -> None:
    is_hard = torch.rand(BATCHES * ROWS, generator=torch.Generator().manual_seed(1)) < 0.2
    is_hard[HARD * ROWS : (HARD + 1) * ROWS] = True
    data = TwoSources(is_hard)
    if not told:
        data.is_hard = torch.zeros_like(is_hard)  # the rows stay as they are, and all are said to be of one source
    train_on(data, tmp_path).close()
    command = [
        sys.executable,
        "-m",
        "trainwarden.rules.cli",
        "replay",
        str(RunFolder("run", tmp_path).path),
        "--output",
        "json",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (report,) = json.loads(ran.stdout)
    (incident,) = [one for one in report["incidents"] if one["onset_step"] == HARD + 1]
    assert (incident["verdict"], incident["action"]) == ("outlier", "none")
    (said,) = [evidence["says"] for evidence in incident["evidence"] if evidence["kind"] == "expected_loss"]
    if told:
        assert "(100 % noise, usually 20 %): a hard batch, not a harmful one." in said
    else:
        assert said.startswith(f"The batch's sources do not explain the loss of step {HARD + 1}")
