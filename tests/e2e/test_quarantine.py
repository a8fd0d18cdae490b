"""A real daemon confirms an incident and has a real trainer keep its damaged state; the suspect step is then made again bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo_loop import demo_loop
from tests.e2e.small_loop import PATIENCE, small_loop
from tests.real import wait_until
from trainwarden.exporter.forensics import load
from trainwarden.record import Event, decode_lines

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "replay_step.py"

CONFIG = """
listen: {daemon}
poll_interval: 500ms
tick_interval: 500ms
sources: [{{folder: {runs}/*/targets}}]
policy: {{mode: observe, quarantine: true}}
receiver: {{url: "http://{receiver}/webhook", secret_file: {secret}}}
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_the_daemon_has_a_damaged_state_kept_and_the_suspect_step_is_made_again(tmp_path: Path) -> None:
    with small_loop(tmp_path, "replay-step", CONFIG, tmp_path / ".replay-step") as loop:
        folder = loop.folder
        script = f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.argv = ['x', 'train', '4000']; "
        script += f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
        loop.train([sys.executable, "-c", script])

        def copies() -> list[Path]:
            return [path for path in folder.quarantine_folder.glob("incident-*") if path.name.endswith(".json")]

        wait_until(copies, PATIENCE, what="a request has an end", every=0.5)
        incidents = wait_until(loop.incidents, PATIENCE, what="an incident is known")
    outcome = json.loads(copies()[0].read_bytes())
    assert outcome["saved"] is True, outcome
    incident: dict[str, Any] = next(row for row in incidents if row["id"] == outcome["incident"])
    found = load(copies()[0].with_suffix(""))
    assert found.suspect_step == incident["onset_step"]
    assert found.step >= incident["confirmed_step"]
    assert found.last_good is not None
    assert found.last_good.step < found.suspect_step
    assert any(span.name == "calendar" for span in found.seen(found.suspect_step + 1).shards)
    told = [
        line for path in folder.journal_files() for line in decode_lines(path.open("rb")) if isinstance(line, Event)
    ]
    assert [event.fields["incident"] for event in told if event.fields.get("quarantined")] == [incident["id"]]
    replayed = subprocess.run(
        [sys.executable, str(EXAMPLE), "replay", str(found.folder)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "DIFFERS" not in replayed.stdout
    assert f"step {found.suspect_step:5} " in replayed.stdout


@pytest.mark.e2e
@pytest.mark.slow
def test_a_rollback_waits_until_the_damaged_state_is_kept_and_does_not_go_back_to_it(tmp_path: Path) -> None:
    with demo_loop(tmp_path / "demo") as loop:
        config = loop.layout.ops / "trainwarden.yml"
        config.write_text(config.read_text().replace("mode: act", "mode: act\n  quarantine: true"))
        loop.start_receiver()
        loop.start_daemon()
        loop.start_supervisor()
        incident = loop.wait_until_recovered()
        assert incident["state"] == "recovered", incident
        assert loop.rollbacks() == 1
        [copy] = [path for path in loop.run.quarantine_folder.glob("incident-*") if path.is_dir()]
        found = load(copy)
        assert found.positions.incident == incident["id"]
        assert found.positions.attempt == 0
        assert incident["onset_step"] == found.suspect_step <= found.step <= loop.step(0)
        rollback = next(plan for plan in loop.run.read_plans()[0] if plan.action == "rollback")
        assert rollback.target is not None
        assert rollback.target == found.last_good
        [start] = loop.of_kind("start", 1)
        assert start.fields["resumed_from"]["path"] == rollback.target.path
        [told] = [event for event in loop.of_kind("checkpoint", 0) if event.fields.get("quarantined")]
        assert told.step == found.step
        assert "complete" not in told.fields
