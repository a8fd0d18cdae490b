"""A real daemon finds that a real training's rate is too high, has it lowered through a real receiver, and sees it lowered and back in the records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small_loop import PATIENCE, small_loop
from tests.real import wait_until
from trainwarden.plan import Plan
from trainwarden.record import Event, Step, decode_lines
from trainwarden.runfolder import RunFolder

#: Stochastic gradient descent on a noisy bowl, where the loss above the floor grows with the rate; at step 300 the schedule jumps eightfold.
SCRIPT = """
import os, sys, time
import torch
from torch.optim.lr_scheduler import LambdaLR
from trainwarden.exporter import Exporter

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = LambdaLR(optimizer, lambda step: 8.0 if step + 1 >= 300 else 1.0)
exporter = Exporter(model, optimizer, run="bowl", dir=sys.argv[1], port=0, cadence=10)
for step in range(1, 20_000):
    noise = torch.randn(1024)
    loss = 0.5 * (model.weight - noise).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    assert rate == (0.8 if step >= 300 else 0.1), rate  # whoever looks from outside sees the schedule's
    schedule.step()
    exporter.step(loss.detach() / 1024)
    time.sleep(0.01)
"""

CONFIG = """
listen: {daemon}
poll_interval: 500ms
tick_interval: 500ms
sources: [{{folder: {runs}/*/targets}}]
policy:
  mode: act
  lower_lr: true
  lower_lr_factor: 0.125
  lower_lr_steps: 100
  lower_lr_return_steps: 20
  lower_lr_ahead_seconds: 8
  max_lower_lr: 1
  persist_steps: 5000
receiver: {{url: "http://{receiver}/webhook", secret_file: {secret}}}
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_the_rate_of_a_running_training_is_lowered_comes_back_and_is_verified_with_nobody_restarting_anything(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with small_loop(tmp_path, "bowl", CONFIG, tmp_path / "checkpoints") as loop:
        folder = loop.folder

        def incident() -> dict[str, Any] | None:
            found = [row for row in loop.incidents() if row["action"] == "lower_lr"]
            return found[0] if found else None

        def is_back() -> dict[str, Any] | None:
            found = incident()
            return found if found and any("it is back." in line["says"] for line in found["timeline"]) else None

        loop.train([sys.executable, str(tmp_path / "train.py"), str(loop.runs)])
        wait_until(incident, PATIENCE, what="a lower rate is decided", every=0.5)
        found = wait_until(is_back, PATIENCE, what="the rate is lowered and back", every=0.5)
    plan = _plan(folder)
    assert plan.lowering is not None
    assert found["cause"]["name"] == "learning_rate"
    said = "\n".join(line["says"] for line in found["timeline"])
    assert "The receiver says executed" in said
    assert "it is lowered, 0.125 times was asked" in said
    assert folder.attempts() == [0]  # nobody restarted anything
    assert folder.ledger() is None
    lines = [line for path in folder.journal_files() for line in decode_lines(path.open("rb"))]
    records = [line for line in lines if isinstance(line, Step)]
    wanted = [(0.8 if one.step >= 300 else 0.1) * plan.lowering.at(one.step) for one in records]
    assert [one.value("lr") for one in records] == pytest.approx(wanted)
    told = [line.fields for line in lines if isinstance(line, Event) and line.kind == "lower_lr"]
    assert [fields["state"] for fields in told] == ["began", "returns", "ended"]
    assert told[-1]["updates"] == 120


def _plan(folder: RunFolder) -> Plan:
    plans, refused = folder.read_plans()
    assert refused == []
    [plan] = [one for one in plans if one.action == "lower_lr"]
    return plan
