"""The outbox: who delivers what next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwarden.rules.core.effects import Deliver
from trainwarden.rules.core.inputs import Receipt
from trainwarden.rules.outbox import CLAIM_SECONDS, Outbox, Row
from trainwarden.rules.store import Store, put_messages


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "x.db")
    yield store
    store.close()


def put(store: Store, *keys: str, created: float = 0.0) -> None:
    with store.writing() as connection:
        for key in keys:
            put_messages(connection, Deliver("webhook", key, "run", "uid", "i", {}, created, 1000.0), ("receiver",))


def test_each_row_is_claimed_by_one_of_many_threads(store: Store) -> None:
    put(store, *(f"k{number}" for number in range(40)))
    outbox = Outbox(store)
    claimed: list[str] = []

    def work() -> None:
        while (row := outbox.claim(10.0)) is not None:
            claimed.append(row.key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(f"k{number}" for number in range(40))


def test_a_row_is_due_again_only_at_its_time(store: Store) -> None:
    put(store, "k")
    outbox = Outbox(store)
    row = outbox.claim(10.0)
    assert row is not None
    assert outbox.claim(10.0) is None
    outbox.settle(row, 10.0, phase="deliver", next_at=15.0, error="no")
    assert outbox.claim(14.9) is None
    assert outbox.next_due() == 15.0
    again = outbox.claim(15.0)
    assert again is not None
    assert again.attempts == 1


def test_a_claim_of_a_dead_process_is_released_or_lapses(store: Store) -> None:
    put(store, "k")
    outbox = Outbox(store)
    assert outbox.claim(10.0) is not None
    assert outbox.claim(10.0 + CLAIM_SECONDS + 1) is not None
    assert outbox.release() == 1
    assert outbox.claim(10.0) is not None


def test_settling_journals_the_receipt_in_the_same_transaction(store: Store) -> None:
    put(store, "k")
    outbox = Outbox(store)
    row = outbox.claim(10.0)
    assert isinstance(row, Row)
    identity = outbox.settle(row, 11.0, phase="done", status="refused", receipt=Receipt("k", "refused", 11.0, "stale"))
    assert store.waiting_inputs() == [(identity, Receipt("k", "refused", 11.0, "stale"))]
    assert outbox.claim(1e9) is None
    assert outbox.counts() == {"done": 1}
    assert outbox.oldest_pending() is None
    assert outbox.rows()[0]["status"] == "refused"
