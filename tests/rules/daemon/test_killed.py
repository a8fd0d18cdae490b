"""A daemon killed with SIGKILL at any moment: after its restart there is exactly one effect, and no record is fed twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real import wait_until
from tests.rules.daemon.toy import ToyExporter, ToyReceiver
from tests.rules.daemon.toy_daemon import POINTS
from trainwarden.rules.config import Config

ROOT = Path(__file__).resolve().parents[3]


class Process:
    def __init__(self, config: Path, *arguments: str) -> None:
        self.log = config.with_name("log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.rules.daemon.toy_daemon", str(config), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def address(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.log.read_text()
        return line

    def toy(self, address: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/incidents/toy", timeout=5) as response:
                found: dict[str, Any] = json.load(response)["data"]
                return found
        except OSError:
            return {"steps": {}, "receipts": []}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(folder: Path, make_config: Callable[..., Config]) -> Iterator[Callable[..., Process]]:
    make_config()
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(folder / "trainwarden.yml", *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.end()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_this_point_there_is_one_effect_and_no_record_twice(
    point: str, exporter: ToyExporter, receiver: ToyReceiver, start: Callable[..., Process]
) -> None:
    exporter.begin("s0", 0)
    for _ in range(120):
        exporter.step(1.0)
    exporter.step(200.0)
    first = start(point)
    assert first.process.wait(20) == -signal.SIGKILL
    for _ in range(10):
        exporter.step(1.0)
    second = start(point)
    address = second.address()
    wait_until(lambda: "executed:" in second.toy(address)["receipts"], 20, what=second.log.read_text())
    wait_until(lambda: second.toy(address)["steps"] == {"s0/0": 131})
    assert second.toy(address)["sum"] == 330.0
    assert len(receiver.effects) == 1
    assert set(receiver.deliveries) == set(receiver.effects)
    assert len(receiver.deliveries) <= 2


@pytest.mark.slow
def test_killed_again_and_again_at_random_moments(
    exporter: ToyExporter, receiver: ToyReceiver, start: Callable[..., Process]
) -> None:
    moments = random.Random(7)
    exporter.begin("s0", 0)
    total = 0
    for attempt in range(4):
        for _ in range(30):
            exporter.step(1.0)
        exporter.step(200.0)
        total += 31
        for last in (False, True):
            process = start()
            address = process.address()
            if last:  # a start that nobody met before the next one began is never heard of
                wait_until(lambda p=process, a=address, n=attempt: f"s{n}/0" in p.toy(a)["steps"], 20)  # type: ignore[misc]
            time.sleep(moments.uniform(0.0, 0.5))
            process.end()
        if attempt < 3:
            exporter.begin(f"s{attempt + 1}", attempt + 1)
    last = start()
    address = last.address()
    wait_until(lambda: sum(last.toy(address)["steps"].values()) == total, 20, what=last.log.read_text())
    wait_until(lambda: len(receiver.effects) == 4, 20)
    assert last.toy(address)["sum"] == 4 * (30 + 200)
    assert len(set(receiver.deliveries)) == 4
    last.process.send_signal(signal.SIGTERM)
    assert last.process.wait(20) == 0
