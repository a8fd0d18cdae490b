"""The examples of the Trainer and of Accelerate run as their page says, and go on where they were when they are called again."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exporter.runs import events, lines
from trainwarden.record import Step

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/integrations.md").read_text()


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop"])
def test_the_commands_of_the_page_do_what_they_say_and_a_second_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (block,) = re.findall(rf"^```\n(python examples/{name}\.py.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    assert [command[:2] for command in commands][1:] == [["trainwarden", "replay"]]
    said = [run(command, tmp_path) for command in commands]
    assert "steps 1 to 40" in said[0]
    assert "40 records, steps 1–40; no incident" in said[1]
    monkeypatch.chdir(tmp_path)
    runpy.run_path(commands[0][1])["main"](3)
    assert "steps 41 to 43" in capsys.readouterr().out
    where, called = tmp_path / ".trainwarden", name.replace("_", "-")
    records = [line for line in lines(where, called) if isinstance(line, Step)]
    assert [record.step for record in records] == list(range(1, 44))
    assert [record.samples for record in records] == [[(16 * step, 16 * step + 16)] for step in range(43)]
    assert all(record.value("grad_norm") and record.value("batch_unique_token_ratio") for record in records)
    first, second = events(where, "start", called)
    assert (first.fields["replayable"], second.fields["resumed_from"]["step"]) == (True, 40)
