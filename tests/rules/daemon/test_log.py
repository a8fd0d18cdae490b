"""The log notifier: one line a message, as grave as the incident."""

from __future__ import annotations

import shlex
import subprocess
import sys

import msgspec
import pytest
from structlog.testing import capture_logs

from trainwarden.rules.daemon.information import Information
from trainwarden.rules.notifiers import Answer
from trainwarden.rules.notifiers.log import LogNotifier
from trainwarden.rules.outbox import Row


def row(body: object) -> Row:
    return Row(
        key="k",
        destination="log",
        kind="notify",
        run="gpt",
        run_uid="u",
        incident="inc_1",
        body=msgspec.json.encode(body),
        created=0.0,
        expires_at=None,
        phase="deliver",
        attempts=0,
        status="",
    )


@pytest.mark.parametrize(("severity", "level"), [("critical", "error"), ("warning", "warning"), ("info", "info")])
def test_a_message_is_one_line_as_grave_as_its_incident(severity: str, level: str) -> None:
    incident = {
        "severity": severity,
        "state": "confirmed",
        "cause": {"name": "data"},
        "summary": "Loss up.",
        "plan": {},
    }
    with capture_logs() as lines:
        assert LogNotifier().deliver(row({"event": "decided", "incident": incident}), 0.0) == Answer()
    assert lines == [
        {
            "event": "incident decided",
            "log_level": level,
            "run": "gpt",
            "incident": "inc_1",
            "state": "confirmed",
            "severity": severity,
            "cause": "data",
            "summary": "Loss up.",
        }
    ]


def test_what_is_only_information_has_a_line_at_its_beginning_and_one_at_its_end() -> None:
    seen = Information()
    row = {"id": "inc_2", "run": "gpt", "severity": "info", "state": "watching", "closed_step": None, "summary": "Odd."}
    with capture_logs() as lines:
        for changes in ({}, {"summary": "Odder."}, {"state": "recovered", "closed_step": 9}):
            seen.see({**row, **changes})
        seen.see({**row, "id": "inc_3"})
        seen.see({**row, "id": "inc_3", "severity": "warning"})  # told by a notifier from here on
        seen.see({**row, "id": "inc_3", "severity": "warning", "closed_step": 9})
    said = [(line["event"], line["incident"], line["severity"], line["state"]) for line in lines]
    assert said == [
        ("incident opened", "inc_2", "info", "watching"),
        ("incident ended", "inc_2", "info", "recovered"),
        ("incident opened", "inc_3", "info", "watching"),
    ]
    assert {line["log_level"] for line in lines} == {"info"}


LINES = {
    "daemon": "from trainwarden.rules.logs import set_up; set_up()",
    "receiver": "from trainwarden.receiver.main import _log_to_stderr; _log_to_stderr()",
}


@pytest.mark.parametrize("program", LINES)
def test_daemon_and_receiver_name_time_level_and_event_alike(program: str) -> None:
    code = f"{LINES[program]}\nimport structlog; structlog.get_logger('x').warning('it broke', run='r')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    fields = [field.partition("=")[0] for field in shlex.split(ran.stderr)]
    assert [name for name in fields if name != "logger"] == ["ts", "level", "event", "run"]


def test_a_message_of_another_shape_is_logged_too() -> None:
    with capture_logs() as lines:
        LogNotifier().deliver(row({}), 0.0)
    assert lines[0]["incident"] == "inc_1"
