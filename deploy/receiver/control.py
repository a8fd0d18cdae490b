"""The supervisor's socket ``RUN/supervisor.sock``: messages, the listening side and the asking side.

One line of JSON each way and connection. The socket has mode 0600 and both sides look at the other's user
(SO_PEERCRED): only the user who runs the supervisor, or root, may ask or answer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from .state import Phase

#: Longest message in bytes, and how long one side waits for the other, in seconds.
LONGEST = 65536
PATIENCE = 5.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """``look``; ``restart``: end ``attempt`` and start ``for_attempt``; ``stop``: end ``attempt`` and start nothing.

    Both are idempotent: asked again by the same ``request_id``, they change nothing.
    """

    op: Literal["look", "restart", "stop"]
    attempt: int = -1
    for_attempt: int = -1
    request_id: str = ""


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor says of the run. ``cannot`` is why it could not restart it, "" where it could.

    ``folder``: the trainer's working folder. ``next_attempt``: the number that the next start will carry. ``plan_id``: the plan that lay in the folder when ``attempt`` was chosen. ``request_id``: the request that is ending
    ``attempt``. ``error``: why its process could not be started.
    """

    run_uid: str
    attempt: int
    next_attempt: int
    phase: Phase
    folder: str
    plan_id: str | None = None
    request_id: str | None = None
    cannot: str = ""
    error: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a command; ``reason`` is "" or why it was not obeyed."""

    live: Live
    reason: Literal["", "stale", "busy", "stopping"] = ""


#: Clients served at once; one more is turned away.
MOST_CLIENTS = 16


class PeerError(OSError):
    """The other side of the socket is another user."""


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield an address of the socket in ``folder`` that fits into sun_path (108 bytes), however deep the folder lies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/supervisor.sock"
    finally:
        os.close(descriptor)


class Desk:
    """The supervisor's side: takes commands without ever blocking its loop.

    Register nothing yourself: call :meth:`serve` with the events of the selector given here.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector) -> None:
        """Bind the socket, replacing one that a dead supervisor left. Only for the holder of the supervisor's lock.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder = folder
        self._selector = selector
        self._listener = _listen(folder)
        self._clients: dict[socket.socket, tuple[float, bytearray]] = {}
        selector.register(self._listener, selectors.EVENT_READ, self)

    def serve(self, ready: socket.socket, answer: Callable[[Command], Answer]) -> None:
        """Take what one ready socket has: a new client, or a client's line."""
        if ready is self._listener:
            self._accept()
            return
        _, buffer = self._clients[ready]
        try:
            data = ready.recv(LONGEST)
            buffer += data
            if data and not buffer.endswith(b"\n") and len(buffer) <= LONGEST:
                return
            ready.send(msgspec.json.encode(answer(msgspec.json.decode(buffer, type=Command))) + b"\n")
        except (OSError, msgspec.DecodeError):
            pass  # the client is told by the closed connection
        self._drop(ready)

    def tidy(self) -> None:
        """Drop clients that have been silent for longer than a message takes."""
        for client, (since, _) in list(self._clients.items()):
            if time.monotonic() - since > PATIENCE:
                self._drop(client)

    def close(self) -> None:
        """Close everything and remove the socket file."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.unregister(self._listener)
        self._listener.close()
        (self._folder / "supervisor.sock").unlink(missing_ok=True)

    def _accept(self) -> None:
        self.tidy()
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it went away
        try:
            client.setblocking(False)
            check_peer(client)
            if len(self._clients) >= MOST_CLIENTS:
                raise ConnectionError("too many clients")
        except OSError:
            client.close()
            return
        self._clients[client] = (time.monotonic(), bytearray())
        self._selector.register(client, selectors.EVENT_READ, self)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        self._selector.unregister(client)
        client.close()


def _listen(folder: Path) -> socket.socket:
    (folder / "supervisor.sock").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(folder) as address:
            before = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(before)
        listener.listen(16)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def check_peer(connection: socket.socket) -> None:
    """Refuse a peer that is neither this user nor root.

    Raises:
        PeerError: it is another user.
    """
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid not in (os.geteuid(), 0):
        raise PeerError(f"the other side of the supervisor's socket is uid {uid}, not {os.geteuid()}")


def ask(folder: Path, command: Command) -> Answer:
    """Send one command to the supervisor of the run in ``folder`` and return its answer.

    Raises:
        OSError: nobody listens, the peer is another user, or no whole answer came within 5 s.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        with _address(folder) as address:
            connection.connect(address)
        check_peer(connection)
        connection.sendall(msgspec.json.encode(command) + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            chunk = connection.recv(LONGEST)
            if not chunk or len(data) > LONGEST:
                raise ConnectionError("the supervisor closed the connection without an answer")
            data += chunk
    try:
        return msgspec.json.decode(data, type=Answer)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"the supervisor's answer cannot be read: {error}") from None
