"""What the daemon's API refuses of questions and commands about suspect samples, and that a forgotten one stays so after a restart."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real import wait_until
from tests.rules.core.runs import dirty
from tests.rules.core.test_suspects_remembered import data, run
from trainwarden.record import Event, Step
from trainwarden.rules.config import read_config
from trainwarden.rules.core.inputs import Happened, Steps
from trainwarden.rules.daemon.process import Daemon
from trainwarden.rules.rulefiles import read_packs
from trainwarden.rules.sources.lines import Read

WORD = "the-word-to-act"
FORGET = "/api/v1/suspects/forget"


def start(folder: Path) -> Daemon:
    (folder / "act").write_text(WORD)
    (folder / "act").chmod(0o600)
    text = "listen: 127.0.0.1:0\nsnapshot_interval: 100ms\nact_token_file: act\nsources: [{folder: none}]\n"
    daemon = Daemon(read_config(text, "t.yml", folder), read_packs(["default"]))
    daemon.start()
    return daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = start(tmp_path)
    yield running
    running.stop()


def ask(daemon: Daemon, path: str, body: Any = None, token: str | None = WORD) -> tuple[int, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    sent = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{daemon.address}{path}", sent, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)["data"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def see(daemon: Daemon, name: str = "a", **how: Any) -> None:
    """Let the daemon read a made-up run, as a source would."""
    attempt = run(name, dirty(301, 350), start=data(**how))
    inputs = tuple(
        Steps(attempt.who, 0, (line,)) if isinstance(line, Step) else Happened(attempt.who, 0, line)
        for line in attempt.lines()
        if isinstance(line, Step | Event)
    )
    daemon._inbox.put(Read(attempt.who, 0, 0, len(inputs), inputs))


@pytest.mark.parametrize(
    ("body", "token", "status", "says"),
    [
        ({"author": "ann", "which": {"all": "1"}}, None, 401, "token"),
        ({"author": "ann", "which": {"all": "1"}}, "another", 401, "token"),
        ({"author": " ", "which": {"all": "1"}}, WORD, 400, "author"),
        ({"author": "ann"}, WORD, 400, "which"),
        ({"author": "ann", "which": {}}, WORD, 400, "say which"),
        ({"author": "ann", "which": {"shard": "x"}}, WORD, 400, "id, run, dataset, all"),
        ({"author": "ann", "which": {"all": 1}}, WORD, 400, "which"),
        ({"author": "ann", "which": {"id": "sus_0"}}, WORD, 404, "no suspect samples with id sus_0"),
        (b"{", WORD, 400, "body"),
        (b" " * 20_000, WORD, 413, "larger"),
    ],
)
def test_what_is_no_good_command_is_refused(
    daemon: Daemon, body: Any, token: str | None, status: int, says: str
) -> None:
    code, told = ask(daemon, FORGET, body, token)
    assert code == status
    assert says in told


def test_questions_are_asked_by_run_and_data_set(daemon: Daemon) -> None:
    assert ask(daemon, "/api/v1/suspects") == (200, [])
    assert ask(daemon, "/api/v1/suspects?shard=x")[0] == 400
    assert ask(daemon, "/api/v1/suspects?all=yes")[0] == 400
    see(daemon)
    (seen,) = wait_until(lambda: ask(daemon, "/api/v1/suspects?run=a&dataset=web")[1], 30)
    assert seen["exclude"][0]["shard"] == "shard-006"
    assert ask(daemon, "/api/v1/suspects?run=b") == (200, [])
    assert ask(daemon, "/api/v1/suspects?dataset=other") == (200, [])


def test_the_memory_and_what_was_forgotten_outlive_the_daemon(tmp_path: Path) -> None:
    first = start(tmp_path)
    see(first)
    (seen,) = wait_until(lambda: ask(first, "/api/v1/suspects")[1], 30)
    first.stop()
    second = start(tmp_path)
    see(second, "b", order="blocks", seed=2)
    wait_until(lambda: [one for one in ask(second, "/api/v1/notices?run=b")[1] if "in run a," in one["says"]], 30)
    assert ask(second, FORGET, {"author": "ann", "which": {"id": seen["id"]}, "comment": "clean"}) == (
        202,
        {"taken": "forget", "meant": 1},
    )
    second.stop()
    third = start(tmp_path)
    (gone,) = (one for one in ask(third, "/api/v1/suspects?all=1&run=a")[1])
    assert (gone["state"], gone["by"], gone["comment"]) == ("forgotten", "ann", "clean")
    see(third, "c", order="blocks", seed=8)
    wait_until(lambda: [one for one in ask(third, "/api/v1/suspects?run=c")[1] if one["cause"] == "data"], 30)
    assert not [one for one in ask(third, "/api/v1/notices?run=c")[1] if "in run a," in one["says"]]
    third.stop()
