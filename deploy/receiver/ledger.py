"""The receiver's own ledger (SQLite, WAL, FULL): which requests were accepted, which refused, and what became of them.

The fence is a unique index: of all requests that would end an attempt, one row per (run_uid, attempt) can exist. What is in
here survives a kill -9 at any moment; nothing here touches a run.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from pathlib import Path
from typing import Literal

import msgspec

from trainwarden.plan import ENDING_ACTIONS

#: ``accepted``: to be carried out. The others are final.
Status = Literal["accepted", "executed", "refused", "expired", "failed"]

#: Rows older than this are forgotten, in seconds: long after the run could still send them again.
KEPT_SECONDS = 90 * 86400.0

#: Requests that end an attempt. The index keeps the condition that it was made with: with other actions it needs another name.
_ENDING = f"action IN ({', '.join(map(repr, ENDING_ACTIONS))})"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY,
    run_uid TEXT NOT NULL,
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    action TEXT NOT NULL,
    plan_id TEXT NOT NULL,
    folder TEXT NOT NULL,
    body BLOB NOT NULL,
    status TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    detail TEXT NOT NULL DEFAULT '',
    received REAL NOT NULL,
    updated REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS ending ON requests (run_uid, attempt) WHERE {_ENDING};
CREATE TABLE IF NOT EXISTS refusals (
    id TEXT NOT NULL,
    body_sha256 TEXT NOT NULL,
    plan_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    updated REAL NOT NULL,
    PRIMARY KEY (id, body_sha256)
) STRICT;
"""
#: Of databases of versions in which a probe ended nothing: their probes count for no fence, and none is carried out any more.
_OLDER = """
BEGIN IMMEDIATE;
UPDATE requests SET action = 'soft probe', status = CASE status WHEN 'accepted' THEN 'failed' ELSE status END
    WHERE action = 'probe';
DROP INDEX fence;
COMMIT;
"""
_COLUMNS = "id, run_uid, run, attempt, action, plan_id, folder, body, status, reason, detail, received, updated"


#: What every call can raise when the file cannot be read or written.
DatabaseError = sqlite3.Error


class FencedError(Exception):
    """Another request has won this attempt; the argument is its id."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted request. ``folder`` is the run's folder, ``body`` the envelope as it was signed; times are Unix seconds."""

    id: str
    run_uid: str
    run: str
    attempt: int
    action: str
    plan_id: str
    folder: str
    body: bytes
    status: Status
    reason: str = ""
    detail: str = ""
    received: float
    updated: float


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One refused body."""

    id: str
    plan_id: str
    reason: str
    detail: str
    updated: float


class Ledger:
    """The database. Safe for several threads; one process a file (see ``main``)."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, mode 0600.

        Raises:
            OSError: the folder does not exist or cannot be written.
            DatabaseError: the file is no database, or damaged.
        """
        path.touch(mode=0o600)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA busy_timeout = 5000")
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = 'fence'").fetchone():
            self._db.executescript(_OLDER)
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def accept(self, row: Row) -> None:
        """Write an accepted request; from the return on it survives a crash.

        Raises:
            FencedError: another request ends this attempt already.
            DatabaseError: it could not be written.
        """
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if row.action in ENDING_ACTIONS:
                    winner = self._db.execute(
                        f"SELECT id FROM requests WHERE run_uid = ? AND attempt = ? AND {_ENDING}",
                        (row.run_uid, row.attempt),
                    ).fetchone()
                    if winner is not None:
                        raise FencedError(winner[0])
                marks = ", ".join("?" * len(row.__struct_fields__))
                self._db.execute(f"INSERT INTO requests ({_COLUMNS}) VALUES ({marks})", msgspec.structs.astuple(row))
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def settle(self, request_id: str, status: Status, now: float, reason: str = "", detail: str = "") -> None:
        """Write the end of an accepted request."""
        with self._lock:
            self._db.execute(
                "UPDATE requests SET status = ?, reason = ?, detail = ?, updated = ? WHERE id = ?",
                (status, reason, detail, now, request_id),
            )

    def withdraw(self, request_id: str) -> None:
        """Forget an accepted request of which nothing was carried out, so that its fence is free."""
        with self._lock:
            self._db.execute("DELETE FROM requests WHERE id = ?", (request_id,))

    def refuse(self, request_id: str, body: bytes, plan_id: str, reason: str, detail: str, now: float) -> None:
        """Remember a refusal: it is final for this body. Refusals do not take the fence."""
        with self._lock:
            self._db.execute(
                "INSERT OR IGNORE INTO refusals VALUES (?, ?, ?, ?, ?, ?)",
                (request_id, hashlib.sha256(body).hexdigest(), plan_id, reason, detail, now),
            )

    def find(self, request_id: str) -> Row | None:
        """Return the accepted request of this id, whatever became of it."""
        found = self._rows("WHERE id = ?", request_id)
        return found[0] if found else None

    def winner(self, run_uid: str, attempt: int) -> str | None:
        """Return the id of the request that ends this attempt."""
        found = self._rows(f"WHERE run_uid = ? AND attempt = ? AND {_ENDING}", run_uid, attempt)
        return found[0].id if found else None

    def pending(self) -> list[Row]:
        """Return the requests to be carried out, oldest first."""
        return self._rows("WHERE status = 'accepted' ORDER BY received")

    def refusal(self, request_id: str, body: bytes | None = None) -> Refusal | None:
        """Return the refusal of this body, or the newest one of this id."""
        query = "SELECT id, plan_id, reason, detail, updated FROM refusals WHERE id = ?"
        values: list[str] = [request_id]
        if body is not None:
            query += " AND body_sha256 = ?"
            values.append(hashlib.sha256(body).hexdigest())
        with self._lock:
            found = self._db.execute(f"{query} ORDER BY updated DESC LIMIT 1", values).fetchone()
        if found is None:
            return None
        return Refusal(**dict(zip(Refusal.__struct_fields__, found, strict=True)))

    def forget(self, now: float) -> None:
        """Delete what is final and older than ninety days."""
        with self._lock:
            self._db.execute("DELETE FROM requests WHERE status != 'accepted' AND updated < ?", (now - KEPT_SECONDS,))
            self._db.execute("DELETE FROM refusals WHERE updated < ?", (now - KEPT_SECONDS,))

    def _rows(self, condition: str, *values: str | int) -> list[Row]:
        with self._lock:
            found = self._db.execute(f"SELECT {_COLUMNS} FROM requests {condition}", values).fetchall()
        return [Row(**dict(zip(Row.__struct_fields__, entry, strict=True))) for entry in found]
