"""``replay --output html`` as a command: to a file, to a folder, to standard output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rules.report.drawn import falling


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwarden.rules", "replay", *arguments, "--output", "html"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def log(path: Path, losses: list[float]) -> Path:
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses, start=1)))
    return path


def test_one_run_is_a_file_or_standard_output(tmp_path: Path) -> None:
    losses = falling(300)
    losses[200:] = [9.0] * 100
    file = log(tmp_path / "broken.csv", losses)
    done = replay(str(file), "-o", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert 'id="incident-1"' in page
    assert replay(str(file)).stdout == page


def test_several_runs_are_a_folder_and_without_one_it_is_wrong_usage(tmp_path: Path) -> None:
    files = [str(log(tmp_path / f"{name}.csv", falling(50))) for name in "ab"]
    done = replay(*files, "-o", str(tmp_path / "pages"))
    assert done.returncode == 0, done.stderr
    assert "pages/index.html" in done.stderr
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["a.html", "b.html", "index.html"]
    refused = replay(*files)
    assert refused.returncode == 2
    assert "give a folder for them with -o" in refused.stderr
    assert refused.stdout == ""
