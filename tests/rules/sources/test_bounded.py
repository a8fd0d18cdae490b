"""HTTP with a budget: whatever the peer does, an exchange ends in time and within its bytes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real import need_program
from trainwarden.rules.sources.bounded import Unanswered, exchange, new_session

Talk = Callable[[socket.socket], None]


def serve(talk: Talk, context: ssl.SSLContext | None = None) -> str:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            with connection:
                connection.recv(65536)
                talk(connection)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"{'http' if context is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}/x"


def drip(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.send(bytes([byte]))
        time.sleep(0.03)


def slow_headers(connection: socket.socket) -> None:
    drip(connection, b"HTTP/1.1 200 OK\r\nX: " + b"a" * 500)


def slow_body(connection: socket.socket) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
    drip(connection, b"a" * 500)


def slow_chunks(connection: socket.socket) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    drip(connection, b"1\r\na\r\n" * 100)


def endless(connection: socket.socket) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.send(b"a" * 100_000)


def silence(connection: socket.socket) -> None:
    time.sleep(5)


def short(connection: socket.socket) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def garbage(connection: socket.socket) -> None:
    connection.send(b"\x00\xff" * 100 + b"\r\n\r\n")


def packed(connection: socket.socket) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc")


@pytest.mark.parametrize(
    ("talk", "fault"),
    [
        (slow_headers, "timeout"),
        (slow_body, "timeout"),
        (slow_chunks, "timeout"),
        (silence, "timeout"),
        (endless, "too_large"),
        (short, "reset"),
        (reset, "reset"),
        (garbage, "reset"),
        (packed, "encoding"),
    ],
)
def test_a_peer_that_misbehaves_costs_no_more_than_the_budget(talk: Talk, fault: str) -> None:
    began = time.monotonic()
    with pytest.raises(Unanswered) as caught:
        exchange(new_session(), "GET", serve(talk), total_timeout=0.5, limit=1_000_000)
    assert caught.value.fault == fault
    assert time.monotonic() - began < 2.0


def test_a_redirect_is_an_answer_and_is_not_followed_nor_read_without_a_limit() -> None:
    def talk(connection: socket.socket) -> None:
        connection.send(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n")
        while True:
            connection.send(b"a" * 100_000)

    with pytest.raises(Unanswered) as caught:
        exchange(new_session(), "GET", serve(talk), total_timeout=2.0, limit=1_000_000)
    assert caught.value.fault == "too_large"


def test_nobody_there_and_no_such_name_are_told_apart() -> None:
    for url, fault in (("http://127.0.0.1:1/", "refused"), ("http://no-such-host.invalid/", "name")):
        with pytest.raises(Unanswered) as caught:
            exchange(new_session(), "GET", url, total_timeout=5.0)
        assert caught.value.fault == fault


def test_proxies_and_netrc_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    heard: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        heard.append(connection.recv(65536))
        talk(connection)

    threading.Thread(target=answer, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    assert exchange(new_session(), "GET", url).body == b"ok"
    assert b"Authorization" not in heard[0]


def test_over_tls_the_certificate_is_checked_and_the_deadline_holds(tmp_path: Path) -> None:
    openssl = need_program("openssl")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    trusted = str(tmp_path / "cert.pem")

    def fine(connection: socket.socket) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    assert exchange(new_session(trusted), "GET", serve(fine, context)).body == b"ok"
    with pytest.raises(Unanswered) as caught:
        exchange(new_session(), "GET", serve(fine, context))
    assert caught.value.fault == "tls"
    for talk in (slow_headers, slow_body):
        began = time.monotonic()
        with pytest.raises(Unanswered) as caught:
            exchange(new_session(trusted), "GET", serve(talk, context), total_timeout=0.5)
        assert caught.value.fault == "timeout"
        assert time.monotonic() - began < 2.0
