"""The files of deploy/ are accepted by the programs that read them, and do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pytest

from tests.real import free_port, need_program, wait_until

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def test_promtool_accepts_the_scrape_configuration() -> None:
    promtool = need_program("promtool")
    ran = subprocess.run(
        [promtool, "check", "config", str(DEPLOY / "prometheus/prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_the_daemon_accepts_the_configuration_of_the_containers() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "trainwarden.rules", "check", "config", str(DEPLOY / "compose/trainwarden.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


class OneSeries(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"# HELP train_loss Loss.\n# TYPE train_loss gauge\ntrain_loss 2.5\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def page() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneSeries)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.mark.e2e
def test_prometheus_finds_a_run_by_its_target_file_with_run_and_rank_as_labels(tmp_path: Path) -> None:
    prometheus = need_program("prometheus")
    text = (DEPLOY / "prometheus/prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s"))
    targets = tmp_path / ".trainwarden/gpt-7b/targets"
    targets.mkdir(parents=True)
    port = free_port()
    with page() as target, (tmp_path / "log").open("w") as log:
        entry = {"targets": [f"127.0.0.1:{target}"], "labels": {"run": "gpt-7b", "rank": "0"}}
        (targets / "rank-0.json").write_text(json.dumps([entry]))
        server = subprocess.Popen(
            [
                prometheus,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:

            def found() -> list[dict[str, str]]:
                try:
                    with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query=train_loss", timeout=2) as answer:
                        return [row["metric"] for row in json.load(answer)["data"]["result"]]
                except OSError:
                    return []

            (metric,) = wait_until(found, 30, what="the series of the run in Prometheus")
        finally:
            server.terminate()
            server.wait(15)
    assert (metric["run"], metric["rank"], metric["job"]) == ("gpt-7b", "0", "train")
