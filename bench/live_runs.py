"""What one daemon costs that follows thousands of runs at one record a second each.

A stand-in process serves all runs over loopback, each at an address of its own and over connections that stay open, as exporters do. The
daemon is the real one. Once it has caught up, the processor seconds of its process (all threads) over those of the clock are measured, and
whether it kept up: the records that it took, and how old the last ones are.

    python bench/live_runs.py --output .bench/live_runs.json
    python bench/live_runs.py --runs 100 --poll-interval 0.5 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

#: Records that are made beforehand; a run goes round them from a place of its own.
MADE = 1024
#: The longest wait until all runs are caught up, in seconds.
PATIENCE = 240.0


class StandIn:
    """All runs: what their exporters would answer. Line 1 of a run is its start event, line n + 1 its n-th record."""

    def __init__(self, began: float) -> None:
        self._began = began
        rng = np.random.default_rng(3)
        noise = rng.standard_normal((4, MADE))
        self._signals = [
            b'"loss":%.5f,"grad_norm":%.5f,"update_ratio":%.7f,"lr":0.0003,"clip_ratio":%.4f,"step_duration_seconds":%.4f,'
            b'"batch_unique_token_ratio":%.4f,"batch_longest_repeat_tokens":%d,"loss_scale":65536.0,"skipped":0}\n'
            % (2.3 + 0.02 * x, 0.3 * np.exp(0.1 * g), 1e-3 * np.exp(0.05 * u), 0.3, 1.0, 0.45 + 0.01 * r, 3 + place % 7)
            for place, (x, g, u, r) in enumerate(zip(*noise.tolist(), strict=True))
        ]

    def last(self) -> int:
        """Return the number of the newest line of each run."""
        return 1 + max(0, int(time.time() - self._began))

    def start(self, run: int) -> bytes:
        """Return a run's start event."""
        names = {"run_uid": f"uid-{run}", "run": f"run-{run}", "attempt": 0, "start_id": f"start-{run}", "rank": 0}
        line = {"type": "event", "kind": "start", "seq": 1, "time": self._began, "world_size": 1, **names}
        return json.dumps(line).encode() + b"\n"

    def lines(self, run: int, after: int, limit: int) -> bytes:
        """Return the lines behind ``after``."""
        first, end = after + 1, min(after + limit, self.last()) + 1
        parts = [self.start(run)] if first == 1 else []
        for seq in range(max(first, 2), end):
            head = b'{"type":"step","seq":%d,"step":%d,"time":%.3f,' % (seq, seq - 1, self._began + seq - 1)
            parts.append(head + self._signals[(seq + 37 * run) % MADE])
        return b"".join(parts)


class Connection(asyncio.Protocol):
    """One kept-alive connection to one run."""

    def __init__(self, runs: StandIn, run: int) -> None:
        self._runs, self._run = runs, run
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._got += data
        while b"\r\n\r\n" in self._got:
            head, _, self._got = self._got.partition(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            body = self._runs.start(self._run)
            if path.startswith("/api/v1/steps"):
                query = dict(part.split("=") for part in path.partition("?")[2].split("&"))
                body = self._runs.lines(self._run, int(query["after"]), int(query["limit"]))
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nTrainwarden-Start: start-%d\r\n"
                b"Trainwarden-Current-Start: start-%d\r\nTrainwarden-First-Seq: 1\r\nTrainwarden-Last-Seq: %d\r\n\r\n"
                % (len(body), self._run, self._run, self._runs.last())
                + body
            )


async def serve(count: int, began: float) -> None:
    """Serve ``count`` runs for ever, and print where."""
    loop = asyncio.get_running_loop()
    runs = StandIn(began)
    servers = [
        await loop.create_server(lambda run=run: Connection(runs, run), "127.0.0.1", 0)  # type: ignore[misc]
        for run in range(count)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has taken so far, all its threads together."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(process: int) -> int:
    """Return the resident set of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def metric(address: str, name: str) -> float:
    """Read one number off the daemon's metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise KeyError(name)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both processes and measure the daemon."""
    began = time.time() - options.history
    stand_in = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(options.runs), "--began", str(began)], stdout=subprocess.PIPE
    )
    assert stand_in.stdout is not None
    ports = json.loads(stand_in.stdout.readline())
    (folder / "token").write_text("a-token-for-the-benchmark")
    (folder / "token").chmod(0o600)
    targets = [f"127.0.0.1:{port}" for port in ports]
    address = f"127.0.0.1:{options.port}"
    config = {
        "listen": address,
        "poll_interval": f"{options.poll_interval:g}s",
        "sources": [{"targets": targets, "token_file": "./token"}],
        "log": {"level": "error"},
    }
    (folder / "trainwarden.yml").write_text(json.dumps(config))
    daemon = subprocess.Popen(
        [sys.executable, "-m", "trainwarden.rules", "run", "--config", str(folder / "trainwarden.yml")]
    )
    try:
        wait_until_caught_up(address, began, options)
        cpu, clock = processor_seconds(daemon.pid), time.monotonic()
        taken = metric(address, "trainwarden_records_total")
        time.sleep(options.seconds)
        wall = time.monotonic() - clock
        used = processor_seconds(daemon.pid) - cpu
        now = metric(address, "trainwarden_records_total")
        return {
            "runs": options.runs,
            "poll_interval_seconds": options.poll_interval,
            "seconds": round(wall, 1),
            "cores_used": round(used / wall, 3),
            "records_per_second": round((now - taken) / wall, 1),
            "records_behind_per_run": round(time.time() - began - now / options.runs, 1),
            "rss_mb": round(resident_bytes(daemon.pid) / 1e6, 1),
            "state_mb": round(metric(address, "trainwarden_snapshot_size_bytes") / 1e6, 1),
            "database_mb": round(sum(path.stat().st_size for path in folder.glob("trainwarden.db*")) / 1e6, 1),
        }
    finally:
        for process in (daemon, stand_in):
            process.kill()
            process.wait()


def wait_until_caught_up(address: str, began: float, options: argparse.Namespace) -> None:
    """Wait until the daemon has all records but those of the last few polls, and a while longer."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(1.0)
        try:
            taken = metric(address, "trainwarden_records_total")
        except (OSError, KeyError):
            continue
        behind = time.time() - began - taken / options.runs
        if behind < 2 * options.poll_interval:
            time.sleep(options.settle)
            return
    sys.exit(f"the daemon had not caught up after {PATIENCE:g} s")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--settle", type=float, default=20.0, help="how long to wait before, once it has caught up")
    parser.add_argument("--poll-interval", type=float, default=10.0)
    parser.add_argument("--history", type=int, default=100, help="records that each run has at the start")
    parser.add_argument("--port", type=int, default=17099, help="of the daemon's API")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * (options.serve or options.runs) + 500
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    if options.serve is not None:
        asyncio.run(serve(options.serve, options.began))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    found |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    print(json.dumps(found, indent=2))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
