"""What being scraped costs: how long a page of 1,000 series takes, and what ten scrapes a second do to the training's slowest steps.

A process of its own scrapes over one kept-alive connection, as Prometheus does. First it asks for the page a few hundred times
while the trainer rests; wanted: under 10 ms. Then a training of 50 to 100 ms a step goes on in blocks that are in turn scraped
ten times a second and left alone, the exporter attached throughout; wanted: the 99th percentile of a step's time grows by no more than
5 % or 10 ms, whichever is more.

    python bench/scrape.py --output .bench/scrape.json      # about five minutes
    python bench/scrape.py --steps 200                       # a short one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead import Ours, Trainer, write

from trainwarden.exporter import Exporter
from trainwarden.record import Step

#: Series of the page: as many as the exporter shows at most.
SERIES = 1000
#: Steps of a block, and the step time that is aimed at.
BLOCK, AIMED_SECONDS = 50, 0.075
#: Scrapes a second while it is scraped, and scrapes of the resting trainer.
RATE, ALONE = 10, 300
TEXT, OPEN_METRICS = "text/plain", "application/openmetrics-text; version=1.0.0"

SCRAPER = """
import http.client, json, select, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
def scrape(accept):
    began = time.perf_counter()
    connection.request("GET", "/metrics", headers={"Accept": accept})
    body = connection.getresponse().read()
    return time.perf_counter() - began, sum(not line.startswith(b"#") for line in body.splitlines())
on, seconds, following = False, [], 0.0
while True:
    wait = max(0.0, following - time.monotonic()) if on else None
    if select.select([sys.stdin], [], [], wait)[0]:
        command = sys.stdin.readline().split(" ", 2)
        if not command[0].strip():
            break
        if command[0] == "many":
            print(json.dumps([scrape(command[2].strip()) for _ in range(int(command[1]))]), flush=True)
        else:
            on, following = command[0].strip() == "on", time.monotonic()
            print(json.dumps(seconds), flush=True)
            seconds = []
    elif on:
        seconds.append(scrape("text/plain")[0])
        following = max(following + 1 / float(sys.argv[2]), time.monotonic())
"""


class Scraper:
    """The process that scrapes."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRAPER, str(port), str(RATE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, command: str) -> Any:
        into, out = self._process.stdin, self._process.stdout
        assert into is not None
        assert out is not None
        into.write(command + "\n")
        into.flush()
        return json.loads(out.readline())

    def many(self, count: int, accept: str) -> tuple[np.ndarray, int]:
        """Scrape so many times; return the seconds of each and how many samples the page has."""
        found = self._ask(f"many {count} {accept}")
        return np.array([seconds for seconds, _ in found]), found[-1][1]

    def on(self) -> None:
        """Scrape regularly from now on."""
        self._ask("on")

    def off(self) -> list[float]:
        """Stop; return the seconds of each scrape since it began."""
        found: list[float] = self._ask("off")
        return found

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def fill(exporter: Exporter) -> None:
    """Let the page have as many series as it may: a trainer of many parameter groups has as many rates."""
    rates = {f"group {number}": 1e-4 + 1e-9 * number for number in range(2 * SERIES)}
    parts = exporter._parts
    assert parts is not None
    parts.page.step(Step(seq=0, step=0, time=time.time(), signals={"lr": dict(rates)}))


def trainer_of(seconds: float) -> Trainer:
    """Return a training whose steps take about so long."""
    length, count = 128, 1
    while True:
        trainer = Trainer(layers=4, width=192, vocabulary=512, length=length, tokens=length * count)
        for _ in range(3):
            trainer.step(None)
        began = time.perf_counter()
        for _ in range(5):
            trainer.step(None)
        took = (time.perf_counter() - began) / 5
        if took >= 0.8 * seconds:
            return trainer
        count = max(count + 1, min(4 * count, int(count * seconds / took)))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--steps", type=int, default=1000, help="steps with, and as many without scrapes")
    parser.add_argument("--threads", type=int, help="of torch; None: one less than the machine has cores")
    options = parser.parse_args()
    if options.steps < BLOCK:
        parser.error(f"--steps: {options.steps} is less than a block of {BLOCK}")
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    trainer = trainer_of(AIMED_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        watcher = Ours(10, trainer.model, trainer.optimizer, folder)
        for _ in range(20):
            trainer.step(watcher)
        assert watcher.exporter.port is not None, watcher.exporter.notices
        fill(watcher.exporter)
        scraper = Scraper(watcher.exporter.port)
        scraper.many(20, TEXT)
        text, series = scraper.many(ALONE, TEXT)
        open_metrics, _ = scraper.many(ALONE, OPEN_METRICS)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        scrapes: list[float] = []
        for block in range(2 * (options.steps // BLOCK)):
            scraped = (block + block // 2) % 2 == 0  # with, without, without, with
            if scraped:
                scraper.on()
            for _ in range(BLOCK):
                began = time.perf_counter()
                trainer.step(watcher)
                seconds[scraped].append(time.perf_counter() - began)
            if scraped:
                scrapes += scraper.off()
        scraper.end()
        watcher.close()
    without, with_ = np.array(seconds[False]) * 1e3, np.array(seconds[True]) * 1e3
    p99 = {False: float(np.quantile(without, 0.99)), True: float(np.quantile(with_, 0.99))}
    growth, allowed = p99[True] - p99[False], max(0.05 * p99[False], 10.0)
    found = {
        "series": series,
        "scrape_ms": float(np.median(text)) * 1e3,
        "scrape_ms_p99": float(np.quantile(text, 0.99)) * 1e3,
        "scrape_ms_openmetrics": float(np.median(open_metrics)) * 1e3,
        "scrape_ms_while_training": float(np.median(scrapes)) * 1e3,
        "scrapes": len(scrapes),
        "steps": len(without),
        "step_ms": float(np.median(without)),
        "step_ms_scraped": float(np.median(with_)),
        "step_ms_p99": p99[False],
        "step_ms_p99_scraped": p99[True],
        "p99_growth_ms": growth,
        "p99_growth_allowed_ms": allowed,
        "holds": bool(np.median(text) < 0.010 and growth <= allowed),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    write(options.output, found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
