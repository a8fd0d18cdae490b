"""Delivery against a receiver that misbehaves: how each answer is read, retried, and reported to the core."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest

from tests.real import wait_until
from tests.rules.daemon import toy
from tests.rules.daemon.toy import ToyReceiver, reply
from trainwarden.rules.core.inputs import Receipt
from trainwarden.rules.daemon import delivery
from trainwarden.rules.daemon.delivery import Delivery, back_off
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.notifiers.log import LogNotifier
from trainwarden.rules.notifiers.webhook import WebhookNotifier
from trainwarden.rules.outbox import Outbox
from trainwarden.rules.store import Store, put_messages


class Bench:
    def __init__(self, folder: Path, url: str) -> None:
        self.store = Store(folder / "x.db")
        self.inbox = Inbox(100)
        self.metrics = Metrics()
        self.outbox = Outbox(self.store)
        notifiers = {"log": LogNotifier(), "receiver": WebhookNotifier(url, folder / "secret", timeout=0.5)}
        self.delivery = Delivery(self.outbox, self.inbox, notifiers, self.metrics)
        self.delivery.start()

    def send(self, expires_in: float = 60.0, key: str = "tw_1") -> None:
        message = toy.Deliver("webhook", key, "run", "uid", "i", {"type": "x"}, time.time(), time.time() + expires_in)
        with self.store.writing() as connection:
            put_messages(connection, message, ("receiver",))
        self.delivery.wake()

    def receipts(self) -> list[Receipt]:
        return [value for _, value in self.store.waiting_inputs() if isinstance(value, Receipt)]

    def statuses(self) -> list[str]:
        return [receipt.status for receipt in self.receipts()]

    def failed(self, reason: str) -> float:
        found = self.metrics.registry.get_sample_value(
            "trainwarden_notifications_failed_total", {"integration": "webhook", "reason": reason}
        )
        return found or 0.0


@pytest.fixture
def bench(folder: Path, receiver: ToyReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(delivery, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(delivery, "FOLLOW_WAIT", 0.05)
    bench = Bench(folder, receiver.url)
    yield bench
    bench.delivery.stop()
    bench.store.close()


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True


def slow(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    try:
        handler.wfile.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(20):
            handler.wfile.write(b" ")
            time.sleep(0.1)
    except OSError:
        pass


FAULTS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "connect": reset,
    "timeout": slow,
    "server_error": lambda handler: reply(handler, 500),
    "rate_limited": lambda handler: reply(handler, 429, b"", {"Retry-After": "0"}),
    "auth": lambda handler: reply(handler, 401),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_passing_fault_is_retried_under_the_same_id_until_it_passes(
    reason: str, bench: Bench, receiver: ToyReceiver
) -> None:
    def fault(handler: BaseHTTPRequestHandler) -> bool:
        if len(receiver.deliveries) <= 2:
            FAULTS[reason](handler)
            return True
        return False

    receiver.fault = fault
    bench.send()
    wait_until(lambda: bench.statuses() == ["accepted", "executed"])
    assert receiver.deliveries == ["tw_1"] * 3
    assert receiver.effects == ["tw_1"]
    assert bench.failed(reason) == 2


def test_retry_after_is_honoured(bench: Bench, receiver: ToyReceiver) -> None:
    times: list[float] = []

    def busy(handler: BaseHTTPRequestHandler) -> bool:
        times.append(time.monotonic())
        if len(times) == 1:
            reply(handler, 503, b"", {"Retry-After": "1"})
        return len(times) == 1

    receiver.fault = busy
    bench.send()
    wait_until(lambda: len(times) == 2)
    assert times[1] - times[0] >= 1.0


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            409,
            {"status": "refused", "reason": "stale", "detail": "attempt 1 runs"},
            ("refused", "stale", "attempt 1 runs"),
        ),
        (409, {}, ("refused", "", "")),
        (302, {}, ("undeliverable", "redirect", "the receiver answers 302, a redirect, which is not followed")),
        (413, {"reason": "too large"}, ("undeliverable", "client_error", "the receiver answers 413: too large")),
        (410, {}, ("undeliverable", "gone", "the receiver answers 410")),
    ],
)
def test_a_final_no_is_a_receipt_and_is_not_retried(
    status: int, body: dict[str, str], expected: tuple[str, str, str], bench: Bench, receiver: ToyReceiver
) -> None:
    receiver.fault = lambda handler: reply(handler, status, msgspec.json.encode(body), {"Location": "/x"}) is None
    bench.send()
    wait_until(lambda: bench.receipts())
    time.sleep(0.3)
    assert len(receiver.deliveries) == 1
    (receipt,) = bench.receipts()
    assert (receipt.request_id, receipt.status, receipt.reason, receipt.detail) == ("tw_1", *expected)
    queued = bench.inbox.take(0.1)
    assert isinstance(queued, Received)
    assert queued.value == receipt


def test_after_a_410_nothing_more_is_sent_there(bench: Bench, receiver: ToyReceiver) -> None:
    receiver.fault = lambda handler: reply(handler, 410) is None
    bench.send()
    wait_until(lambda: bench.statuses() == ["undeliverable"])
    receiver.fault = None
    bench.send(key="tw_2")
    wait_until(lambda: bench.statuses() == ["undeliverable"] * 2)
    assert len(receiver.deliveries) == 1


def test_a_message_that_could_not_be_delivered_in_time_expires(bench: Bench, receiver: ToyReceiver) -> None:
    receiver.fault = lambda handler: reply(handler, 500) is None
    bench.send(expires_in=0.4)
    wait_until(lambda: bench.statuses() == ["expired"])
    tries = len(receiver.deliveries)
    time.sleep(0.3)
    assert len(receiver.deliveries) == tries
    assert bench.receipts()[0].reason == "not_delivered"


@pytest.mark.parametrize("end", ["executed", "failed", "expired", "refused"])
def test_the_end_of_an_accepted_request_is_read_from_the_receiver(
    end: str, bench: Bench, receiver: ToyReceiver
) -> None:
    receiver.status = "accepted"
    bench.send()
    wait_until(lambda: bench.statuses() == ["accepted"])
    time.sleep(0.2)
    assert bench.statuses() == ["accepted"], "the same word is no news"
    receiver.status = end
    wait_until(lambda: bench.statuses() == ["accepted", end])


def test_a_duplicate_is_followed_to_its_end_too(bench: Bench, receiver: ToyReceiver) -> None:
    receiver.effects.append("tw_1")
    bench.send()
    wait_until(lambda: bench.statuses() == ["duplicate", "executed"])


def test_without_a_receiver_a_request_is_undeliverable(folder: Path) -> None:
    store = Store(folder / "x.db")
    bench = Delivery(Outbox(store), Inbox(10), {"log": LogNotifier()}, Metrics())
    bench.start()
    message = toy.Deliver("webhook", "tw_1", "run", "uid", "i", {}, time.time())
    with store.writing() as connection:
        put_messages(connection, message, bench.destinations(message))
    bench.wake()
    wait_until(lambda: store.waiting_inputs())
    ((_, receipt),) = store.waiting_inputs()
    assert isinstance(receipt, Receipt)
    assert (receipt.status, receipt.reason) == ("undeliverable", "no_receiver")
    bench.stop()
    store.close()


def test_the_back_off_grows_to_a_limit_and_never_undercuts_what_was_asked() -> None:
    waits = [back_off(attempts, None, 0.5) for attempts in range(8)]
    assert waits == sorted(waits)
    assert waits[0] < 1.0
    assert max(waits) <= delivery.LONGEST_WAIT
    assert back_off(0, 120.0, 0.0) == 120.0
    assert len({back_off(3, None, jitter / 10) for jitter in range(10)}) == 10
