"""What operators may tell the daemon over its API: acknowledge, approve or dismiss an incident, have suspect samples forgotten.

A command needs the bearer token of ``act_token_file``; without that file in the configuration none is taken. It is made
durable before it is answered, and reaches the core on the one queue like everything else.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from trainwarden.rules.config import ConfigError, read_secret
from trainwarden.rules.core.inputs import Command
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.exclusions import STANDING
from trainwarden.rules.store import Store, StoreError

#: Largest body of a command, in bytes: a comment fits, a flood does not.
MOST_BYTES = 16 * 1024

Name = Literal["acknowledge", "approve", "dismiss"]
_Body = TypeVar("_Body")


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a command. ``plan_id`` names the plan that the author saw; approving needs it."""

    author: str
    comment: str = ""
    plan_id: str | None = None


class Forget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a command that lets go of suspect samples: all that ``which`` names, by ``id``, ``run`` or ``dataset``, or ``all``."""

    author: str
    which: dict[str, str]
    comment: str = ""


#: What ``which`` may name.
WHICH = ("id", "run", "dataset", "all")


class Refused(ValueError):
    """A command that is not taken; ``status`` is the HTTP status that says so."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


class Commands:
    """Takes commands for the core. ``clock`` gives Unix seconds."""

    def __init__(
        self, store: Store, inbox: Inbox, token_file: Path | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._token_file = token_file
        self._clock = clock

    def take(self, name: Name, incident: str, authorization: str, body: bytes) -> None:
        """Take one command; it shows in the incident's timeline once the core has it.

        Raises:
            Refused: 403 without a configured token, 401 with a wrong one, 404 for an unknown incident, 409 for a plan that is
                not the incident's, 413 and 400 for the body, 503 where it cannot be stored.
        """
        self._admit(authorization)
        order = _order(name, body)
        row = self._store.row("incident", incident)
        if row is None:
            raise Refused(404, f"no incident {incident[:64]}")
        if name == "approve":
            now = (row.get("plan") or {}).get("plan_id")
            if now is None or order.plan_id != now:
                raise Refused(409, f"the plan is {now}, not {order.plan_id}: look at the incident again")
        command = Command(
            name=name,
            author=order.author,
            time=self._clock(),
            incident=incident,
            plan_id=order.plan_id,
            comment=order.comment,
        )
        self._pass_on(command)

    def forget(self, authorization: str, body: bytes) -> int:
        """Take the command to forget suspect samples, and return how many of those that stand are meant.

        Raises:
            Refused: as :meth:`take`; 404 where none is meant.
        """
        self._admit(authorization)
        asked = _decoded(body, Forget)
        if not asked.author.strip():
            raise Refused(400, "body: author: say who you are")
        if not asked.which or not set(asked.which) <= set(WHICH):
            raise Refused(400, f"body: which: say which, by {', '.join(WHICH)}")
        meant = [
            row
            for row in self.suspects()
            if all(row.get(name) == asked.which[name] for name in asked.which if name != "all")
        ]
        if not meant:
            raise Refused(404, f"no suspect samples with {', '.join(f'{n} {v}' for n, v in asked.which.items())}"[:200])
        self._pass_on(
            Command(name="forget", author=asked.author, time=self._clock(), comment=asked.comment, matchers=asked.which)
        )
        return len(meant)

    def suspects(self) -> list[dict[str, Any]]:
        """Return the rows of the samples that are still suspect."""
        return [row for state in STANDING for row in self._store.rows("suspect", None, state)]

    def _pass_on(self, command: Command) -> None:
        try:
            identity = self._store.receive(command, command.time)
        except StoreError as error:
            raise Refused(503, str(error)) from None
        self._inbox.put(Received(identity, command))

    def _admit(self, authorization: str) -> None:
        if self._token_file is None:
            raise Refused(403, "no commands are taken: configure act_token_file")
        try:
            token = read_secret(self._token_file)
        except ConfigError as error:
            raise Refused(403, f"no commands are taken: {error}") from None
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise Refused(401, "the token is missing or wrong")


def _decoded(body: bytes, kind: type[_Body]) -> _Body:
    if len(body) > MOST_BYTES:
        raise Refused(413, f"the body is larger than {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"body: {error}") from None


def _order(name: Name, body: bytes) -> Order:
    order = _decoded(body, Order)
    if not order.author.strip():
        raise Refused(400, "body: author: say who you are")
    if name == "approve" and not order.plan_id:
        raise Refused(400, "body: plan_id: name the plan that you approve")
    return order
