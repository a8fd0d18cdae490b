"""Commands and what they print, letter by letter: each file of ``golden`` is a command, its files and its expected output.

``UPDATE_GOLDEN=1 pytest tests/rules/cli/test_golden.py`` writes the outputs anew, to be read before they are committed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))
SECTION = re.compile(r"^-- (.+) --$", re.MULTILINE)
OUTPUTS = ("exit", "stdout", "stderr")


def parse(text: str) -> tuple[str, dict[str, str]]:
    head, *rest = SECTION.split(text)
    return head, {name: body.removeprefix("\n") for name, body in zip(rest[::2], rest[1::2], strict=True)}


def ran(head: str, files: dict[str, str], folder: Path) -> dict[str, str]:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body)
    (command,) = [line[2:] for line in head.splitlines() if line.startswith("$ ")]
    words = shlex.split(command)
    assert words[0] == "trainwarden"
    done = subprocess.run(
        [sys.executable, "-m", "trainwarden.rules", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
    )
    return {"exit": f"{done.returncode}\n", "stdout": done.stdout, "stderr": done.stderr}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_command_prints_what_stands_in_its_file(path: Path, tmp_path: Path) -> None:
    head, sections = parse(path.read_text())
    files = {name: body for name, body in sections.items() if name not in OUTPUTS}
    found = ran(head, files, tmp_path)
    if os.environ.get("UPDATE_GOLDEN"):
        parts = [(name, found[name]) for name in OUTPUTS if found[name]] + list(files.items())
        path.write_text(head + "".join(f"-- {name} --\n{body}" for name, body in parts))
    assert found == {name: sections.get(name, "") for name in OUTPUTS}


def test_there_are_golden_files() -> None:
    assert len(GOLDEN) >= 8
