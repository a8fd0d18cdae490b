"""The shipped unit files: systemd accepts them, and our commands know their flags."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real import need_program

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = ("trainwarden.service", "trainwarden-receiver.service", "trainwarden-supervise@.service")


def settings(unit: str) -> dict[str, str]:
    lines = (FOLDER / unit).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    analyze = need_program("systemd-analyze")
    # The program that is installed here stands for the one of the unit; all else stays.
    text = (
        (FOLDER / unit)
        .read_text()
        .replace("/usr/local/bin/trainwarden", "/bin/true")
        .replace("User=train", "User=root")
    )
    path = tmp_path / unit.replace("@.", "@run.")
    path.write_text(text)
    done = subprocess.run([analyze, "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("unit", UNITS)
def test_the_command_of_the_unit_knows_its_flags(unit: str) -> None:
    words = shlex.split(settings(unit)["ExecStart"])
    command = words[1]
    flags = [word for word in words[2 : words.index("--") if "--" in words else None] if word.startswith("--")]
    done = subprocess.run(
        [sys.executable, "-m", "trainwarden.rules.cli", command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    assert flags
    assert set(flags) <= known, done.stdout + done.stderr


def test_a_supervised_unit_gives_the_run_its_grace() -> None:
    unit = settings("trainwarden-supervise@.service")
    grace = float(unit["ExecStart"].split("--grace ")[1].split()[0])
    assert float(unit["TimeoutStopSec"]) >= grace + 20
