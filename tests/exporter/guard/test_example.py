"""The example runs, and what it prints is what a guard is for."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.exporter.runs import events, lines
from trainwarden.record import Step

EXAMPLE = Path(__file__).parents[3] / "examples" / "guarded.py"


def test_the_guarded_run_learns_and_the_other_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINWARDEN_DIR", str(tmp_path))
    runpy.run_path(str(EXAMPLE))["main"](200)
    without, guarded, _ = capsys.readouterr().out.splitlines()
    assert "not finite, loss of a fresh batch nan" in without
    assert "parameters finite" in guarded
    assert float(guarded.rpartition(" ")[2]) < 0.5
    records = [line for line in lines(tmp_path, "guarded") if isinstance(line, Step)]
    skipped = {
        cause: [record.step for record in records if record.value("guard_skipped_steps", cause) == 1]
        for cause in ("nonfinite", "limit", "surge")
    }
    assert skipped == {"nonfinite": [40, 80, 120, 160, 200], "limit": [], "surge": [70]}
    assert events(tmp_path, "start", "guarded")[0].fields["guard"]["embedding_alpha"] == {"tokens": 0.1}
