"""The log notifier: one line a message, as grave as the incident."""

from __future__ import annotations

import msgspec
import pytest
from structlog.testing import capture_logs

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


def test_a_message_of_another_shape_is_logged_too() -> None:
    with capture_logs() as lines:
        LogNotifier().deliver(row({}), 0.0)
    assert lines[0]["incident"] == "inc_1"
