"""The daemon as a whole, with a toy core, over real HTTP: pulls, commits, delivers, goes on after a restart."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.real import need_program, wait_until
from tests.rules.daemon.toy import TOKEN, ToyExporter, ToyReceiver, reply
from trainwarden.rules.daemon.process import Daemon
from trainwarden.rules.store import StoreError

Start = Callable[..., Daemon]


def get(daemon: Daemon, path: str) -> Any:
    with urllib.request.urlopen(f"http://{daemon.address}{path}", timeout=5) as response:
        body = response.read().decode()
    return json.loads(body)["data"] if path.startswith("/api") else body


def toy(daemon: Daemon) -> dict[str, Any]:
    """The toy core's state, as its incident shows it."""
    try:
        found = get(daemon, "/api/v1/incidents/toy")
    except urllib.error.HTTPError:
        return {"steps": {}, "events": [], "receipts": [], "observed": [], "seen": [], "sum": 0.0, "ticks": 0}
    assert isinstance(found, dict)
    return found


def test_an_incident_goes_from_records_to_one_signed_request_and_its_end_comes_back(
    exporter: ToyExporter, receiver: ToyReceiver, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    for _ in range(20):
        exporter.step(1.0)
    exporter.step(200.0)
    exporter.step(300.0)
    daemon = start_daemon()
    wait_until(lambda: "executed:" in toy(daemon)["receipts"], 10)
    assert toy(daemon)["steps"] == {"s0/0": 22}
    assert toy(daemon)["receipts"] == ["accepted:", "executed:"]
    assert len(receiver.effects) == len(receiver.deliveries) == 1
    assert receiver.bodies[0]["type"] == "training.rollback.requested"


def test_lines_go_on_from_the_cursor_after_a_restart_and_none_is_fed_twice(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    for _ in range(30):
        exporter.step(1.0)
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 30})
    daemon.stop()
    for _ in range(5):
        exporter.step(2.0)
    exporter.requests.clear()
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 35})
    assert toy(daemon)["sum"] == 40.0
    assert all("after=0" not in request for request in exporter.requests)


def test_the_old_start_is_read_to_its_end_before_the_new_one(exporter: ToyExporter, start_daemon: Start) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
    exporter.fault = lambda handler, path: reply(handler, 500) is None  # unseen while the run is restarted
    for _ in range(40):
        exporter.step(1.0)
    exporter.event("exit", reason="signal", code=15)
    exporter.begin("s1", 1)
    exporter.step(1.0)
    exporter.fault = None
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 41, "s1/0": 1})
    assert toy(daemon)["events"] == ["0:start:1", "0:exit:43", "1:start:1"]


def test_while_each_page_says_that_its_start_is_the_running_one_nobody_asks_which_it_is(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    daemon = start_daemon()
    wait_until(lambda: len(exporter.requests) >= 6)
    assert not [path for path in exporter.requests[3:6] if path == "/api/v1/run"]
    exporter.step(1.0)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
    exporter.step(1.0)
    exporter.begin("s1", 1)
    exporter.step(1.0)
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 2, "s1/0": 1})


def test_a_start_that_no_exporter_knows_any_more_is_given_up_and_said(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["events"])
    exporter.known.discard("s0")
    exporter.begin("s1", 1)
    exporter.step(1.0)
    wait_until(lambda: toy(daemon)["steps"] == {"s1/0": 1})
    assert "trainwarden_source_missing_lines_total 1.0" in get(daemon, "/metrics")


def test_lines_that_the_exporter_lost_are_counted_and_the_rest_is_read(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    for _ in range(9):
        exporter.step(1.0)
    exporter.first_held = 6
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 5})
    assert "trainwarden_source_missing_lines_total 5.0" in get(daemon, "/metrics")


def test_a_line_that_cannot_be_read_is_skipped_and_counted_once(exporter: ToyExporter, start_daemon: Start) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    exporter.starts["s0"] += [b"{torn", b'{"type":"step","seq":4,"step":99999999999999999999999,"time":1}']
    exporter.step(1.0)
    exporter.starts["s0"] += [b"\xff\xfe"]
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 2})
    wait_until(lambda: toy(daemon)["seen"][-1] == ["s0", True, True], what="the last line is passed over too")
    assert "trainwarden_source_malformed_lines_total 3.0" in get(daemon, "/metrics")


def test_an_exporter_that_cannot_be_reached_is_unseen_and_nothing_worse(
    exporter: ToyExporter, receiver: ToyReceiver, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
    exporter.close()
    wait_until(lambda: toy(daemon)["seen"][-1] == ["s0", False, False])
    assert receiver.deliveries == []
    assert 'trainwarden_sources{state="unreachable"} 1.0' in get(daemon, "/metrics")


def test_a_wrong_token_makes_a_source_denied(exporter: ToyExporter, start_daemon: Start, folder: Path) -> None:
    exporter.begin("s0", 0)
    (folder / "token").write_text("wrong")
    daemon = start_daemon()
    wait_until(lambda: 'trainwarden_sources{state="denied"} 1.0' in get(daemon, "/metrics"))
    (folder / "token").write_text(TOKEN)
    wait_until(lambda: toy(daemon)["events"], what="the token is read again")


def test_a_second_daemon_on_the_same_database_refuses(exporter: ToyExporter, start_daemon: Start) -> None:
    start_daemon()
    with pytest.raises(StoreError, match="another daemon"):
        start_daemon()


def test_targets_come_and_go_with_their_files_and_the_journal_gives_what_was_not_read(
    exporter: ToyExporter, start_daemon: Start, folder: Path
) -> None:
    run = folder / "runs" / "toy"
    (run / "targets").mkdir(parents=True)
    (run / "token").write_text(TOKEN)
    (run / "token").chmod(0o600)
    target = run / "targets" / "rank-0.json"
    target.write_text(json.dumps([{"targets": [exporter.address], "labels": {"run": "toy"}}]))
    (run / "targets" / "rank-1.json").write_text('[{"targets": 5}]')
    exporter.begin("s0", 0)
    exporter.step(1.0)
    daemon = start_daemon(sources='[{folder: "runs/*/targets"}]')
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
    journal = run / "attempt-0" / "s0" / "rank-0"
    journal.mkdir(parents=True)
    exporter.fault = lambda handler, path: reply(handler, 500) is None
    exporter.step(1.0)
    exporter.event("exit", reason="finished", code=0)
    header = b'{"schema":1,"run_uid":"uid-toy","run":"toy","attempt":0,"start_id":"s0","rank":0}\n'
    (journal / "00001.ndjson").write_bytes(header + b"".join(line + b"\n" for line in exporter.starts["s0"]))
    target.unlink()
    exporter.close()
    wait_until(lambda: "0:exit:4" in toy(daemon)["events"] or "0:exit:3" in toy(daemon)["events"])
    assert toy(daemon)["steps"] == {"s0/0": 2}
    wait_until(lambda: 'trainwarden_sources{state="ok"} 0.0' in get(daemon, "/metrics"))


def test_a_stream_that_the_core_cannot_take_is_set_aside_and_others_go_on(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    other = ToyExporter("other", "uid-other")
    try:
        exporter.begin("s0", 0)
        exporter.step(1.0)
        exporter.step(666.0)
        other.begin("o0", 0)
        other.step(1.0)
        daemon = start_daemon(sources=f'[{{targets: ["{exporter.address}", "{other.address}"], token_file: token}}]')
        wait_until(lambda: toy(daemon)["steps"].get("o0/0") == 1)
        for _ in range(3):
            other.step(1.0)
        wait_until(lambda: toy(daemon)["steps"].get("o0/0") == 4)
        assert "s0/0" not in toy(daemon)["steps"]
        assert "trainwarden_rule_evaluation_failures_total 1.0" in get(daemon, "/metrics")
    finally:
        other.close()


def test_a_query_without_a_source_of_evidence_is_answered_at_once_and_journalled(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    exporter.step(55.0)
    daemon = start_daemon()
    wait_until(lambda: toy(daemon)["observed"])
    assert toy(daemon)["observed"] == ["q2:no source of toy evidence is configured"]


def test_two_sources_of_one_stream_do_not_feed_it_twice(exporter: ToyExporter, start_daemon: Start) -> None:
    twin = ToyExporter()
    try:
        for one in (exporter, twin):
            one.begin("s0", 0)
            one.step(1.0)
        daemon = start_daemon(sources=f'[{{targets: ["{exporter.address}", "{twin.address}"], token_file: token}}]')
        wait_until(lambda: 'trainwarden_sources{state="taken"} 1.0' in get(daemon, "/metrics"))
        wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 1})
        for one in (exporter, twin):
            one.step(1.0)
        wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 2})
    finally:
        twin.close()


def test_pages_are_read_until_the_newest_line(exporter: ToyExporter, start_daemon: Start) -> None:
    exporter.begin("s0", 0)
    for _ in range(333):
        exporter.step(1.0)
    daemon = start_daemon("queue_size: 1")
    wait_until(lambda: toy(daemon)["steps"] == {"s0/0": 333})


def test_a_peer_that_lies_costs_its_turn_and_no_more(exporter: ToyExporter, start_daemon: Start) -> None:
    other = ToyExporter("other", "uid-other")
    mood = {"now": "huge"}

    def lie(handler: BaseHTTPRequestHandler, path: str) -> bool:
        handler.close_connection = True
        try:
            if mood["now"] == "huge":
                handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 40_000_000)
            elif mood["now"] == "wrong":
                reply(handler, 200, b'{"type":"event","kind":"start","seq":1,"time":1,"run_uid":"../../x","run":5}')
            elif mood["now"] == "redirect":
                reply(handler, 302, b"", {"Location": f"http://{other.address}/api/v1/run"})
            elif mood["now"] == "garbage":
                handler.wfile.write(b"\x00\xff\x00" * 1000)
        except OSError:
            pass
        return True

    try:
        exporter.fault = lie
        other.begin("o0", 0)
        daemon = start_daemon(sources=f'[{{targets: ["{exporter.address}", "{other.address}"], token_file: token}}]')
        for number, now in enumerate(("huge", "wrong", "redirect", "garbage"), start=1):
            mood["now"] = now
            other.step(1.0)
            wait_until(lambda number=number: toy(daemon)["steps"].get("o0/0") == number)
        exporter.fault = None
        exporter.begin("s0", 0)
        exporter.step(1.0)
        wait_until(lambda: toy(daemon)["steps"].get("s0/0") == 1, 10)
    finally:
        other.close()


def test_the_metrics_page_is_clean_under_promtool(start_daemon: Start) -> None:
    promtool = need_program("promtool")
    page = get(start_daemon(), "/metrics")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert 'trainwarden_notifications_failed_total{integration="webhook",reason="timeout"} 0.0' in page
    assert 'trainwarden_incidents{state="recovered"} 0.0' in page


def test_health_pages_and_unknown_things_answer_as_they_should(start_daemon: Start, exporter: ToyExporter) -> None:
    daemon = start_daemon()
    assert get(daemon, "/-/healthy") == "healthy\n"
    wait_until(lambda: ready(daemon) == 200)
    for path, status in (("/api/v1/incidents/none", 404), ("/api/v1/incidents?limit=0", 400), ("/nothing", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(daemon, path)
        assert caught.value.code == status


def ready(daemon: Daemon) -> int:
    try:
        get(daemon, "/-/ready")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_a_source_that_claims_to_be_another_run_does_not_get_in_between(
    exporter: ToyExporter, start_daemon: Start
) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    liar = ToyExporter(rank=5)
    try:
        liar.authorized = lambda header: True
        liar.begin("lie", 99)
        liar.step(2.0)
        mine = f'{{targets: ["{exporter.address}"], token_file: token}}'
        daemon = start_daemon(sources=f'[{{targets: ["{liar.address}"]}}, {mine}]')
        wait_until(lambda: toy(daemon)["steps"].get("s0/0") == 1)
        wait_until(lambda: 'trainwarden_sources{state="taken"} 1.0' in get(daemon, "/metrics"))
        before = toy(daemon)["steps"]
        for _ in range(10):
            exporter.step(1.0)
            liar.step(2.0)
        wait_until(lambda: toy(daemon)["steps"].get("s0/0") == 11)
        assert toy(daemon)["steps"] == {**before, "s0/0": 11}
    finally:
        liar.close()
