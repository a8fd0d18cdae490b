"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real import TRAINWARDEN as COMMAND
from tests.real import trainwarden as run
from tests.real import wait_until
from tests.rules.daemon.toy import SECRET, TOKEN, ToyExporter
from tests.rules.replay.recorded import record


def test_version_and_help_are_quick_and_import_nothing_heavy() -> None:
    assert run("version").stdout.startswith("trainwarden ")
    page = run("--help").stdout
    for name in ("run", "replay", "check", "incidents", "receiver", "supervise", "demo", "doctor"):
        assert name in page
    code = (
        "import sys\nfrom trainwarden.rules.cli import main\nsys.argv = ['trainwarden', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'requests', 'starlette', 'lark') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["replay"], ["check"], ["check", "rules"], ["run", "--nothing"], ["supervise", "--run", "x"]],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == "" or "Usage" in done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("token", TOKEN), ("secret", SECRET)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return tmp_path


def config(folder: Path, text: str) -> Path:
    path = folder / "trainwarden.yml"
    path.write_text(text)
    return path


def test_check_config_says_what_is_fine_and_all_that_is_not(folder: Path) -> None:
    path = config(folder, "sources: [{targets: [a:1]}]\npolicy: {mode: act}\n")
    done = run("check", "config", str(path))
    assert done.returncode == 0, done.stderr
    assert "mode act, no receiver" in done.stdout
    config(folder, 'sources: []\nrules: [nosuch]\nreceiver: {url: "http://x/", secret_file: absent}\nmode: act\n')
    done = run("check", "config", str(path))
    assert done.returncode == 1
    assert f"{path}:4:1: mode: unknown field" in done.stderr
    config(folder, 'sources: [{targets: [a:1]}]\nrules: [nosuch]\nreceiver: {url: "http://x/", secret_file: absent}\n')
    done = run("check", "config", str(path))
    assert done.returncode == 1
    assert "nosuch: no such pack; shipped are default" in done.stderr
    assert f"{folder}/absent: cannot be read" in done.stderr


def test_check_rules_reads_packs_files_and_standard_input(tmp_path: Path) -> None:
    assert run("check", "rules", "default").returncode == 0
    bad = tmp_path / "bad.yml"
    bad.write_text("groups: [{name: a, rules: [{alert: A, expr: 'loss >', labels: {}}]}]\n")
    done = run("check", "rules", "default", str(bad))
    assert done.returncode == 1
    assert f"{bad}:1:" in done.stderr
    piped = subprocess.run(
        [*COMMAND, "check", "rules", "-"], input="groups: 5", capture_output=True, text=True, check=False
    )
    assert piped.returncode == 1
    assert piped.stderr.startswith("standard input:1:9:")


def test_replay_writes_the_report_as_json_and_as_text(tmp_path: Path) -> None:
    run_folder = record(tmp_path / "rec")
    done = run("replay", str(run_folder), "--output", "json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert list(result) == [
        *(
            "source",
            "run",
            "records",
            "first_step",
            "last_step",
            "stride",
            "signals",
            "judged",
            "columns",
            "incidents",
            "notices",
            "suspects",
        ),
    ]
    (incident,) = result["incidents"]
    assert {"id", "onset_step", "verdict", "cause", "scope", "plan", "held_by", "done", "evidence"} <= set(incident)
    text = run("replay", str(run_folder))
    assert incident["id"] in text.stdout
    assert incident["verdict"] in text.stdout
    target = tmp_path / "out.json"
    assert run("replay", str(run_folder), "--output", "json", "-o", str(target)).stdout == ""
    assert json.loads(target.read_text()) == [result]


def test_replay_of_what_cannot_be_read_exits_1_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.ndjson").write_text("hello\n")
    for name in ("x.ndjson", "absent"):
        done = run("replay", str(tmp_path / name))
        assert done.returncode == 1
        assert done.stderr.startswith(str(tmp_path / name))
        assert "Traceback" not in done.stderr


def test_replay_takes_the_policy_from_a_file_and_says_where_it_is_wrong(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text("max_rollbacks: none\n")
    done = run("replay", str(tmp_path), "--policy", str(policy))
    assert (done.returncode, done.stderr.split(" ")[0]) == (1, f"{policy}:1:16:")


@pytest.mark.parametrize("given", ["--planned", "--config"])
def test_replay_takes_what_was_planned_from_a_file_and_says_where_it_is_wrong(tmp_path: Path, given: str) -> None:
    log, plan = tmp_path / "phase-2.csv", tmp_path / "plan.yml"
    chance = random.Random(0)
    losses = [(step, (2.05 if step < 1500 else 2.19) + chance.gauss(0, 0.02)) for step in range(1, 2500)]
    log.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in losses))
    head = "" if given == "--planned" else "sources: [{targets: ['127.0.0.1:1']}]\n"
    plan.write_text(f"{head}planned_changes:\n  - {{run: phase-*, step: 1500, kind: mixture}}\n")

    (plain,) = json.loads(run("replay", str(log), "--output", "json").stdout)
    assert next(one["severity"] for one in plain["incidents"]) == "critical"
    (planned,) = json.loads(run("replay", str(log), given, str(plan), "--output", "json").stdout)
    assert planned["incidents"] == []
    assert [one["step"] for one in planned["notices"] if one["kind"] == "planned_change"] == [1499]

    plan.write_text(f"{head}planned_changes:\n  - {{run: phase-*, step: 0, kind: mixture}}\n")
    done = run("replay", str(log), given, str(plan))
    line = 2 + head.count("\n")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{plan}:{line}:26: planned_changes[0].step: ")

    plan.write_text(f"{head}planned_changes:\n  - {{run: fase-*, step: 1500, kind: mixture}}\n")
    done = run("replay", str(log), given, str(plan))
    assert done.returncode == 0
    assert done.stderr == "notice: A planned change is for run: fase-*, which matches no run here; there is phase-2.\n"


class Daemon:
    def __init__(self, path: Path, *arguments: str, **environment: str) -> None:
        self.log = path.with_name("daemon.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "run", "--config", str(path), *arguments], stderr=log, env={**os.environ, **environment}
            )
        found = wait_until(self._listening, 20, what="the daemon listens")
        self.url = f"http://{found}"

    def _listening(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r"event=listening address=(\S+)", self.log.read_text())
        return found.group(1) if found else ""


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    exporter = ToyExporter()
    exporter.begin("s0", 0)
    for step in range(1, 200):
        exporter.step(2.0 if step < 150 else 50.0)
    path = config(
        folder,
        f"""
listen: 127.0.0.1:1
state: run.db
poll_interval: 50ms
snapshot_interval: 100ms
sources: [{{targets: ["{exporter.address}"], token_file: token}}]
""",
    )
    daemon = Daemon(path, "--listen", "127.0.0.1:0", TRAINWARDEN_LISTEN="127.0.0.1:2", TRAINWARDEN_LOG_LEVEL="info")
    yield daemon
    daemon.process.kill()
    daemon.process.wait()
    exporter.close()


def test_the_daemon_runs_is_asked_and_ends_cleanly(daemon: Daemon, folder: Path) -> None:
    listed = wait_until(
        lambda: json.loads(run("incidents", "list", "--output", "json", "--url", daemon.url).stdout), 20
    )
    identity = listed[0]["id"]
    assert identity in run("incidents", "list", "--url", daemon.url).stdout
    shown = run("incidents", "show", identity, TRAINWARDEN_URL=daemon.url)
    assert listed[0]["summary"].split(",")[0] in shown.stdout
    assert run("incidents", "list", "--state", "dismissed", "--url", daemon.url).stdout == "no incident\n"
    missing = run("incidents", "show", "inc_none", "--url", daemon.url)
    assert (missing.returncode, missing.stderr) == (1, f"{daemon.url}: no incident inc_none\n")

    second = run("run", "--config", str(folder / "trainwarden.yml"))
    assert second.returncode == 1
    assert "another daemon" in second.stderr

    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    assert "event=stopped" in daemon.log.read_text()
    gone = run("incidents", "list", "--url", daemon.url)
    assert gone.returncode == 1
    assert "is the daemon running" in gone.stderr


def test_systemd_is_told_when_the_daemon_is_ready(folder: Path) -> None:
    path = config(folder, "listen: 127.0.0.1:0\nsources: [{folder: nothing}]\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(folder / "notify"))
        heard.settimeout(20)
        daemon = Daemon(path, NOTIFY_SOCKET=str(folder / "notify"))
        assert heard.recv(100) == b"READY=1"
        daemon.process.send_signal(signal.SIGTERM)
        assert heard.recv(100) == b"STOPPING=1"
        assert daemon.process.wait(20) == 0


def test_doctor_tries_sources_and_receiver(folder: Path) -> None:
    exporter = ToyExporter()
    exporter.begin("s0", 3)
    try:
        path = config(
            folder,
            f"""
sources: [{{targets: ["{exporter.address}"], token_file: token}}]
receiver: {{url: "http://127.0.0.1:1/webhook", secret_file: secret}}
""",
        )
        done = run("doctor", "--config", str(path))
        assert done.returncode == 1
        assert f"ok   source {exporter.address}: run toy, attempt 3, rank 0" in done.stdout
        assert "FAIL receiver: http://127.0.0.1:1/webhook: connection refused" in done.stdout
    finally:
        exporter.close()


def test_supervise_passes_the_exit_code_on(tmp_path: Path) -> None:
    done = run("supervise", "--run", "x", "--dir", str(tmp_path), "--max-restarts", "0", "--", "sh", "-c", "exit 7")
    assert done.returncode == 7, done.stderr


def test_the_receiver_starts_from_flags_and_says_what_is_wrong_in_its_file(folder: Path) -> None:
    secret = folder / "fresh"
    assert run("receiver", "new-secret", str(secret)).returncode == 0
    assert secret.stat().st_mode & 0o777 == 0o600
    assert run("receiver", "new-secret", str(secret)).returncode == 1
    path = folder / "receiver.yml"
    path.write_text("roots: [.]\nlistn: x\nsecret_file: fresh\n")
    done = run("receiver", "--config", str(path))
    assert done.returncode == 1
    assert f"{path}:" in done.stderr
    log = folder / "receiver.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*COMMAND, "receiver", "--listen", "127.0.0.1:0", "--root", ".", "--secret-file", "fresh", "--db", "r.db"],
            cwd=folder,
            stderr=written,
        )
    try:
        wait_until(lambda: "listening" in log.read_text(), 20)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_the_demo_lists_its_options() -> None:
    pytest.importorskip("torch")
    said = run("demo", "--help").stdout
    assert "Usage: trainwarden demo [OPTIONS]" in said
    assert "--seed" in said
    assert "Options" in said
