"""What a run wrote while no daemon was there to ask it is read from its folder, in order, by the next daemon."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real import wait_until
from tests.rules.daemon.test_daemon import get, ready, toy
from tests.rules.daemon.test_killed import Process
from tests.rules.daemon.toy import TOKEN, ToyExporter
from trainwarden.rules.config import Config
from trainwarden.rules.daemon.process import Daemon

Start = Callable[..., Daemon]
SOURCES = '[{folder: "runs/*/targets"}]'


@pytest.fixture
def run(folder: Path, exporter: ToyExporter) -> Path:
    """A run's folder with the exporter as its target."""
    run = folder / "runs" / "toy"
    (run / "targets").mkdir(parents=True)
    (run / "token").write_text(TOKEN)
    (run / "token").chmod(0o600)
    target(run).write_text(json.dumps([{"targets": [exporter.address], "labels": {"run": "toy"}}]))
    return run


def target(run: Path) -> Path:
    return run / "targets" / "rank-0.json"


def write_journals(run: Path, exporter: ToyExporter) -> None:
    """Write what the exporter serves as the journals of its starts, two files each."""
    for start_id, attempt in exporter.order:
        folder = run / f"attempt-{attempt}" / start_id / f"rank-{exporter.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        names = {"run_uid": exporter.run_uid, "run": exporter.run, "attempt": attempt, "start_id": start_id}
        header = json.dumps({"schema": 1, **names, "rank": exporter.rank}).encode() + b"\n"
        lines = [line + b"\n" for line in exporter.starts[start_id]]
        half = len(lines) // 2
        (folder / "00001.ndjson").write_bytes(header + b"".join(lines[:half]))
        (folder / "00002.ndjson").write_bytes(header + b"".join(lines[half:]))


def end(run: Path, exporter: ToyExporter) -> None:
    exporter.event("exit", reason="finished", code=0)
    write_journals(run, exporter)
    target(run).unlink()
    exporter.close()


def test_a_run_that_ended_while_the_daemon_was_down_is_read_to_its_end(
    exporter: ToyExporter, start_daemon: Start, run: Path
) -> None:
    exporter.begin("s0", 0)
    for _ in range(30):
        exporter.step(1.0)
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 30})
    daemon.stop()
    for _ in range(60):
        exporter.step(2.0)
    end(run, exporter)
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: toy(daemon)["events"] == ["0:start:1", "0:exit:92"])
    assert toy(daemon)["steps"] == {"s0/0": 90}
    assert toy(daemon)["sum"] == 150.0
    assert toy(daemon)["seen"][-2:] == [["s0", True, False], ["s0", False, False]], "never caught up: never acted on"
    assert "trainwarden_source_missing_lines_total 0.0" in get(daemon, "/metrics")


def test_killed_while_the_run_went_on_it_reads_every_later_start_of_it_in_order(
    exporter: ToyExporter, folder: Path, run: Path, make_config: Callable[..., Config]
) -> None:
    make_config(sources=SOURCES)
    exporter.begin("s0", 0)
    exporter.step(1.0)
    first = Process(folder / "trainwarden.yml")
    try:
        address = first.address()
        wait_until(lambda: first.toy(address)["steps"] == {"s0/0": 1})
    finally:
        first.end()
    exporter.step(1.0)
    exporter.event("exit", reason="signal", code=15)
    exporter.begin("s1", 1)
    for _ in range(3):
        exporter.step(1.0)
    exporter.begin("s2", 1)
    exporter.step(1.0)
    end(run, exporter)
    second = Process(folder / "trainwarden.yml")
    try:
        address = second.address()
        wait_until(lambda: second.toy(address).get("events", [])[-1:] == ["1:exit:3"], what=second.log.read_text())
        assert second.toy(address)["steps"] == {"s0/0": 2, "s1/0": 3, "s2/0": 1}
        assert second.toy(address)["events"] == ["0:start:1", "0:exit:4", "1:start:1", "1:start:1", "1:exit:3"]
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(20) == 0
    finally:
        second.end()


def test_a_start_that_came_and_went_unseen_is_read_before_the_running_one(
    exporter: ToyExporter, start_daemon: Start, run: Path
) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
    daemon.stop()
    exporter.step(1.0)
    exporter.begin("s1", 1)
    exporter.step(1.0)
    exporter.begin("s2", 2)
    exporter.step(1.0)
    write_journals(run, exporter)
    exporter.known -= {"s0", "s1"}
    exporter.step(1.0)  # the exporter is ahead of what lies on the disk
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 2, "s1/0": 1, "s2/0": 2})
    assert toy(daemon)["events"] == ["0:start:1", "1:start:1", "2:start:1"]
    assert toy(daemon)["seen"][-1] == ["s2", True, True]


def test_a_run_that_was_killed_is_read_though_its_target_file_is_left(
    exporter: ToyExporter, start_daemon: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwarden.rules.daemon.polling.FOLDER_PAUSE", 0.2)
    exporter.begin("s0", 0)
    exporter.step(1.0)
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
    daemon.stop()
    exporter.step(1.0)
    write_journals(run, exporter)
    with (run / "attempt-0" / "s0" / "rank-0" / "00002.ndjson").open("ab") as file:
        file.write(b'{"type":"step","seq":4,')
    exporter.close()
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 2}, 10)


def test_a_folder_of_runs_that_were_never_met_is_no_news(exporter: ToyExporter, start_daemon: Start, run: Path) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    end(run, exporter)
    daemon = start_daemon(sources=SOURCES)
    wait_until(lambda: ready(daemon) == 200)
    assert toy(daemon)["steps"] == {}


def test_a_real_run_that_ended_while_the_real_daemon_was_down_is_read_to_its_last_record(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.rules.daemon.test_real_exporter import fed, train
    from trainwarden.rules.config import read_config
    from trainwarden.rules.rulefiles import read_packs

    text = 'listen: 127.0.0.1:0\npoll_interval: 200ms\nsources: [{folder: "runs/*/targets"}]\n'
    config = read_config(text, "t.yml", tmp_path)
    training = train(tmp_path, 1, 900, 0.004, 0)
    daemon = Daemon(config, read_packs(["default"]))
    daemon.start()
    try:
        wait_until(lambda: fed(daemon) > 100, 40)
    finally:
        before = fed(daemon)
        daemon.stop()
    assert before < 900
    assert training.wait(60) == 0
    assert not list(tmp_path.glob("runs/*/targets/*.json"))
    daemon = Daemon(config, read_packs(["default"]))
    read = {(cursor.start.start_id, cursor.rank): cursor.seq for cursor in daemon._store.cursors()}
    assert len(read) == 1
    daemon.start()
    try:
        wait_until(lambda: daemon._live._cursors and all(seq > 900 for seq in _seqs(daemon)), 20)
    finally:
        daemon.stop()


def _seqs(daemon: Daemon) -> list[int]:
    return [cursor.seq for cursor in daemon._live._cursors.values()]
