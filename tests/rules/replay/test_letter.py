"""To the letter: what a daemon did with commands and receipts in between comes again out of its journal and its database."""

from __future__ import annotations

import io
import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.rules.cli.test_cli import run
from tests.rules.core.runs import Attempt, dirty
from tests.rules.replay.test_journal import write
from trainwarden.record import Event, Header, Step
from trainwarden.rules.core.inputs import Command, Happened, Receipt, SourceSeen, Steps
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.daemon.live import Live
from trainwarden.rules.daemon.process import no_evidence
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.letter import Letter, in_place, of_run
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.rulefiles import read_packs
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions
from trainwarden.rules.store import Store, StoreError, inputs_in

PACK = read_packs(["default"])
ATTEMPT = Attempt(changes=[dirty(351, 400)], end="signal", last=420)
SETTINGS = Settings(mode="approve", receiver=True)


def lines_of() -> list[Step | Event]:
    """Return the run's lines as a journal can hold them: a checkpoint's step is that of its line."""
    found: list[Step | Event] = []
    for line in ATTEMPT.lines():
        if isinstance(line, Event):
            line.fields.pop("step", None)
        found.append(line)
    return found


class Watched:
    """The daemon's core thread on a run that grows by some lines a poll, and the people around it."""

    def __init__(self, folder: Path, settings: Settings, size: int) -> None:
        self.store = Store(folder / "state.db")
        self.inbox = Inbox(1000)
        self.live = Live(
            self.store,
            self.inbox,
            Positions(),
            settings,
            PACK,
            Metrics(),
            snapshot_interval=0.05,
            destinations=lambda message: ("receiver",),
            wake=lambda: None,
            query=no_evidence,
        )
        self.live.open()
        self.thread = threading.Thread(target=self.live.run)
        self.thread.start()
        self.size = size
        self.now = 0.0

    def poll(self, lines: list[Step | Event], gate: bool = True) -> None:
        who = ATTEMPT.who
        for line in lines:
            one = Happened(who, 0, line) if isinstance(line, Event) else Steps(who, 0, (line,))
            self.inbox.put(Read(who, 0, line.seq - 1, line.seq, (one,)))
            self.now = max(self.now, line.time)
        last = lines[-1].seq
        seen = SourceSeen(
            start=who, rank=0, time=self.now, last_seq=last, caught_up=gate, authenticated=True, may_act=True
        )
        self.inbox.put(Read(who, 0, last, last, (seen,)))
        self.settle()

    def settle(self) -> None:
        while len(self.inbox):
            time.sleep(0.005)
        time.sleep(0.12)

    def say(self, value: Command | Receipt) -> None:
        self.inbox.put(Received(self.store.receive(value, self.now), value))
        self.settle()

    def critical(self) -> dict[str, Any]:
        rows = [row for row in self.store.rows("incident") if row["severity"] == "critical"]
        return rows[0] if rows else {}

    def end(self) -> list[dict[str, Any]]:
        self.inbox.close()
        self.thread.join()
        rows = self.store.rows("incident")
        self.store.close()
        return rows


def lived(folder: Path) -> list[dict[str, Any]]:
    """Play a run whose rollback a person approves and the receiver executes; return the daemon's incidents."""
    watched = Watched(folder, SETTINGS, 7)
    lines = lines_of()
    said = set[str]()
    for first in range(0, len(lines), 7):
        watched.poll(lines[first : first + 7], gate=first >= 21)
        row = watched.critical()
        if row.get("plan") and "approve" not in said:
            said.add("approve")
            watched.say(Command("acknowledge", "ada", watched.now, row["id"]))
            plan_id = row["plan"]["plan_id"]
            watched.say(Command("approve", "ada", watched.now, row["id"], plan_id, "go"))
            asked = watched.critical()["webhook_id"]
            watched.say(Receipt(asked, "accepted", watched.now + 0.5))
        elif "approve" in said and "executed" not in said:
            said.add("executed")
            watched.say(Receipt(watched.critical()["webhook_id"], "executed", watched.now + 0.5, "restarted"))
    assert said == {"approve", "executed"}
    return watched.end()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("letter")
    rows = lived(folder)
    who = ATTEMPT.who
    header = Header(run_uid=who.run_uid, run=who.run, attempt=0, start_id=who.start_id, rank=0)
    write(folder / "run" / "00001.ndjson", header, lines_of())
    return folder, rows


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows without the times at which a request left: live, that is told by the clock of the daemon."""
    found: dict[str, dict[str, Any]] = json.loads(json.dumps({row["id"]: row for row in rows}))
    for row in found.values():
        row["timeline"] = [(entry["state"], entry["says"]) for entry in row["timeline"]]
    return found


def test_approval_request_and_receipts_come_again(daemon: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = daemon
    (recording,) = find_recordings([str(folder / "run")], io.BytesIO(), folder)
    told = of_run(inputs_in(folder / "state.db"), recording.run_uid, recording.stream_names())
    outcome = Letter(SETTINGS, PACK, told).run(merged(recording))
    assert by_id(list(outcome.incidents.values())) == by_id(rows)
    (row,) = [row for row in outcome.incidents.values() if row["severity"] == "critical"]
    assert (row["approved_by"], row["acknowledged_by"], row["done"]) == ("ada", "ada", "executed")
    assert row["webhook_id"].startswith("tw_")


def test_without_them_the_same_run_waits_for_ever(daemon: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = daemon
    (recording,) = find_recordings([str(folder / "run")], io.BytesIO(), folder)
    rows = Letter(SETTINGS, PACK, []).run(merged(recording)).incidents.values()
    (row,) = [row for row in rows if row["severity"] == "critical"]
    assert (row["done"], row["held_by"]) == (None, "approval")


def test_the_command_line_takes_the_daemons_database(daemon: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = daemon
    (folder / "secret").write_text("x")
    (folder / "trainwarden.yml").write_text(
        "sources: [{targets: [a:1]}]\nstate: state.db\npolicy: {mode: approve}\nreceiver: {url: 'http://127.0.0.1:1/', secret_file: secret}\n"
    )
    ran = run(
        "replay",
        str(folder / "run"),
        "--config",
        str(folder / "trainwarden.yml"),
        "--inputs",
        str(folder / "state.db"),
        "--output",
        "json",
    )
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    assert by_id(found["incidents"]) == by_id(rows)
    alone = run("replay", str(folder / "run"), "--inputs", str(folder / "state.db"))
    assert alone.returncode == 2
    assert "--inputs needs --config" in alone.stderr


def test_what_is_no_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        inputs_in(tmp_path / "x.db")
    (tmp_path / "y.db").write_text("step,loss\n" * 1000)
    with pytest.raises(StoreError, match="is it a trainwarden database"):
        inputs_in(tmp_path / "y.db")


@pytest.mark.parametrize("row", [(b"\x80", b"{}"), (b"\x00x", b"{}"), ("text", "x")])
def test_a_damaged_row_of_a_database_is_an_error_that_names_it(row: tuple[bytes | str, ...], tmp_path: Path) -> None:
    path = tmp_path / "z.db"
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO inputs (received, input, after) VALUES (0, ?, ?)", row)
        connection.commit()
    with pytest.raises(StoreError, match=r"z\.db: .* is damaged"):
        inputs_in(path)


def test_inputs_stand_where_the_streams_had_been_read_to() -> None:
    who = ATTEMPT.who
    lines = [(who, rank, Step(seq=seq, step=seq, time=float(seq))) for seq in range(1, 5) for rank in (0, 1)]
    word = [Command(name, "a", 0.0) for name in ("acknowledge", "approve", "dismiss")]
    stream = f"{who.start_id}/"
    told = [(word[0], {f"{stream}0": 2}), (word[1], {f"{stream}1": 3}), (word[2], {f"{stream}0": 9})]
    order = [one[0].name if len(one) == 2 else (one[1], one[2].seq) for one in in_place(lines, told)]
    assert order.index("acknowledge") == 2
    assert order[:2] == [(0, 1), (0, 2)]
    assert order[2:7] == ["acknowledge", (1, 1), (1, 2), (1, 3), "approve"]
    assert sorted(one for one in order if isinstance(one, tuple)) == [
        (rank, seq) for rank in (0, 1) for seq in range(1, 5)
    ]
    assert order[-2:] != ["dismiss"]


def test_on_paper_nothing_changes(daemon: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = daemon
    (recording,) = find_recordings([str(folder / "run")], io.BytesIO(), folder)
    rows = Replay(SETTINGS, PACK).run(merged(recording)).incidents.values()
    assert [row["action"] for row in rows if row["severity"] == "critical"] == ["rollback"]
