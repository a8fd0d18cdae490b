"""Case E02: a receiver that is slow, down and up again, two daemons, two hundred tries: one rollback, and one key on every request."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cases.registry import case
from tests.real import serve, wait_until
from tests.receiver.requested import Receiving, id_of
from tests.receiver.supervised import TOY, Supervised
from tests.rules.daemon.toy import reply
from trainwarden.rules.core.effects import Deliver
from trainwarden.rules.core.inputs import Receipt
from trainwarden.rules.daemon import delivery
from trainwarden.rules.daemon.delivery import Delivery
from trainwarden.rules.daemon.inbox import Inbox
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.notifiers.webhook import WebhookNotifier
from trainwarden.rules.outbox import Outbox
from trainwarden.rules.store import Store, put_messages
from trainwarden.webhook import Envelope

#: Seconds that a daemon waits for an answer here; the case has ten, and a receiver that takes thirty.
PATIENCE = 0.4


class Misbehaving:
    """Stands before a real receiver. Of the first ``faults`` requests none is answered well, though every third reaches it."""

    def __init__(self, receiver: str, faults: int) -> None:
        self.keys: list[str] = []
        self.bodies: set[bytes] = set()
        self.answers: Counter[int] = Counter()
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    number = len(outer.keys)
                    outer.keys.append(self.headers["webhook-id"])
                    outer.bodies.add(body)
                self.close_connection = True
                if number >= faults:
                    return reply(self, *outer.ask(self.path, self.headers, body))
                kind = number % 6
                if kind in (0, 3):  # it is carried out, and the answer never arrives in time
                    outer.ask(self.path, self.headers, body)
                    if number < 6:
                        time.sleep(2 * PATIENCE)
                        return reply(self, 200)
                    return None
                return reply(self, 500 if kind != 5 else 503)

            def do_GET(self) -> None:
                reply(self, *outer.ask(self.path, self.headers, None))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.receiver = receiver
        self.server = serve(Handler)

    def ask(self, path: str, headers: Any, body: bytes | None) -> tuple[int, bytes]:
        """Hand a request to the receiver and return its answer."""
        given = {
            name: value for name, value in headers.items() if name.lower().startswith(("webhook-", "content-type"))
        }
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{self.receiver}{path}", body, given), timeout=20
            ) as answer:
                found = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            found = error.code, error.read()
        if body is not None:
            self.answers[found[0]] += 1
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/webhook"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Daemon:
    """The delivering part of a daemon: its store outlives it."""

    def __init__(self, store: Path, url: str, secret: Path) -> None:
        self.store = Store(store)
        notifiers = {"receiver": WebhookNotifier(url, secret, timeout=PATIENCE)}
        self.delivery = Delivery(Outbox(self.store), Inbox(1000), notifiers, Metrics(), threads=1)
        self.delivery.start()

    def request(self, envelope: Envelope) -> None:
        """Write the request as the core's transaction does, before anything is sent."""
        data = envelope.data
        message = Deliver(
            kind="webhook",
            key=id_of(envelope),
            run=data.run,
            run_uid=data.run_uid,
            incident=data.incident,
            body=msgspec.to_builtins(envelope),
            created=time.time(),
            expires_at=time.time() + 600,
        )
        with self.store.writing() as connection:
            put_messages(connection, message, ("receiver",))
        self.delivery.wake()

    def statuses(self) -> list[str]:
        return [value.status for _, value in self.store.waiting_inputs() if isinstance(value, Receipt)]

    def stop(self) -> None:
        self.delivery.stop()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[tuple[Supervised, Receiving]]:
    """Attempt 0 of a supervised toy, a checkpoint, and a real receiver beside it."""
    supervised = Supervised(tmp_path / "runs")
    supervised.run.path.parent.mkdir()
    receiving = Receiving(supervised.run.path.parent)
    supervised.write_toy(TOY)
    supervised.start()
    receiving.checkpoint()
    receiving.start()
    supervised.wait_for("ready 0")
    yield supervised, receiving
    receiving.end()
    supervised.end()


@case("E02")
def test_e02_two_hundred_tries_of_two_daemons_are_one_rollback_and_every_request_has_the_same_key(
    bench: tuple[Supervised, Receiving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised, receiving = bench
    monkeypatch.setattr(delivery, "FIRST_WAIT", 0.005)
    monkeypatch.setattr(delivery, "LONGEST_WAIT", 0.02)
    monkeypatch.setattr(delivery, "FOLLOW_WAIT", 0.05)
    between = Misbehaving(receiving.url, faults=200)
    first = Daemon(tmp_path / "first.db", between.url, receiving.secret_file)
    second = Daemon(tmp_path / "second.db", between.url, receiving.secret_file)
    try:
        # They watch the same run and opened on different rules, a few steps apart: the plans say it differently, the effect is one.
        first.request(receiving.envelope(supervised.run, reasons={"target": "seen by one rule"}))
        wait_until(lambda: len(between.keys) >= 20, 30)
        second.request(receiving.envelope(supervised.run, plan_id="p2", reasons={"target": "seen by another"}))
        wait_until(lambda: len(between.keys) >= 100, 60)
        first.stop()  # and one of them is restarted in the middle of its tries
        first = Daemon(tmp_path / "first.db", between.url, receiving.secret_file)
        wait_until(lambda: first.statuses()[-1:] == ["executed"], 60)
        wait_until(lambda: second.statuses()[-1:] in (["executed"], ["refused"], ["duplicate"]), 60)
        supervised.wait_for("ready 1")
        time.sleep(1.0)
    finally:
        first.stop()
        second.stop()
        between.close()
    assert len(between.keys) > 200
    assert set(between.keys) == {id_of(receiving.envelope(supervised.run))}
    assert 1 <= len(between.bodies) <= 2
    assert between.answers[202] == 1  # accepted once, whatever was asked how often
    assert len([line for line in supervised.lines() if line.startswith("start ")]) == 2
    assert "TWIN" not in supervised.lines()
    ledger = supervised.run.ledger()
    assert ledger is not None
    assert len(ledger.entries) == 1
    assert receiving.status(receiving.envelope(supervised.run))["status"] == "executed"
