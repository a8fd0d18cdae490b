"""The store: one transaction, one owner, an input journal."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from trainwarden.rules.core.effects import Deliver
from trainwarden.rules.core.inputs import Command, Receipt, Start
from trainwarden.rules.store import Commit, Cursor, SavedRow, Store, StoreError, put_messages

START = Start("uid", "run", 0, "s0")


def message(key: str = "k", body: int = 1) -> Deliver:
    return Deliver("webhook", key, "run", "uid", "i", {"n": body}, 5.0, 100.0)


def test_a_transaction_holds_cursor_state_rows_and_messages_together(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    commit = Commit()
    commit.cursors["s0", 0] = Cursor(START, 0, 7)
    commit.rows["incident", "i"] = SavedRow(
        "incident", "i", {"id": "i", "run": "run", "state": "acting", "x": math.inf}
    )
    commit.messages.append((message(), ("receiver",)))
    store.commit(commit, {"": b"state"}, 10.0)
    store.close()

    again = Store(tmp_path / "x.db")
    assert again.snapshot() == {"": b"state"}
    assert [(cursor.start, cursor.seq) for cursor in again.cursors()] == [(START, 7)]
    assert again.row("incident", "i") == {"id": "i", "run": "run", "state": "acting", "x": "+Inf"}
    assert again.counts() == {"acting": 1}
    again.close()


def test_a_transaction_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    commit = Commit()
    commit.cursors["s0", 0] = Cursor(START, 0, 7)
    commit.rows["incident", "i"] = SavedRow("incident", "i", {"id": object()})  # not JSON: fails in the middle
    with pytest.raises(TypeError):
        store.commit(commit, {"": b"state"}, 10.0)
    assert store.snapshot() == {}
    assert store.cursors() == []
    store.commit(Commit(), {"uid": b"later"}, 11.0)
    assert store.snapshot() == {"uid": b"later"}
    store.close()


def test_a_second_process_is_refused_and_told_whom_to_stop(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    code = (
        "from pathlib import Path; from trainwarden.rules.store import Store, StoreError\n"
        f"try: Store(Path({str(tmp_path / 'x.db')!r}))\nexcept StoreError as error: print(error)"
    )
    says = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "another daemon (process " in says
    assert "stop that one" in says
    store.close()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == ""


def test_a_file_that_is_no_database_or_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"this is no database at all, but long enough to look at" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(tmp_path / "x.db")
    other = sqlite3.connect(tmp_path / "y.db")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(StoreError, match="schema 99"):
        Store(tmp_path / "y.db")


def test_an_input_is_durable_before_it_is_applied_and_comes_back_until_it_is(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    receipt = Receipt("tw_1", "accepted", 3.0)
    command = Command("approve", "ann", 4.0, incident="i")
    first = store.receive(receipt, 3.0)
    store.receive(command, 4.0)
    assert [value for _, value in store.waiting_inputs()] == [receipt, command]
    commit = Commit()
    commit.applied.append((first, receipt, {"s0/0": 9}))
    store.commit(commit, {}, 5.0)
    store.close()
    again = Store(tmp_path / "x.db")
    assert [value for _, value in again.waiting_inputs()] == [command]
    assert again.applied_inputs() == [(receipt, {"s0/0": 9})]
    again.close()


def test_a_message_is_in_the_outbox_once_whatever_is_asked_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    for body in (1, 2):
        with store.writing() as connection:
            put_messages(connection, message(body=body), ("receiver",))
    with store.reading() as connection:
        assert connection.execute("SELECT key, body FROM outbox").fetchall() == [("k", b'{"n":1}')]
    store.close()


def test_another_body_takes_the_place_of_a_refused_one_and_the_same_body_does_not(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    with store.writing() as connection:
        put_messages(connection, message(body=1), ("receiver",))
        connection.execute("UPDATE outbox SET phase = 'done', status = 'refused'")
        put_messages(connection, message(body=1), ("receiver",))
        assert connection.execute("SELECT phase FROM outbox").fetchall() == [("done",)]
        put_messages(connection, message(body=2), ("receiver",))
        assert connection.execute("SELECT phase, body FROM outbox").fetchall() == [("deliver", b'{"n":2}')]
    store.close()


def test_old_finished_rows_are_pruned_and_open_ones_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    with store.writing() as connection:
        put_messages(connection, message("open"), ("receiver",))
        put_messages(connection, message("old"), ("receiver",))
        connection.execute("UPDATE outbox SET phase = 'done', finished = 5 WHERE key = 'old'")
    store.receive(Receipt("tw_1", "accepted", 3.0), 3.0)
    assert store.prune(before=50.0) == 1
    assert len(store.waiting_inputs()) == 1
    store.close()


def test_rows_are_listed_newest_first_and_filtered(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    for number, state in enumerate(("acting", "recovered", "acting")):
        commit = Commit()
        row = {"id": str(number), "run": "run", "state": state}
        commit.rows["incident", str(number)] = SavedRow("incident", str(number), row)
        store.commit(commit, {}, float(number))
    assert [row["id"] for row in store.rows("incident")] == ["2", "1", "0"]
    assert [row["id"] for row in store.rows("incident", state="acting")] == ["2", "0"]
    assert store.rows("incident", run="other") == []
    assert store.row("incident", "none") is None
    store.close()
