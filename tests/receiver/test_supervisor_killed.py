"""kill -9 of the supervisor, of its keeper and of both: no orphan in the end, never two trainers."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.real import wait_until
from tests.receiver.supervised import Supervised
from trainwarden.receiver import control, locks, processes

STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                     start_new_session=True)
    say("ready", attempt)
    while True: time.sleep(0.05)
"""


def test_the_tree_of_a_killed_supervisor_ends_without_any_help(supervised: Supervised) -> None:
    supervised.write_toy(STUBBORN)
    process = supervised.start(grace=0.5)
    supervised.wait_for("ready 0")
    assert len(supervised.tree()) == 2
    process.kill()
    wait_until(lambda: not supervised.everybody(), 10, what="nobody is left, the keeper included")


def test_a_trainer_whose_supervisor_was_killed_may_still_save(supervised: Supervised) -> None:
    supervised.write_toy("""
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), say("saved", attempt), sys.exit(0)))
        say("ready", attempt)
        while True: time.sleep(0.05)
    """)
    supervised.start(grace=5)
    supervised.wait_for("ready 0")
    supervised.started[0].kill()
    supervised.start(grace=5)
    supervised.wait_for("ready 1")
    assert supervised.lines()[:3] == [supervised.lines()[0], "ready 0", "saved 0"]
    assert "TWIN" not in supervised.lines()


@pytest.mark.parametrize("victims", ["supervisor", "supervisor and keeper"])
def test_the_next_supervisor_starts_only_when_the_old_tree_is_gone(supervised: Supervised, victims: str) -> None:
    supervised.write_toy(STUBBORN)
    process = supervised.start(grace=0.7)
    supervised.wait_for("ready 0")
    old = supervised.tree()
    keeper = supervised.state().keeper
    assert keeper is not None
    process.kill()
    if victims != "supervisor":
        os.kill(keeper.pid, signal.SIGKILL)
    supervised.start(grace=0.7)
    supervised.wait_for("ready 1")
    assert "TWIN" not in supervised.lines()
    assert supervised.tree().isdisjoint(old)
    assert len(supervised.tree()) == 2


def test_a_process_of_the_old_tree_that_shed_its_mark_is_found_by_the_lock_that_it_holds(
    supervised: Supervised,
) -> None:
    supervised.write_toy("""
        if attempt == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINWARDEN")}
            subprocess.Popen(["setsid", "bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"], env=environment,
                             close_fds=False)
        say("ready", attempt)
        while True: time.sleep(0.05)
    """)
    process = supervised.start(grace=0.5)
    supervised.wait_for("ready 0")
    time.sleep(0.3)
    old = supervised.tree()
    state = supervised.state()
    assert state.keeper is not None
    assert state.trainer is not None
    process.kill()
    os.kill(state.keeper.pid, signal.SIGKILL)
    os.kill(state.trainer.pid, signal.SIGKILL)
    wait_until(lambda: supervised.tree() and state.trainer.pid not in supervised.tree())  # type: ignore[union-attr]
    supervised.start(grace=0.5)
    supervised.wait_for("ready 1")
    assert supervised.tree().isdisjoint(old)


@pytest.mark.parametrize("moment", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_a_supervisor_killed_while_it_starts_leaves_neither_orphan_nor_twin(
    supervised: Supervised, moment: float
) -> None:
    supervised.write_toy("say('ready', attempt)\nwhile True: time.sleep(0.05)\n")
    first = supervised.start(grace=1)
    wait_until(lambda: (supervised.run.path / "supervisor.lock").exists())
    time.sleep(moment)
    first.kill()
    first.wait()
    second = supervised.start(grace=1)
    wait_until(lambda: supervised.phase() == "running")
    supervised.wait_for(f"ready {supervised.ask('look').live.attempt}")
    assert "TWIN" not in supervised.lines()
    assert len(supervised.tree()) == 1
    second.terminate()
    second.wait(20)
    wait_until(lambda: not supervised.everybody())


def test_a_killed_keeper_takes_its_tree_along_and_counts_as_a_crash(supervised: Supervised) -> None:
    supervised.write_toy(STUBBORN)
    supervised.start(grace=0.5, max_restarts=1)
    supervised.wait_for("ready 0")
    keeper = supervised.state().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    supervised.wait_for("ready 1")
    assert "TWIN" not in supervised.lines()
    assert len(supervised.tree()) == 2
    assert "its keeper died (-9)" in supervised.said()


def test_a_supervisor_killed_while_it_stops_the_run_is_followed_by_one_that_finishes_the_stop(
    supervised: Supervised,
) -> None:
    supervised.write_toy(STUBBORN)
    process = supervised.start(grace=1.5)
    supervised.wait_for("ready 0")
    assert supervised.ask("stop", attempt=0, request_id="q").reason == ""
    process.kill()
    assert supervised.start(grace=1.5).wait(20) == 3
    assert supervised.state().phase == "stopped"
    assert not any("ready 1" in line for line in supervised.lines())
    # Started again by a person, it runs again.
    supervised.start(grace=0.5)
    supervised.wait_for("ready 1")


def test_a_supervisor_killed_while_it_restarts_the_run_is_followed_by_one_that_starts_that_attempt(
    supervised: Supervised,
) -> None:
    supervised.write_toy(STUBBORN)
    process = supervised.start(grace=1.5)
    supervised.wait_for("ready 0")
    assert supervised.ask("restart", attempt=0, for_attempt=1, request_id="q").reason == ""
    process.kill()
    supervised.start(grace=1.5)
    supervised.wait_for("ready 1")
    assert "TWIN" not in supervised.lines()
    assert supervised.ask("look").live.attempt == 1


def test_a_restart_of_another_attempt_is_stale_and_touches_nothing(supervised: Supervised) -> None:
    supervised.write_toy("say('ready', attempt)\nwhile True: time.sleep(0.05)\n")
    supervised.start()
    supervised.wait_for("ready 0")
    tree = supervised.tree()
    for attempt, following in ((1, 2), (-1, 0), (0, 2)):
        assert supervised.ask("restart", attempt=attempt, for_attempt=following, request_id="q").reason == "stale"
    assert supervised.ask("stop", attempt=3, request_id="q").reason == "stale"
    assert supervised.tree() == tree


def test_a_restart_in_the_pause_after_a_crash_starts_at_once(supervised: Supervised) -> None:
    supervised.write_toy("say('ready', attempt)\nsys.exit(1) if attempt < 7 else time.sleep(600)\n")
    supervised.start(max_restarts=100)
    supervised.wait_for("ready 5")  # pauses have grown to seconds by now
    wait_until(lambda: supervised.phase() == "waiting")
    asked = time.monotonic()
    assert supervised.ask("restart", attempt=5, for_attempt=6, request_id="q").reason == ""
    supervised.wait_for("ready 6")
    assert time.monotonic() - asked < 2


def test_no_attempt_begins_while_a_plan_is_being_written(supervised: Supervised) -> None:
    supervised.write_toy("say('ready', attempt)\nsys.exit(1) if attempt == 0 else time.sleep(600)\n")
    supervised.start(max_restarts=1)
    supervised.wait_for("ready 0")
    with locks.held(supervised.run.path / "start.lock", 5):
        wait_until(lambda: supervised.phase() == "starting")
        time.sleep(0.3)
        assert supervised.ask("look").live.attempt == 0
    supervised.wait_for("ready 1")


def test_the_socket_can_be_reached_however_deep_the_folder_lies(supervised: Supervised) -> None:
    deep = Supervised(supervised.run.path.parent / ("d" * 90) / ("e" * 90))
    deep.run.path.parent.mkdir(parents=True)
    deep.write_toy("say('ready')\ntime.sleep(600)\n")
    try:
        deep.start()
        deep.wait_for("ready")
        assert deep.ask("look").live.phase == "running"
        assert (deep.run.path / "supervisor.sock").stat().st_mode & 0o777 == 0o600
    finally:
        deep.end()


def test_nonsense_on_the_socket_gets_no_answer_and_does_no_harm(supervised: Supervised) -> None:
    import socket

    supervised.write_toy("say('ready')\ntime.sleep(600)\n")
    supervised.start()
    supervised.wait_for("ready")
    for line in (b"{}\n", b'{"op": "dance"}\n', b"\xff\n", b"[" * 70000 + b"\n"):
        with socket.socket(socket.AF_UNIX) as client, control._address(supervised.run.path) as address:
            client.settimeout(5)
            client.connect(address)
            try:
                client.sendall(line)
                assert client.recv(10) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass
    assert supervised.ask("look").live.phase == "running"


def test_a_reused_process_id_is_not_taken_for_the_old_process() -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    assert processes.alive(me)
    other = processes.Process(me.pid, me.start - 1)
    assert not processes.alive(other)
    processes.send(other, signal.SIGKILL)  # would end this test
