"""``replay --output markdown``: a report for each incident above information, or what is said of the run."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tests.rules.report.drawn import falling
from tests.rules.report.test_replay_writes_pages import log
from trainwarden.rules.cli import app


def test_each_incident_above_information_has_its_report_and_a_healthy_run_a_sentence(tmp_path: Path) -> None:
    well = [loss + 0.02 * ((7 * step) % 11 - 5) / 5 for step, loss in enumerate(falling(400))]
    broken = [loss + 3.0 if step >= 200 else loss for step, loss in enumerate(well)]
    files = [log(tmp_path / "broken.csv", broken), log(tmp_path / "well.csv", well)]
    to = tmp_path / "reports.md"
    ran = CliRunner().invoke(app, ["replay", *map(str, files), "--output", "markdown", "-o", str(to)])
    assert ran.exit_code == 0, ran.output
    told = to.read_text()
    assert "in broken, step 201" in told
    assert told.count("## Triage, from cheap to dear") == 1
    assert "# well" in told
