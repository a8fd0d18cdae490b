"""``trainwarden run --follow``: the daemon on a log that grows, as a process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "trainwarden.rules", "run", "--listen", "127.0.0.1:0"]


def test_a_log_that_grows_opens_an_incident_without_any_configuration(tmp_path: Path) -> None:
    log = tmp_path / "run.csv"
    output = tmp_path / "output"
    with output.open("w") as file:
        daemon = subprocess.Popen(
            [*COMMAND, "--follow", "*.csv", "."], cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            with log.open("w", buffering=1) as writing:
                writing.write("step,loss\n")
                for step in range(1, 61):
                    writing.write(f"{step},{'nan' if step > 50 else 2.5 + step % 7 / 100}\n")
                for _ in range(300):
                    time.sleep(0.1)
                    if "incident opened" in output.read_text():
                        break
        finally:
            daemon.terminate()
            assert daemon.wait(20) == 0
    (line,) = [line for line in output.read_text().splitlines() if "incident opened" in line]
    assert output.read_text().count("a folder cannot be followed") == 1
    assert "run=run" in line
    assert "onset_step=51" in line
    assert "verdict=nonfinite" in line


def test_files_without_follow_are_a_wrong_usage(tmp_path: Path) -> None:
    ran = subprocess.run([*COMMAND, "x.csv"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "--follow" in ran.stderr
    ran = subprocess.run(
        [*COMMAND, "--follow", "x.csv", "--map", "loss"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "SIGNAL=COLUMN" in ran.stderr
