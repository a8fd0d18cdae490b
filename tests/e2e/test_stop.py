"""A real training whose loss was never a number, its scaler halving towards 0, is stopped through a real receiver, and stays stopped (case C06)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small_loop import PATIENCE, small_loop
from tests.real import wait_until
from trainwarden.record import Step, decode_lines

#: The exit code of a supervisor that was asked to stop its run.
STOPPED = 3

#: A weight that was never initialised: every gradient is NaN, every step is skipped, and the scaler halves without a floor.
SCRIPT = """
import sys, time
import torch
from trainwarden.exporter import Exporter

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 1)
with torch.no_grad():
    model.weight[0, 0] = float("nan")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
exporter = Exporter(model, optimizer, run="dead", dir=sys.argv[1], port=0, scaler=scaler, cadence=10)
for step in range(1, 100_000):
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    exporter.step(loss.detach())
    time.sleep(0.05)
"""

CONFIG = """
listen: {daemon}
poll_interval: 500ms
tick_interval: 500ms
sources: [{{folder: {runs}/*/targets}}]
policy: {{mode: act}}
receiver: {{url: "http://{receiver}/webhook", secret_file: {secret}}}
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_training_that_never_learned_is_stopped_and_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with small_loop(tmp_path, "dead", CONFIG, tmp_path / "checkpoints") as loop:
        folder = loop.folder

        def handed_over() -> dict[str, Any] | None:
            found = [row for row in loop.incidents() if row["state"] == "escalated"]
            return found[0] if found else None

        train = loop.train([sys.executable, str(tmp_path / "train.py"), str(loop.runs)])
        wait_until(lambda: train.popen.poll() is not None, PATIENCE, what="the run is stopped", every=0.5)
        row = wait_until(handed_over, PATIENCE, what="a person is told", every=0.5)
    assert train.popen.returncode == STOPPED
    assert (row["action"], row["done"], row["severity"], row["held_by"]) == ("stop", "executed", "critical", None)
    assert [one["gate"] for one in row["gates"] if one["answer"] != "allow"] == []
    assert "The run is stopped: mend it before it starts again." in row["timeline"][-1]["says"]
    assert folder.attempts() == [0]  # nothing was started behind it
    lines = [line for path in folder.journal_files() for line in decode_lines(path.open("rb"))]
    scales = [one.value("loss_scale") for one in lines if isinstance(one, Step)]
    assert scales[0] is not None
    assert min(scale for scale in scales if scale is not None) < 2.0**-24
