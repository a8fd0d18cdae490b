"""Operators' commands over the daemon's API: who may, what is refused, and that a taken one is never lost."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.real import wait_until
from tests.rules.daemon.toy import ToyExporter
from trainwarden.rules.cli import app
from trainwarden.rules.daemon.process import Daemon

Start = Callable[..., Daemon]
ACT = "act_token_file: act-token"
WORD = "the-word-to-act"


@pytest.fixture
def daemon(folder: Path, exporter: ToyExporter, start_daemon: Start) -> Daemon:
    (folder / "act-token").write_text(WORD)
    (folder / "act-token").chmod(0o600)
    exporter.begin("s0", 0)
    exporter.step(200.0)
    started = start_daemon(ACT)
    wait_until(lambda: row(started).get("plan") is not None, 10)
    return started


def row(daemon: Daemon) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{daemon.address}/api/v1/incidents/toy", timeout=5) as response:
            found: dict[str, Any] = json.load(response)["data"]
            return found
    except urllib.error.HTTPError:
        return {}


def post(daemon: Daemon, path: str, body: bytes, token: str | None = WORD) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://{daemon.address}/api/v1/incidents/{path}", body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        says = json.loads(error.read())["error"]
        return error.code if says else 0


def order(**fields: Any) -> bytes:
    return json.dumps({"author": "ann", **fields}).encode()


def test_acknowledge_approve_and_dismiss_reach_the_core(daemon: Daemon) -> None:
    assert post(daemon, "toy/acknowledge", order(comment="looking")) == 202
    assert post(daemon, "toy/approve", order(plan_id="p0")) == 202
    assert post(daemon, "toy/dismiss", order()) == 202
    wait_until(lambda: row(daemon)["commands"] == ["acknowledge", "approve", "dismiss"], 10)


@pytest.mark.parametrize(
    ("path", "body", "token", "status"),
    [
        ("toy/acknowledge", order(), None, 401),
        ("toy/acknowledge", order(), "another", 401),
        ("none/acknowledge", order(), WORD, 404),
        ("toy/destroy", order(), WORD, 404),
        ("toy/approve", order(), WORD, 400),
        ("toy/approve", order(plan_id="p-of-yesterday"), WORD, 409),
        ("toy/acknowledge", b"{", WORD, 400),
        ("toy/acknowledge", b'{"author": " "}', WORD, 400),
        ("toy/acknowledge", order(more=1), WORD, 400),
        ("toy/acknowledge", order(comment="x" * 20_000), WORD, 413),
    ],
)
def test_what_is_no_good_command_is_refused_and_reaches_nobody(
    daemon: Daemon, path: str, body: bytes, token: str | None, status: int
) -> None:
    assert post(daemon, path, body, token) == status
    assert (
        post(daemon, "toy/acknowledge", order()) == 202
    )  # a command behind it: had the first been taken, it would show
    wait_until(lambda: row(daemon)["commands"] != [], 10)
    assert row(daemon)["commands"] == ["acknowledge"]


def test_without_a_token_in_the_configuration_no_command_is_taken(exporter: ToyExporter, start_daemon: Start) -> None:
    exporter.begin("s0", 0)
    exporter.step(200.0)
    daemon = start_daemon()
    wait_until(lambda: row(daemon) != {}, 10)
    assert post(daemon, "toy/acknowledge", order(), "") == 403


def test_a_token_that_others_can_read_is_not_used(daemon: Daemon, folder: Path) -> None:
    (folder / "act-token").chmod(0o644)
    assert post(daemon, "toy/acknowledge", order()) == 403


def test_a_taken_command_outlives_the_daemon(daemon: Daemon, start_daemon: Start) -> None:
    assert post(daemon, "toy/acknowledge", order()) == 202
    daemon.stop()
    again = start_daemon(ACT)
    wait_until(lambda: row(again).get("commands") == ["acknowledge"], 10)


def test_the_command_line_says_it_with_the_users_name(daemon: Daemon, folder: Path) -> None:
    where = ["--token-file", str(folder / "act-token"), "--url", f"http://{daemon.address}"]
    run = CliRunner()
    assert run.invoke(app, ["incidents", "ack", "toy", *where]).exit_code == 0
    assert run.invoke(app, ["incidents", "approve", "toy", "--plan", "p0", "--author", "ann", *where]).exit_code == 0
    wrong = run.invoke(app, ["incidents", "approve", "toy", "--plan", "p1", *where])
    assert wrong.exit_code == 1
    assert "look at the incident again" in wrong.output
    wait_until(lambda: row(daemon)["commands"] == ["acknowledge", "approve"], 10)
