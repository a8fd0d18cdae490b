"""The exporter's HTTP: GET and HEAD only, for ever. A small WSGI application and the threading server that runs it.

``/metrics``, ``/api/v1/run``, ``/api/v1/steps``, ``/-/healthy``, ``/-/ready``. ``/api`` needs the bearer token of the run's
folder. Nothing here runs on, or waits for, the training thread. A forked child (a DataLoader worker) closes the
listening socket and the connections it inherited, so that it never holds the port.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from .identity import Identity
from .sinks.journal import bounds, first_seq, read_after
from .sinks.ring import Ring

#: Lines of one answer: default and most.
DEFAULT_LIMIT, MAX_LIMIT = 1000, 10000
#: Seconds after which a silent connection is closed, and connections served at once.
IDLE_SECONDS, MAX_CONNECTIONS = 75.0, 64
#: Seconds between two looks whether to stop. Each takes the interpreter from the trainer; a connection is seen at once.
POLL_SECONDS = 0.5

Headers = list[tuple[str, str]]
Answer = tuple[str, Headers, bytes]
JSON: Headers = [("Content-Type", "application/json")]
TEXT: Headers = [("Content-Type", "text/plain; charset=utf-8")]


class Application:
    """The WSGI application of one exporter. ``folder`` finds an earlier start's journal by its id.

    ``metrics`` returns the page and its content type for an ``Accept`` header.
    """

    def __init__(
        self,
        identity: Identity,
        ring: Ring,
        metrics: Callable[[str], tuple[bytes, str]],
        token: str | None,
        start_line: Callable[[], bytes | None],
        folder: Callable[[str], Path | None],
        protect_metrics: bool = False,
    ) -> None:
        self._identity = identity
        self._ring = ring
        self._metrics = metrics
        self._token = token
        self._start_line = start_line
        self._folder = folder
        self._protect = protect_metrics
        self._readers: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[[str, Headers], Any]) -> Iterable[bytes]:
        """Answer one request (PEP 3333)."""
        status, headers, body = self._answer(environ)
        start_response(status, [*headers, ("Content-Length", str(len(body))), ("Cache-Control", "no-store")])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def _answer(self, environ: dict[str, Any]) -> Answer:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", [*TEXT, ("Allow", "GET, HEAD")], b"this server only answers GET and HEAD\n"
        path = environ.get("PATH_INFO", "/")
        if path.startswith("/api/") or self._protect:
            if self._token is None and path.startswith("/api/"):
                return _error("403 Forbidden", "the run's folder could not hold a token: /api is closed")
            if not self._authorised(environ.get("HTTP_AUTHORIZATION", "")):
                status, headers, body = _error(
                    "401 Unauthorized", "send the token of the run's folder as a bearer token"
                )
                return status, [*headers, ("WWW-Authenticate", 'Bearer realm="trainwarden"')], body
        if path == "/metrics":
            page, content_type = self._metrics(environ.get("HTTP_ACCEPT", ""))
            return "200 OK", [("Content-Type", content_type)], page
        if path == "/-/healthy":
            return "200 OK", TEXT, b"healthy\n"
        if path == "/-/ready":
            ready = self._start_line() is not None
            return ("200 OK", TEXT, b"ready\n") if ready else ("503 Service Unavailable", TEXT, b"no step yet\n")
        if path == "/api/v1/run":
            return self._run()
        if path == "/api/v1/steps":
            return self._steps(environ)
        if path == "/":
            return (
                "200 OK",
                TEXT,
                b"trainwarden exporter\n\n/metrics\n/api/v1/run\n/api/v1/steps\n/-/healthy\n/-/ready\n",
            )
        return _error("404 Not Found", f"there is no {path}")

    def _authorised(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), self._token.encode())

    def _run(self) -> Answer:
        line = self._start_line()
        if line is None:
            return _error(
                "503 Service Unavailable", "the run has not started yet: its start event comes with the first step"
            )
        return "200 OK", [*JSON, ("Trainwarden-Start", self._identity.start_id)], line + b"\n"

    def _steps(self, environ: dict[str, Any]) -> Answer:
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        current = self._identity.start_id
        start_id = query.get("start_id", [""])[-1] or current
        try:
            after = _whole(query, "after", 0)
            limit = min(_whole(query, "limit", DEFAULT_LIMIT), MAX_LIMIT)
        except ValueError as error:
            return _error("400 Bad Request", str(error))
        folder = self._folder(start_id)
        if start_id == current:
            lines = self._ring.after(after, limit)
            first, last = self._ring.first, self._ring.last
            if first > 1 and folder is not None:
                first = first_seq(folder) or first
            if lines is None:  # the ring no longer holds the next one: the journal does, unless it is broken
                lines = read_after(folder, after, limit) if folder is not None else []
                lines = lines or self._ring.after(self._ring.first - 1, limit) or []
            if environ["REQUEST_METHOD"] == "GET":
                self._read_by(environ, lines[-1][0] if lines else after)
        elif folder is not None:
            lines = read_after(folder, after, limit)
            first, last = bounds(folder)
        else:
            attempt = self._identity.attempt
            status, headers, body = _error("410 Gone", "no such start of this rank", start_id=current, attempt=attempt)
            return status, [*headers, ("Trainwarden-Start", current)], body
        headers = [
            ("Content-Type", "application/x-ndjson"),
            ("Trainwarden-Start", start_id),
            ("Trainwarden-Current-Start", current),
            ("Trainwarden-First-Seq", str(first)),
            ("Trainwarden-Last-Seq", str(last)),
        ]
        return "200 OK", headers, b"".join(line + b"\n" for _, line in lines)

    def _read_by(self, environ: dict[str, Any], seq: int) -> None:
        """Remember how far a reader is. Readers are told apart by address and what they call themselves."""
        name = f"{environ.get('REMOTE_ADDR', '')} {environ.get('HTTP_USER_AGENT', '')}"
        with self._lock:
            self._readers[name] = seq

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until every reader has polled the last line, at most ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                if all(seq >= self._ring.last for seq in self._readers.values()):
                    return
            time.sleep(0.02)


def _whole(query: dict[str, list[str]], name: str, default: int) -> int:
    text = query.get(name, [""])[-1]
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{name}: {text!r} is not a whole number")
    return int(text)


def _error(status: str, says: str, **more: Any) -> Answer:
    return status, JSON, msgspec.json.encode({"error": says, **more}) + b"\n"


class _Handler(BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 with kept-alive connections and hands each request to the application."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    server: Server

    def version_string(self) -> str:
        """Name the server in answers."""
        return "trainwarden"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the trainer's terminal quiet."""

    def handle_request(self) -> None:
        """Run the application for one request."""
        parts = urlsplit(self.path)
        environ = {
            "REQUEST_METHOD": self.command,
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REMOTE_ADDR": self.client_address[0],
            "SERVER_PROTOCOL": self.request_version,
            "HTTP_ACCEPT": self.headers.get("Accept", ""),
            "HTTP_AUTHORIZATION": self.headers.get("Authorization", ""),
            "HTTP_USER_AGENT": self.headers.get("User-Agent", ""),
            "wsgi.input": io.BytesIO(),
        }
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body is never read

        def start_response(status: str, headers: Headers) -> None:
            code, _, reason = status.partition(" ")
            self.send_response(int(code), reason)
            for name, value in headers:
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()

        for chunk in self.server.application(environ, start_response):
            self.wfile.write(chunk)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = handle_request


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves the application from daemon threads, a bounded number of connections at once.

    Raises:
        OSError: the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, application: Application) -> None:
        self.application = application
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__((host, port), _Handler)
        _servers.add(self)
        self._thread = threading.Thread(target=self._serve, name="trainwarden-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is bound."""
        port: int = self.server_address[1]
        return port

    def _serve(self) -> None:
        self.serve_forever(poll_interval=POLL_SECONDS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; one too many is closed at once."""
        with self._guard:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                self._open.add(request)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a client that went away alone."""

    def stop(self) -> None:
        """Stop to listen and close what is open."""
        _servers.discard(self)
        with contextlib.suppress(OSError):  # wakes the thread on Linux; elsewhere it looks by itself
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()
        with self._guard:
            connections = list(self._open)
        for connection in connections:
            self.shutdown_request(connection)

    def abandon(self) -> None:
        """In a forked child: close the sockets that belong to the parent, without a word to anybody."""
        for inherited in (self.socket, *tuple(self._open)):
            try:
                os.close(inherited.detach())
            except OSError:
                continue


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _in_child() -> None:
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_in_child)
