"""A real training process with a real exporter, watched by the daemon with the real core, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.real import wait_until
from trainwarden.rules.config import read_config
from trainwarden.rules.daemon.process import Daemon
from trainwarden.rules.rulefiles import read_packs

pytest.importorskip("torch")

TRAIN = """
import sys, time, torch
from trainwarden.exporter import Exporter
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
exporter = Exporter(model, optimizer, run="tiny", port=0)
first, last, wait = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
exporter.resumed(first - 1)
for step in range(first, last + 1):
    x = torch.randn(16, 8)
    y = x.sum(1, keepdim=True) * (1000.0 if 150 <= step < 154 else 1.0)
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    time.sleep(wait)
print("trained", flush=True)
exporter.close()
"""


def train(folder: Path, first: int, last: int, wait: float, attempt: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TRAINWARDEN_DIR": str(folder / "runs"), "TRAINWARDEN_ATTEMPT": str(attempt)}
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(first), str(last), str(wait)], env=environment, stdout=subprocess.PIPE
    )


def get(daemon: Daemon, path: str) -> Any:
    with urllib.request.urlopen(f"http://{daemon.address}{path}", timeout=5) as response:
        body = response.read().decode()
    return json.loads(body)["data"] if path.startswith("/api") else body


def fed(daemon: Daemon) -> float:
    page = get(daemon, "/metrics")
    return float(next(line for line in page.splitlines() if line.startswith("trainwarden_records_total")).split()[1])


@pytest.mark.slow
def test_a_killed_run_is_read_to_its_last_line_and_live_equals_replay(tmp_path: Path) -> None:
    text = """
listen: 127.0.0.1:0
poll_interval: 200ms
sources: [{folder: "runs/*/targets"}]
"""
    daemon = Daemon(read_config(text, "t.yml", tmp_path), read_packs(["default"]))
    daemon.start()
    try:
        killed = train(tmp_path, 1, 100_000, 0.003, 0)
        wait_until(lambda: fed(daemon) > 300, 40)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        again = train(tmp_path, 201, 400, 0.0, 1)
        assert again.wait(60) == 0
        lines = sum(
            line.startswith(b'{"type":"step"')
            for path in (tmp_path / "runs" / "tiny").rglob("*.ndjson")
            for line in path.read_bytes().split(b"\n")[:-1]
        )
        wait_until(lambda: fed(daemon) >= lines, 20, what=f"all {lines} journalled records are fed")
        assert fed(daemon) == lines
        live = get(daemon, "/api/v1/incidents")
    finally:
        daemon.stop()
    replayed = subprocess.run(
        [sys.executable, "-m", "trainwarden.rules", "replay", str(tmp_path / "runs" / "tiny"), "--output", "json"],
        capture_output=True,
        check=True,
    )
    (report,) = json.loads(replayed.stdout)
    assert live, "the planted spike is an incident"
    for row in live:
        (paper,) = [one for one in report["incidents"] if one["id"] == row["id"]]
        for name in ("onset_step", "confirmed_step", "closed_step", "state", "severity", "verdict", "cause", "alerts"):
            assert paper[name] == row[name], name
    assert len(report["incidents"]) == len(live)
