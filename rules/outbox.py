"""The outbox: messages that wait for delivery, and who may deliver them next.

1. The core's transaction puts a message in, once per destination (``store.commit``).
2. A delivery thread claims a due row by a conditional UPDATE; the row count tells who won.
3. It delivers, then settles the row: done, to be followed (the receiver said yes, how it ended is still to be read),
   or due again later. A webhook's answer is journalled as a Receipt in the same transaction.
4. A process that dies between 2 and 3 leaves a claimed row; the next one releases it and delivers again under the
   same key. So a message is delivered at least once, and its key lets the receiver act at most once.

Nothing here sends anything.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from trainwarden.rules.core.inputs import Receipt
from trainwarden.rules.store import Store, put_input

Phase: TypeAlias = Literal["deliver", "follow", "done"]

#: Seconds after which a claim counts as lost (a thread that hangs beyond every timeout of its own).
CLAIM_SECONDS = 300.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One message on its way to one destination. ``body`` is the JSON that is sent, ``attempts`` how often it was."""

    key: str
    destination: str
    kind: str
    run: str
    run_uid: str
    incident: str
    body: bytes
    created: float
    expires_at: float | None
    phase: Phase
    attempts: int
    status: str


_COLUMNS = ", ".join(field.name for field in msgspec.structs.fields(Row))


class Outbox:
    """The delivery side of the store's outbox table."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def release(self) -> int:
        """Release every claim. Only right at the start of the one process that holds the store."""
        with self._store.writing() as connection:
            return connection.execute("UPDATE outbox SET claimed = NULL WHERE claimed IS NOT NULL").rowcount

    def claim(self, now: float) -> Row | None:
        """Claim the row that is due longest, or return None."""
        with self._store.reading() as connection:
            due = connection.execute(
                f"SELECT {_COLUMNS} FROM outbox WHERE phase != 'done' AND next_at <= ? AND (claimed IS NULL OR claimed < ?)"
                " ORDER BY next_at LIMIT 8",
                (now, now - CLAIM_SECONDS),
            ).fetchall()
        for values in due:
            row = Row(**dict(zip(Row.__struct_fields__, values, strict=True)))
            with self._store.writing() as connection:
                won = connection.execute(
                    "UPDATE outbox SET claimed = ? WHERE key = ? AND destination = ? AND phase = ? AND attempts = ?"
                    " AND (claimed IS NULL OR claimed < ?)",
                    (now, row.key, row.destination, row.phase, row.attempts, now - CLAIM_SECONDS),
                ).rowcount
            if won == 1:
                return row
        return None

    def next_due(self) -> float | None:
        """Return when the next row is due, or None while nothing waits."""
        with self._store.reading() as connection:
            (when,) = connection.execute(
                "SELECT min(next_at) FROM outbox WHERE phase != 'done' AND claimed IS NULL"
            ).fetchone()
        return None if when is None else float(when)

    def settle(
        self,
        row: Row,
        now: float,
        *,
        phase: Phase,
        next_at: float | None = None,
        status: str = "",
        error: str = "",
        receipt: Receipt | None = None,
    ) -> int | None:
        """Record what came of a claimed row, give up the claim, and return the id of the journalled receipt."""
        with self._store.writing() as connection:
            connection.execute(
                "UPDATE outbox SET phase = ?, claimed = NULL, next_at = ?, attempts = attempts + 1, status = ?,"
                " error = ?, finished = ? WHERE key = ? AND destination = ?",
                (
                    phase,
                    now if next_at is None else next_at,
                    status or row.status,
                    error,
                    now if phase == "done" else None,
                    row.key,
                    row.destination,
                ),
            )
            return None if receipt is None else put_input(connection, receipt, now)

    def counts(self) -> dict[str, int]:
        """Return how many rows there are in each phase."""
        with self._store.reading() as connection:
            return dict(connection.execute("SELECT phase, count(*) FROM outbox GROUP BY phase").fetchall())

    def oldest_pending(self) -> float | None:
        """Return when the oldest message that was not delivered yet was made."""
        with self._store.reading() as connection:
            (when,) = connection.execute("SELECT min(created) FROM outbox WHERE phase = 'deliver'").fetchone()
        return None if when is None else float(when)

    def rows(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Return rows for people, newest first, without their bodies."""
        with self._store.reading() as connection:
            names = ("key", "destination", "kind", "run", "incident", "phase", "status", "error", "attempts", "created")
            found = connection.execute(
                f"SELECT {', '.join(names)} FROM outbox ORDER BY created DESC LIMIT ?", (limit,)
            ).fetchall()
        return [dict(zip(names, values, strict=True)) for values in found]
