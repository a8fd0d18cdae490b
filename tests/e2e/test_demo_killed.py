"""Parts of the demo's loop are killed, started late, or see less than all: one rollback is all that ever comes of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.demo_loop import PATIENCE, DemoLoop, demo_loop
from tests.e2e.lossy_proxy import lossy_proxy
from tests.real import free_port, wait_until
from trainwarden.demo.follow import is_up
from trainwarden.demo.processes import trainwarden
from trainwarden.plan import merge_ranges

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def kill(process_id: int) -> None:
    os.kill(process_id, signal.SIGKILL)


def check_that_all_went_well(loop: DemoLoop) -> None:
    """One rollback, and the data that was left out is the poison and no more than four times it."""
    assert loop.rollbacks() == 1
    assert len(list(loop.run.plan_folder.iterdir())) == 1
    ledger = loop.run.ledger()
    assert ledger is not None
    skipped = merge_ranges(ledger.entries[0].skip_samples)
    first, end = loop.answer.ranges[0]
    assert any(low <= first and end <= high for low, high in skipped)
    assert sum(high - low for low, high in skipped) <= 4 * (end - first)


def test_a_daemon_killed_at_a_random_moment_and_restarted_asks_for_exactly_one_rollback(tmp_path: Path) -> None:
    chance = random.Random(os.environ.get("DEMO_KILL_SEED") or time.time_ns())
    with demo_loop(tmp_path / "demo") as loop:
        # Around the onset, the decision, the delivery and the restart: where a death could be dear.
        step = loop.answer.first_step + chance.randrange(-10, 40)
        wait = chance.random() * 2
        print(f"the daemon is killed {wait:.2f} s after step {step}; the poison begins at {loop.answer.first_step}")
        loop.start_receiver()
        daemon = loop.start_daemon()
        trainer = loop.start_supervisor()
        wait_until(lambda: loop.step(0) >= step or loop.step(1) > 0, PATIENCE, what=f"step {step}")
        time.sleep(wait)
        kill(daemon.popen.pid)
        daemon.popen.wait()
        time.sleep(chance.random() * 2)
        loop.start_daemon()
        wait_until(trainer.done, PATIENCE, what="the training is done")
        incident = loop.wait_until_recovered()
        assert (incident["state"], incident["action"], incident["cause"]["name"]) == ("recovered", "rollback", "data")
        assert len(loop.incidents()) == 1
        assert loop.attempts() == [0, 1]
        check_that_all_went_well(loop)


def test_a_second_daemon_that_is_late_and_misses_records_does_not_make_it_two(tmp_path: Path) -> None:
    with demo_loop(tmp_path / "demo") as loop, lossy_proxy(loop.run, _lost) as proxy:
        loop.start_receiver()
        loop.start_daemon()
        trainer = loop.start_supervisor()
        loop.wait_for_step(0, 100)
        second = _second_daemon(loop, proxy)
        wait_until(trainer.done, PATIENCE, what="the training is done")
        one = loop.wait_until_recovered()
        other = loop.wait_until_recovered(second)
        asked = {one["webhook_id"], other["webhook_id"]} - {
            None
        }  # the slower one may find the start ended, and not ask
        assert len(asked) == 1, "whoever asks does so under one id, whatever each of them saw"
        assert one["state"] == "recovered"
        assert other["action"] == "rollback"
        assert loop.attempts() == [0, 1]
        check_that_all_went_well(loop)


def _lost(seq: int) -> bool:
    """The first 40 records, and one in 23 after that."""
    return seq < 40 or seq % 23 == 0


def _second_daemon(loop: DemoLoop, proxy: str) -> str:
    address = f"127.0.0.1:{free_port()}"
    config = (loop.layout.ops / "trainwarden.yml").read_text()
    before, _, after = config.partition("  - folder:")
    rest = after.partition("\n")[2]
    config = f'{before}  - targets: ["{proxy}"]\n    token_file: "{loop.run.path / "token"}"\n{rest}'
    config = config.replace(loop.addresses.daemon, address).replace("state: trainwarden.db", "state: second.db")
    path = loop.layout.ops / "second.yml"
    path.write_text(config)
    loop.start("second", [*trainwarden(), "run", "--config", str(path)])
    wait_until(lambda: is_up(address), PATIENCE, what="the second daemon is ready")
    return address


def test_after_the_rollback_kills_of_trainer_and_supervisor_lead_to_the_newest_checkpoint_of_the_good_line(
    tmp_path: Path,
) -> None:
    with demo_loop(tmp_path / "demo") as loop:
        loop.start_receiver()
        loop.start_daemon()
        supervisor = loop.start_supervisor()

        # The rollback, and the first checkpoint after it.
        wait_until(lambda: loop.written(1), PATIENCE, what="a checkpoint of attempt 1")
        written = loop.written(0)[-1]
        assert written.step is not None
        assert written.step % 50, "the SIGTERM handler of the abandoned attempt wrote the last one"
        assert Path(written.fields["path"]).is_file()
        ledger = loop.run.ledger()
        assert ledger is not None
        target = ledger.entries[0].target_step
        assert written.step > target

        # The trainer is killed: its supervisor starts it again, from that checkpoint or a newer one of the same line.
        (pid,) = loop.trainers()
        kill(pid)
        (again,) = wait_until(lambda: loop.of_kind("start", 2), PATIENCE, what="attempt 2")
        newest = loop.written(1)[-1]
        assert again.fields["resumed_from"] == {"attempt": 1, "step": newest.step, "path": newest.fields["path"]}

        # The supervisor is killed: its trainer goes with it, and no second one is ever up beside the first.
        loop.wait_for_step(2, newest.step + 5)
        (pid,) = loop.trainers()
        kill(supervisor.popen.pid)
        supervisor.popen.wait()
        successor = loop.start_supervisor()
        most = 0

        def third_attempt() -> bool:
            nonlocal most
            most = max(most, len(loop.trainers()))
            return bool(loop.of_kind("start", 3))

        wait_until(third_attempt, PATIENCE, what="attempt 3")
        assert most == 1
        assert pid not in loop.trainers()
        wait_until(successor.done, PATIENCE, what="the training is done")
        assert loop.trainers() == []

        # No attempt ever resumed from what the abandoned one wrote after the rollback's target.
        for event in loop.of_kind("start"):
            origin = event.fields["resumed_from"]
            assert origin is None or origin["path"] != written.fields["path"]
            assert origin is None or origin["attempt"] > 0 or origin["step"] <= target
        incident = loop.wait_until_recovered()
        assert incident["state"] == "recovered"
        check_that_all_went_well(loop)
        for attempt in (2, 3):
            (event,) = loop.of_kind("start", attempt)
            assert not event.fields["plan_applied"] or not event.fields["plan_applied"]["reset_optimizer"]


def test_a_demo_that_is_told_to_end_takes_its_processes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = subprocess.Popen([*trainwarden(), "demo", "--dir", str(folder)], stdout=subprocess.PIPE)
    try:
        wait_until(lambda: len(processes_of(folder)) >= 3, PATIENCE, what="both comparison runs are up")
        demo.send_signal(signal.SIGTERM)
        said, _ = demo.communicate(timeout=PATIENCE)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert b"interrupted" in said
    assert processes_of(folder) == []


def processes_of(folder: Path) -> list[str]:
    """Return the command lines that name the folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            if os.fsencode(folder) in words:
                found.append(words.decode(errors="replace").replace("\0", " "))
    return found
