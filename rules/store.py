"""The daemon's one SQLite database: cursors, state snapshot, incidents, notices, outbox and input journal.

One transaction (:meth:`Store.commit`) holds everything that must agree: how far each stream was read, the core's state
at exactly that point, the incidents and notices it saved and the messages it wants delivered. It is taken every few
seconds and before any message is delivered. The state is kept by run: a run's part and its cursors are always of one
transaction, while another run's may be older. So a daemon that dies at any moment goes on from its last transaction,
reads the same records again and reaches the same decisions; what it had put into the outbox is there once.

What is no record (a command, a receipt, an observation, a gate that a poll changed) can't be read again. It goes into
the input journal: durable before it is applied, marked in the transaction that applied it, together with how far the
streams had been read by then, so that an incident can be replayed to the letter.

The database is written by one process (a lock file says which) and must lie on a local disk.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trainwarden.record import encode_numbers
from trainwarden.rules.core.effects import Deliver
from trainwarden.rules.core.inputs import Command, Observation, Receipt, SourceSeen, Start

SCHEMA_VERSION = 2

_TABLES = """
CREATE TABLE cursors (
    start_id TEXT NOT NULL, rank INTEGER NOT NULL, run_uid TEXT NOT NULL, run TEXT NOT NULL, attempt INTEGER NOT NULL,
    seq INTEGER NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (start_id, rank)) WITHOUT ROWID;
CREATE TABLE snapshot (part TEXT PRIMARY KEY, taken REAL NOT NULL, state BLOB NOT NULL);
CREATE TABLE rows (
    kind TEXT NOT NULL, key TEXT NOT NULL, run TEXT, state TEXT, updated REAL NOT NULL, turn INTEGER NOT NULL,
    row BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE INDEX rows_by_turn ON rows (kind, turn);
CREATE TABLE inputs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, received REAL NOT NULL, input BLOB NOT NULL, after BLOB);
CREATE INDEX inputs_waiting ON inputs (id) WHERE after IS NULL;
CREATE TABLE outbox (
    key TEXT NOT NULL, destination TEXT NOT NULL, kind TEXT NOT NULL, run TEXT NOT NULL, run_uid TEXT NOT NULL,
    incident TEXT NOT NULL, body BLOB NOT NULL, created REAL NOT NULL, expires_at REAL,
    phase TEXT NOT NULL, claimed REAL, next_at REAL NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '', finished REAL,
    PRIMARY KEY (key, destination)) WITHOUT ROWID;
CREATE INDEX outbox_due ON outbox (next_at) WHERE phase != 'done';
"""

_APPLIED = "SELECT input, after FROM inputs WHERE after IS NOT NULL ORDER BY id"

#: What the input journal holds.
Journalled = Command | Receipt | Observation | SourceSeen

_encode = msgspec.msgpack.Encoder().encode
_decode_input = msgspec.msgpack.Decoder(Journalled).decode


class StoreError(RuntimeError):
    """A database that cannot be used. The message names the file and says what to do."""


class Cursor(msgspec.Struct, frozen=True):
    """How far one stream was read: the last ``seq`` of one rank of one start. ``turn`` orders starts by first reading."""

    start: Start
    rank: int
    seq: int
    turn: int = 0


class SavedRow(msgspec.Struct, frozen=True):
    """An incident or a notice as the core saved it, with what the API filters by."""

    kind: str
    key: str
    row: dict[str, Any]


class Commit(msgspec.Struct):
    """What one transaction holds; built up by the core thread between two of them."""

    cursors: dict[tuple[str, int], Cursor] = msgspec.field(default_factory=dict)
    rows: dict[tuple[str, str], SavedRow] = msgspec.field(default_factory=dict)
    messages: list[tuple[Deliver, tuple[str, ...]]] = msgspec.field(default_factory=list)
    #: Journalled inputs that were applied: id, or None for one that is journalled only now; and the streams' advance.
    applied: list[tuple[int | None, Journalled, dict[str, int]]] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.cursors or self.rows or self.messages or self.applied)


class Store:
    """The open database. Any thread may call any method; writes take turns.

    Raises:
        StoreError: another process holds it, it is of another version, or SQLite cannot open it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._holder = _hold(path)
        try:
            self._writer = _connect(path)
            self._open()
            self._reader = _connect(path)
            self._reader.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            os.close(self._holder)
            raise StoreError(f"{path}: {error}; is it a trainwarden database on a local disk?") from None
        except StoreError:
            os.close(self._holder)
            raise

    def _open(self) -> None:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with self.writing() as connection:
                for statement in _TABLES.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: schema {version}, this version reads {SCHEMA_VERSION}; move it away to begin anew"
            )

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One write transaction: committed whole at the end of the block, or not at all.

        Raises:
            StoreError: SQLite cannot write (a full disk, a read-only file).
        """
        with self._lock:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise StoreError(f"{self.path}: {error}") from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the error that led here says more

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees the last committed transaction and cannot write.

        Raises:
            StoreError: SQLite cannot read.
        """
        with self._read_lock:
            try:
                yield self._reader
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error

    def close(self) -> None:
        """Close the database and let another process have it."""
        with self._lock, self._read_lock:
            self._reader.close()
            self._writer.close()
            os.close(self._holder)

    # What the core thread needs

    def commit(self, commit: Commit, parts: Mapping[str, bytes], now: float) -> None:
        """Write one transaction. ``parts`` of the core's state replace those of their names. A message whose key is in the outbox already stays as it is there."""
        with self.writing() as connection:
            for cursor in commit.cursors.values():
                start = cursor.start
                connection.execute(
                    "INSERT INTO cursors VALUES (?, ?, ?, ?, ?, ?, (SELECT 1 + coalesce(max(turn), 0) FROM cursors))"
                    " ON CONFLICT (start_id, rank) DO UPDATE SET seq = excluded.seq",
                    (start.start_id, cursor.rank, start.run_uid, start.run, start.attempt, cursor.seq),
                )
            connection.executemany(
                "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?)", [(name, now, part) for name, part in parts.items()]
            )
            for saved in commit.rows.values():
                row = saved.row
                connection.execute(
                    "INSERT INTO rows VALUES (?, ?, ?, ?, ?, (SELECT 1 + coalesce(max(turn), 0) FROM rows"
                    " WHERE kind = ?1), ?) ON CONFLICT (kind, key) DO UPDATE SET run = excluded.run,"
                    " state = excluded.state, updated = excluded.updated, row = excluded.row",
                    (
                        saved.kind,
                        saved.key,
                        row.get("run"),
                        row.get("state"),
                        now,
                        msgspec.json.encode(encode_numbers(row)),
                    ),
                )
            for message, destinations in commit.messages:
                put_messages(connection, message, destinations)
            for identity, value, after in commit.applied:
                advance = msgspec.json.encode(after)
                if identity is None:
                    connection.execute(
                        "INSERT INTO inputs (received, input, after) VALUES (?, ?, ?)", (now, _encode(value), advance)
                    )
                else:
                    connection.execute("UPDATE inputs SET after = ? WHERE id = ?", (advance, identity))

    def snapshot(self) -> dict[str, bytes]:
        """Return the parts of the core's state as they were last written; none for a new database."""
        with self.reading() as connection:
            return dict(connection.execute("SELECT part, state FROM snapshot").fetchall())

    def cursors(self) -> list[Cursor]:
        """Return how far each stream was read, in the order in which the streams were first met."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT run_uid, run, attempt, start_id, rank, seq, turn FROM cursors ORDER BY turn"
            ).fetchall()
        return [
            Cursor(Start(uid, run, attempt, start), rank, seq, turn)
            for uid, run, attempt, start, rank, seq, turn in rows
        ]

    # The input journal

    def receive(self, value: Journalled, now: float) -> int:
        """Make an input durable before anything is done with it, and return its id."""
        with self.writing() as connection:
            return put_input(connection, value, now)

    def waiting_inputs(self) -> list[tuple[int, Journalled]]:
        """Return the inputs that were received and are in no snapshot yet, oldest first."""
        with self.reading() as connection:
            rows = connection.execute("SELECT id, input FROM inputs WHERE after IS NULL ORDER BY id").fetchall()
        return [(identity, _decode_input(value)) for identity, value in rows]

    def applied_inputs(self) -> list[tuple[Journalled, dict[str, int]]]:
        """Return the journalled inputs in the order of their application.

        Each comes with the streams' advance since the one before: ``"start_id/rank" -> seq``.
        """
        with self.reading() as connection:
            rows = connection.execute(_APPLIED).fetchall()
        return [(_decode_input(value), msgspec.json.decode(after)) for value, after in rows]

    # What people read

    def rows(
        self, kind: str, run: str | None = None, state: str | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Return saved incidents or notices, newest first."""
        where, arguments = ["kind = ?"], [kind]
        for name, value in (("run", run), ("state", state)):
            if value is not None:
                where.append(f"{name} = ?")
                arguments.append(value)
        with self.reading() as connection:
            found = connection.execute(
                f"SELECT row FROM rows WHERE {' AND '.join(where)} ORDER BY turn DESC LIMIT ?", (*arguments, limit)
            ).fetchall()
        return [msgspec.json.decode(row) for (row,) in found]

    def row(self, kind: str, key: str) -> dict[str, Any] | None:
        """Return one saved incident or notice."""
        with self.reading() as connection:
            found = connection.execute("SELECT row FROM rows WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return None if found is None else msgspec.json.decode(found[0])

    def counts(self) -> dict[str, int]:
        """Return how many incidents there are in each state."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT state, count(*) FROM rows WHERE kind = 'incident' GROUP BY state"
            ).fetchall()
        return {str(state): count for state, count in rows}

    def prune(self, before: float) -> int:
        """Forget finished messages and applied inputs older than ``before``, and return how many."""
        with self.writing() as connection:
            outbox = connection.execute("DELETE FROM outbox WHERE phase = 'done' AND finished < ?", (before,)).rowcount
            inputs = connection.execute(
                "DELETE FROM inputs WHERE after IS NOT NULL AND received < ?", (before,)
            ).rowcount
        return outbox + inputs


def inputs_in(path: Path) -> list[tuple[Journalled, dict[str, int]]]:
    """Return what :meth:`Store.applied_inputs` does, of a database that a daemon may have open, or of a copy. Nothing is written.

    Raises:
        StoreError: it is no database of a daemon, or of another version.
    """
    if not path.is_file():
        raise StoreError(f"{path}: no such file; it is what `state:` names in the daemon's configuration")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise StoreError(f"{path}: schema {version}, this version reads {SCHEMA_VERSION}")
            rows = connection.execute(_APPLIED).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}; is it a trainwarden database?") from None
    try:
        return [(_decode_input(value), msgspec.json.decode(after)) for value, after in rows]
    except (msgspec.DecodeError, TypeError) as error:
        raise StoreError(f"{path}: what it remembers of people and the receiver is damaged: {error}") from None


def put_messages(connection: sqlite3.Connection, message: Deliver, destinations: Iterable[str]) -> None:
    """Put a message into the outbox, once per destination; part of the caller's transaction.

    A key that is there already stays as it is, with one exception: a receiver's refusal is final for that body only, so
    another body under a refused key takes its place.
    """
    body = msgspec.json.encode(encode_numbers(message.body))
    for destination in destinations:
        connection.execute(
            "INSERT INTO outbox (key, destination, kind, run, run_uid, incident, body, created, expires_at, phase,"
            " next_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'deliver', ?) ON CONFLICT (key, destination) DO UPDATE SET"
            " body = excluded.body, created = excluded.created, expires_at = excluded.expires_at, phase = 'deliver',"
            " next_at = excluded.next_at, incident = excluded.incident, attempts = 0, status = '', error = '',"
            " finished = NULL WHERE phase = 'done' AND status = 'refused' AND body != excluded.body",
            (
                message.key,
                destination,
                message.kind,
                message.run,
                message.run_uid,
                message.incident,
                body,
                message.created,
                message.expires_at,
                message.created,
            ),
        )


def put_input(connection: sqlite3.Connection, value: Journalled, now: float) -> int:
    """Journal an input that is still to be applied; part of the caller's transaction."""
    identity = connection.execute("INSERT INTO inputs (received, input) VALUES (?, ?)", (now, _encode(value))).lastrowid
    assert identity is not None
    return identity


def advance_of(cursors: Mapping[tuple[str, int], Cursor], since: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Return the streams that were read further than ``since`` says, as ``"start_id/rank" -> seq``."""
    return {
        f"{start_id}/{rank}": cursor.seq
        for (start_id, rank), cursor in cursors.items()
        if cursor.seq != since.get((start_id, rank))
    }


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 10000", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _hold(path: Path) -> int:
    """Take the lock file beside the database; the kernel gives it back when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StoreError(
            f"{path}: another daemon{f' (process {owner})' if owner else ''} is using it; stop that one, or give this"
            " one a database of its own (state: in the configuration)"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
