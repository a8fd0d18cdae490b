"""The code of the README runs as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainwarden.record import Step, decode_lines
from trainwarden.runfolder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FOUR_LINES, RESUME = (part.partition("```")[0] for part in README.split("```python\n")[1:3])

BEFORE = """
    import sys, json, pathlib, urllib.request
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # 8 of the 88 rows are held back as the reserve: ten steps.
    loader = DataLoader(TensorDataset(torch.randn(88, 4), torch.randn(88, 1)), batch_size=8)
"""
LOOP = """
    for x, y in loader:
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
"""
AFTER = """
    (place,) = json.loads(pathlib.Path(sys.argv[1], "gpt-7b/targets/rank-0.json").read_text())
    page = urllib.request.urlopen(f"http://{place['targets'][0]}/metrics", timeout=10).read().decode()
    assert 'train_loss{rank="0",run="gpt-7b"}' in page, page
    torch.save({"model": model.state_dict(), "step": step}, "last.pt")
"""
LOAD = """
    def load(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        print("loaded", pathlib.Path(path).name)
        return state["step"]

    step, path = 0, "last.pt"
"""


def run(script: str, folder: Path) -> str:
    environment = {**os.environ, "TRAINWARDEN_DIR": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def losses(folder: Path) -> list[int]:
    steps = []
    for path in RunFolder("gpt-7b", folder).journal_files():
        with path.open("rb") as file:
            steps += [
                line.step for line in decode_lines(file) if isinstance(line, Step) and line.value("loss") is not None
            ]
    return steps


@pytest.mark.e2e
def test_the_four_lines_record_and_show_every_step(tmp_path: Path) -> None:
    script = (
        textwrap.dedent(BEFORE)
        + "step = 0\n"
        + FOUR_LINES.replace("...\n", textwrap.dedent(LOOP))
        + textwrap.dedent(AFTER)
    )
    run(script, tmp_path)
    assert losses(tmp_path) == list(range(1, 11))


@pytest.mark.e2e
def test_with_the_lines_for_resuming_a_second_start_goes_on_from_the_reported_checkpoint(tmp_path: Path) -> None:
    attach = FOUR_LINES.partition("...\n")[0]
    begin, _, report = RESUME.partition("...\n")
    script = "".join(
        textwrap.dedent(part)
        for part in (BEFORE, attach, LOAD, begin, LOOP, "    exporter.step(loss)\n", AFTER, report)
    )  # fmt: skip
    script = script.replace("step += 1\nexporter.step", "step += 1\n    exporter.step")
    assert run(script, tmp_path) == ""
    assert run(script, tmp_path) == "loaded last.pt\n"
    assert losses(tmp_path) == list(range(1, 21))


@pytest.mark.e2e
def test_the_commands_about_rules_do_what_they_say_one_after_another(tmp_path: Path) -> None:
    block = README.partition("## Rules")[2].partition("python examples/minimal.py")[2].partition("```")[0]
    lines = [line.partition("#")[0].split() for line in f"python examples/minimal.py{block}".splitlines()]
    assert {line[1] for line in lines[1:]} == {"replay", "check", "test", "tune"}
    for name in ("examples", "rules"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("TRAINWARDEN_DIR", None)
    for line in lines:
        ran = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, (line, ran.stderr)
        if line[1:] == ["replay", ".trainwarden/minimal"]:
            assert "300 records" in ran.stdout
    assert (tmp_path / "minimal.html").stat().st_size > 10_000
