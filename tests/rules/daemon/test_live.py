"""The core thread alone: a database that cannot be written, inputs that come back after a crash."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.real import wait_until
from tests.rules.daemon.toy import TOY_CORE, Toy
from trainwarden.record import Step
from trainwarden.rules.core.effects import Effect, Save
from trainwarden.rules.core.inputs import Command, Receipt, SourceSeen, Start, Steps
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.daemon.live import Core, Live
from trainwarden.rules.daemon.process import no_evidence
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions
from trainwarden.rules.store import Store, StoreError

START = Start("uid", "run", 0, "s0")


def test_information_that_nobody_is_told_of_is_in_the_log(tmp_path: Path) -> None:
    def noted(state: Any, value: Any) -> list[Effect]:
        row = {
            "id": "inc_1",
            "run": "run",
            "run_uid": "uid",
            "severity": "info",
            "state": "watching",
            "closed_step": None,
        }
        return [Save("incident", "inc_1", row)] if isinstance(value, Steps) else []

    with capture_logs() as lines:
        bench = Bench(tmp_path, TOY_CORE._replace(feed=noted))
        bench.steps(1, [2.0])
        bench.steps(2, [2.0])
        bench.inbox.close()
        bench.thread.join()
        bench.store.close()
    assert [line["incident"] for line in lines if line["event"] == "incident opened"] == ["inc_1"]


class Bench:
    def __init__(self, folder: Path, core: Any = TOY_CORE) -> None:
        self.store = Store(folder / "x.db")
        self.inbox = Inbox(100)
        self.woken = threading.Event()
        self.positions = Positions()
        self.live = Live(
            self.store,
            self.inbox,
            self.positions,
            None,
            None,
            Metrics(),
            snapshot_interval=0.05,
            destinations=lambda message: ("receiver",),
            wake=self.woken.set,
            query=no_evidence,
            core=core,
        )
        self.live.open()
        self.thread = threading.Thread(target=self.live.run)
        self.thread.start()

    def steps(self, first: int, losses: list[float]) -> None:
        records = tuple(
            Step(seq=first + n, step=first + n, time=1e9, signals={"loss": loss}) for n, loss in enumerate(losses)
        )
        self.inbox.put(Read(START, 0, first - 1, first - 1 + len(losses), (Steps(START, 0, records),)))

    def state(self) -> Toy:
        return msgspec.msgpack.decode(self.store.snapshot()[""], type=Toy)

    def close(self) -> None:
        self.inbox.close()
        self.thread.join()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_while_the_disk_is_full_nothing_is_delivered_and_then_it_is(bench: Bench) -> None:
    with bench.store.reading() as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    with bench.store.writing() as connection:
        connection.execute(f"PRAGMA max_page_count = {pages}")
    bench.inbox.put(Read(START, 0, 0, 0, tuple(seen(n % 2 == 0) for n in range(2000))))
    wait_until(lambda: bench.live.stuck)
    bench.steps(1, [1.0, 200.0])
    assert not bench.woken.wait(0.5)
    with bench.store.writing() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")
    wait_until(lambda: not bench.live.stuck)
    assert bench.woken.wait(5)
    assert bench.state().steps == {"s0/0": 2}


def seen(caught_up: bool) -> SourceSeen:
    return SourceSeen(start=START, rank=0, time=1e9, last_seq=1, caught_up=caught_up, authenticated=True, may_act=True)


def test_a_database_that_is_deleted_is_said_and_no_transaction_counts_until_it_is_back(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.steps(1, [1.0])
    wait_until(lambda: bench.store.snapshot())
    bench.store.path.rename(bench.store.path.with_name("moved"))
    bench.steps(2, [300.0])
    wait_until(lambda: bench.live.stuck)
    assert not bench.woken.wait(0.3), "nothing is delivered"
    assert capsys.readouterr().out.count("was deleted, moved or replaced") == 1
    bench.store.path.with_name("moved").rename(bench.store.path)
    wait_until(lambda: not bench.live.stuck)
    assert bench.woken.wait(5)


def test_an_end_with_a_full_disk_is_an_error_said_once_and_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.store.path.unlink()
    bench.steps(1, [1.0])
    bench.close()
    assert bench.live.unwritten
    assert bench.live.failure is None
    said = capsys.readouterr().out
    assert said.count("the last transaction cannot be written") == 1
    assert "Traceback" not in said


def test_a_puller_that_is_elsewhere_than_the_core_is_told_where_that_is(bench: Bench) -> None:
    bench.steps(1, [1.0])
    bench.positions.advance(START, 0, 0, 7)  # as after a step back of the driver that came in between
    bench.steps(8, [2.0])
    wait_until(lambda: bench.positions.seq("s0", 0) == 1)
    bench.steps(2, [3.0])
    wait_until(lambda: bench.state().steps == {"s0/0": 2})


def test_what_was_received_before_a_crash_is_applied_once_after_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.steps(1, [1.0, 2.0])
    wait_until(lambda: bench.state().steps == {"s0/0": 2})
    bench.store.receive(Receipt("tw_1", "accepted", 5.0), 5.0)  # journalled, and the process dies before it is fed
    bench.close()
    bench = Bench(tmp_path)
    assert bench.state().receipts == ["accepted:"]
    identity = bench.store.receive(Command("approve", "ann", 6.0), 6.0)
    bench.inbox.put(Received(identity, Command("approve", "ann", 6.0)))
    wait_until(lambda: bench.state().commands == ["approve"])
    bench.close()
    bench = Bench(tmp_path)
    assert bench.state().receipts == ["accepted:"]
    assert bench.state().commands == ["approve"]
    assert [(type(value).__name__, after) for value, after in bench.store.applied_inputs()] == [
        ("Receipt", {}),
        ("Command", {}),
    ]
    bench.close()


def test_the_input_journal_says_how_far_the_streams_were(bench: Bench) -> None:
    bench.steps(1, [1.0, 55.0])
    bench.steps(3, [55.0])
    wait_until(lambda: len(bench.store.applied_inputs()) == 2)
    assert [after for _, after in bench.store.applied_inputs()] == [{}, {"s0/0": 2}]


def test_a_gate_is_journalled_when_it_changes(bench: Bench) -> None:
    for caught_up in (True, True, False, False, True):
        bench.inbox.put(Read(START, 0, 0, 0, (seen(caught_up),)))
    wait_until(lambda: len(bench.store.applied_inputs()) == 3)


def test_a_page_that_does_not_follow_the_cursor_is_not_fed(bench: Bench) -> None:
    bench.steps(1, [1.0, 1.0])
    bench.steps(2, [1.0, 1.0])
    bench.steps(9, [1.0])
    bench.steps(3, [1.0])
    wait_until(lambda: bench.state().steps == {"s0/0": 3})


def test_a_run_is_written_with_its_own_cursor_whichever_runs_are_written_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwarden.rules.daemon.live.LEAST_RUNS", 2)
    monkeypatch.setattr("trainwarden.rules.daemon.live.BYTES_PER_SECOND", 0)

    def feed(state: dict[str, int], value: Any) -> list[Effect]:
        state[value.start.run_uid] = state.get(value.start.run_uid, 0) + len(value.records)
        if state[value.start.run_uid] != 5 or value.start.run_uid != "uid9":
            return []
        return [Save("notice", "n", {"run_uid": "uid9"})]

    def dump(state: dict[str, int], runs: Iterable[str]) -> dict[str, bytes]:
        return {"": b"", **{run: str(state[run]).encode() for run in runs}}

    def load(parts: Mapping[str, bytes], settings: Any, pack: Any) -> dict[str, int]:
        return {run: int(part) for run, part in parts.items() if run}

    bench = Bench(tmp_path, Core(feed, lambda settings, pack: {}, dump, load))
    starts = [Start(f"uid{n}", f"run{n}", 0, f"s{n}") for n in range(10)]
    copies = []
    for seq in range(1, 9):
        record = Step(seq=seq, step=seq, time=1e9)
        for start in starts:
            bench.inbox.put(Read(start, 0, seq - 1, seq, (Steps(start, 0, (record,)),)))
        time.sleep(0.06)
        copies.append(sqlite3.connect(tmp_path / f"copy{seq}.db"))
        with sqlite3.connect(tmp_path / "x.db") as source:
            source.backup(copies[-1])
    behind = 0
    for copy in copies:
        parts = dict(copy.execute("SELECT part, state FROM snapshot WHERE part != ''"))
        cursors = dict(copy.execute("SELECT run_uid, seq FROM cursors"))
        assert {run: int(part) for run, part in parts.items()} == cursors
        behind += len(set(cursors.values())) > 1
        if copy.execute("SELECT count(*) FROM rows").fetchone() == (1,):
            assert cursors["uid9"] >= 5  # what a run had for effect is never without the run
        copy.close()
    assert behind
    bench.close()
    store = Store(tmp_path / "x.db")
    assert [cursor.seq for cursor in store.cursors()] == [8] * 10
    store.close()


def test_an_input_that_the_core_cannot_take_is_skipped_for_good(tmp_path: Path) -> None:
    def feed(state: Toy, value: Any) -> Any:
        if isinstance(value, Command):
            raise RuntimeError("poison")
        return TOY_CORE.feed(state, value)

    bench = Bench(tmp_path, TOY_CORE._replace(feed=feed))
    identity = bench.store.receive(Command("approve", "ann", 6.0), 6.0)
    bench.inbox.put(Received(identity, Command("approve", "ann", 6.0)))
    bench.steps(1, [1.0])
    wait_until(lambda: bench.state().steps == {"s0/0": 1})
    assert bench.store.waiting_inputs() == []
    bench.close()


def test_a_snapshot_of_another_version_is_refused_with_the_file_named(tmp_path: Path) -> None:
    Bench(tmp_path).close()

    def load(parts: Any, settings: Any, pack: Any) -> Any:
        raise ValueError("stored state: version 9")

    with pytest.raises(StoreError, match=r"x\.db: the snapshot in it cannot be used: stored state: version 9"):
        Bench(tmp_path, TOY_CORE._replace(load=load))
