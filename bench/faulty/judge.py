"""What the judgement says of a run's records: the replay driver, the default rules, the bench's settings. It is told nothing else."""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from trainwarden.rules.core.language import Pack
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.replay.report import report
from trainwarden.rules.rulefiles import read_packs

#: The policy of the bench, as the daemon's configuration writes it. The defaults are for runs of many thousand steps: a run of 400
#: would be over before they have waited for their windows. The rules are the default pack as it is.
POLICY: dict[str, Any] = {
    "mode": "act",
    "heal_steps": 30,
    "level_steps": 60,
    "persist_steps": 40,
    "cooldown_steps": 20,
    "verify_steps": 40,
    "rewarmup_steps": 20,
    "settle_steps": 40,
    "stall_seconds": 20.0,
}


@cache
def _pack() -> Pack:
    return read_packs(["default"])


def judge(run_folder: Path) -> dict[str, Any]:
    """Return the report of one run's records."""
    with tempfile.TemporaryDirectory() as spool:
        (recording,) = find_recordings([str(run_folder)], sys.stdin.buffer, Path(spool))
        return report(recording, Replay(Settings(**POLICY), _pack()).run(merged(recording)), _pack())


def told(row: dict[str, Any]) -> bool:
    """Say whether anybody was told of an incident."""
    return bool(row["severity"] != "info")


def paged(row: dict[str, Any]) -> bool:
    """Say whether a person was called."""
    return bool(row["severity"] == "critical" or row["action"] != "none")


def of_fault(rows: list[dict[str, Any]], first: int, last: int) -> list[dict[str, Any]]:
    """Return the incidents that people were told of and that began within these steps, the weightiest first."""
    found = [row for row in rows if told(row) and first <= row["onset_step"] <= last]
    return sorted(found, key=lambda row: (row["action"] != "rollback", not paged(row), row["opened_step"]))
