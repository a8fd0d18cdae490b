"""The exporter's HTTP against its contract, over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.cases.registry import case
from tests.exporter.runs import events, make, watch
from tests.real import wait_until
from trainwarden.exporter import Exporter
from trainwarden.record import Event, Step, decode_line
from trainwarden.runfolder import RunFolder


class Client:
    """Asks one exporter as a daemon does."""

    def __init__(self, exporter: Exporter, folder: Path, run: str = "run") -> None:
        self.base = f"http://127.0.0.1:{exporter.port}"
        token = RunFolder(run, folder).token()
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, **params: Any) -> requests.Response:
        return self.session.get(self.base + path, params=params, timeout=5)

    def seqs(self, **params: Any) -> list[int]:
        answer = self.get("/api/v1/steps", **params)
        assert answer.status_code == 200, answer.text
        found = []
        for line in answer.content.splitlines():
            decoded = decode_line(line)
            assert isinstance(decoded, Step | Event)
            found.append(decoded.seq)
        return found


def run_of(folder: Path, count: int, **arguments: Any) -> tuple[Exporter, Client]:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), folder, preflight=False, **arguments)
    for number in range(count):
        exporter.step(float(number))
    client = Client(exporter, folder)
    if count:
        wait_until(lambda: client.get("/api/v1/steps", limit=1).headers["Trainwarden-Last-Seq"] == str(count + 1))
    return exporter, client


def test_steps_are_newline_delimited_json_after_a_cursor(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 20)
    answer = client.get("/api/v1/steps", start_id=exporter.start_id, after=5, limit=3)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert answer.headers["Trainwarden-Start"] == exporter.start_id
    assert (answer.headers["Trainwarden-First-Seq"], answer.headers["Trainwarden-Last-Seq"]) == ("1", "21")
    assert [json.loads(line)["seq"] for line in answer.text.splitlines()] == [6, 7, 8]
    assert client.seqs() == list(range(1, 22))
    assert client.seqs(after=21) == []
    exporter.close()


def test_the_run_is_its_start_event(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 1)
    found = decode_line(client.get("/api/v1/run").content.strip())
    assert isinstance(found, Event)
    assert (found.kind, found.seq, found.fields["start_id"]) == ("start", 1, exporter.start_id)
    exporter.close()


def test_before_the_first_step_the_run_is_not_ready_but_healthy(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 0)
    assert client.get("/api/v1/run").status_code == 503
    assert client.get("/-/ready").status_code == 503
    assert client.get("/-/healthy").status_code == 200
    assert client.seqs() == []
    exporter.step(1.0)
    wait_until(lambda: client.get("/-/ready").status_code == 200)
    exporter.close()


def test_an_unknown_start_is_gone_and_the_answer_names_the_current_one(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 1)
    for start_id in ("nothing", "../../etc", "."):
        answer = client.get("/api/v1/steps", start_id=start_id)
        assert answer.status_code == 410
        assert answer.json()["start_id"] == answer.headers["Trainwarden-Start"] == exporter.start_id
    exporter.close()


def test_what_the_ring_no_longer_holds_comes_from_the_journal(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 100, ring=10, rotate_bytes=2000)
    wait_until(lambda: len(list(tmp_path.rglob("*.ndjson"))) > 3)
    assert client.seqs(after=3, limit=4) == [4, 5, 6, 7]
    cursor, found = 0, []
    while page := client.seqs(after=cursor, limit=7):
        found += page
        cursor = page[-1]
    assert found == list(range(1, 102))
    assert client.get("/api/v1/steps").headers["Trainwarden-First-Seq"] == "1"
    exporter.close()


def test_earlier_starts_are_served_from_the_journal(tmp_path: Path) -> None:
    first, _ = run_of(tmp_path, 5)
    first.close()
    second, client = run_of(tmp_path, 2)
    assert second.attempt == 1
    answer = client.get("/api/v1/steps", start_id=first.start_id, after=2, limit=2)
    assert answer.headers["Trainwarden-Start"] == first.start_id
    assert answer.headers["Trainwarden-Current-Start"] == second.start_id
    assert answer.headers["Trainwarden-Last-Seq"] == "7"  # start, five steps, exit
    assert client.seqs(start_id=first.start_id, after=2) == [3, 4, 5, 6, 7]
    second.close()


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic abc", "Bearer \u00e9"])
def test_the_api_is_closed_without_the_token_and_the_page_is_open(tmp_path: Path, header: str | None) -> None:
    exporter, client = run_of(tmp_path, 1)
    headers = {} if header is None else {"Authorization": header.encode("utf-8")}
    for path in ("/api/v1/run", "/api/v1/steps"):
        answer = requests.get(client.base + path, headers=headers, timeout=5)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    for path in ("/metrics", "/-/healthy", "/-/ready", "/"):
        assert requests.get(client.base + path, timeout=5).status_code == 200
    exporter.close()


def test_the_page_too_can_be_closed(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 1, protect_metrics=True)
    assert requests.get(client.base + "/metrics", timeout=5).status_code == 401
    assert client.get("/metrics").status_code == 200
    exporter.close()


def test_the_token_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    exporter, _ = run_of(tmp_path, 0)
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600
    exporter.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_get_and_head_is_answered(tmp_path: Path, method: str) -> None:
    exporter, client = run_of(tmp_path, 1)
    answer = client.session.request(method, client.base + "/api/v1/steps", data=b"x" * 10, timeout=5)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    exporter.close()


def test_head_has_the_headers_of_get_and_no_body(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 3)
    head = client.session.head(client.base + "/api/v1/steps", timeout=5)
    assert head.headers["Content-Length"] == str(len(client.get("/api/v1/steps").content))
    assert head.content == b""
    exporter.close()


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=1e3", "after=99999999999999999999"])
def test_a_bad_number_is_a_bad_request_that_names_it(tmp_path: Path, query: str) -> None:
    exporter, client = run_of(tmp_path, 1)
    answer = client.get(f"/api/v1/steps?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(query.partition("=")[0])
    exporter.close()


def test_a_connection_is_kept_alive_over_requests(tmp_path: Path) -> None:
    exporter, _ = run_of(tmp_path, 1)
    assert exporter.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=5)
    for _ in range(3):
        connection.request("GET", "/-/healthy")
        assert connection.getresponse().read() == b"healthy\n"
        assert connection.sock is not None
    connection.close()
    exporter.close()


def test_openmetrics_is_given_to_who_asks_for_it(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 1)
    answer = requests.get(client.base + "/metrics", headers={"Accept": "application/openmetrics-text"}, timeout=5)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.text.rstrip().endswith("# EOF")
    exporter.close()


def test_a_client_that_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 1)
    assert exporter.port is not None
    silent = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(5)]
    assert client.get("/-/healthy").status_code == 200
    began = time.monotonic()
    exporter.close()
    assert time.monotonic() - began < 2
    for connection in silent:
        connection.close()


def test_a_port_in_use_costs_the_port_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        exporter, client = run_of(tmp_path, 2, port=wanted)
        assert exporter.port not in (None, wanted)
        assert client.seqs() == [1, 2, 3]
        assert len([record for record in caplog.records if str(wanted) in record.getMessage()]) == 1
        target = json.loads((tmp_path / "run" / "targets" / "rank-0.json").read_text())
        assert target == [{"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"run": "run", "rank": "0"}}]
        exporter.close()


def test_the_port_follows_the_local_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwarden.exporter import serving

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(serving, "BASE_PORT", free - 3)
    monkeypatch.setenv("LOCAL_RANK", "3")
    exporter, _ = run_of(tmp_path, 0, port=None)
    assert exporter.port == free
    exporter.close()


def test_the_targets_file_goes_with_the_exporter(tmp_path: Path) -> None:
    exporter, _ = run_of(tmp_path, 0)
    path = tmp_path / "run" / "targets" / "rank-0.json"
    assert path.stat().st_mode & 0o444 == 0o444
    exporter.close()
    assert not path.exists()


def test_a_clean_exit_waits_for_a_reader_to_fetch_the_last_line(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 3, reader_seconds=3.0)
    assert client.seqs() == [1, 2, 3, 4]
    closing = threading.Thread(target=exporter.close)
    began = time.monotonic()
    closing.start()
    time.sleep(0.5)
    assert closing.is_alive()
    assert client.seqs(after=4) == [5]  # the exit event
    closing.join(1.0)
    assert not closing.is_alive()
    assert time.monotonic() - began < 1.5


def test_a_clean_exit_waits_no_longer_than_it_should_and_not_at_all_for_nobody(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path / "a", 3, reader_seconds=0.5)
    client.seqs()
    began = time.monotonic()
    exporter.close()
    assert 0.4 < time.monotonic() - began < 1.5
    exporter, _ = run_of(tmp_path / "b", 0, reader_seconds=3.0)
    exporter.step(1.0)
    began = time.monotonic()
    exporter.close()
    assert time.monotonic() - began < 1.0


@case("D07")
def test_a_forked_child_does_not_hold_the_port_or_a_connection(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 1)
    assert exporter.port is not None
    open_one = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=5)
    open_one.request("GET", "/-/healthy")
    open_one.getresponse().read()
    leave, stay = os.pipe()
    child = os.fork()
    if child == 0:
        exporter.step(99.0)  # does nothing in a child
        exporter.close()
        os.read(leave, 1)
        os._exit(0)
    try:
        exporter.step(2.0)
        exporter.close()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(client.base.rpartition(":")[2])))
            again.listen()
        assert open_one.sock is None or open_one.sock.recv(1) == b""
    finally:
        os.write(stay, b"x")
        os.waitpid(child, 0)
    assert [event.kind for event in events(tmp_path)] == ["start", "exit"]


@case("D07")
def test_a_forked_loader_worker_outliving_the_trainer_does_not_hold_the_port(tmp_path: Path) -> None:
    exporter, client = run_of(tmp_path, 0)
    loader = torch.utils.data.DataLoader(range(64), batch_size=4, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    batches = iter(exporter.wrap(loader, reserve=0))
    next(batches)
    port = int(client.base.rpartition(":")[2])
    exporter.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
        again.listen()
    assert sum(1 for _ in batches) == 15
