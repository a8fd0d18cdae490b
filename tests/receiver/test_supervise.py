"""Supervised runs on real processes: exit codes, signals, restarts, the ends of trees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real import wait_until
from tests.receiver.supervised import SUPERVISE, Supervised
from trainwarden.receiver import restarts
from trainwarden.receiver.supervise import SupervisorBusyError, supervise
from trainwarden.record import Event, encode_line
from trainwarden.runfolder import RunFolder

SLEEP = "\nwhile True: time.sleep(0.05)\n"


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_codes_pass_through(supervised: Supervised, script: str, code: int) -> None:
    assert supervised.start("bash", "-c", script).wait(20) == code


def test_a_command_that_cannot_be_started_ends_with_127_or_126_and_no_restart(
    supervised: Supervised, tmp_path: Path
) -> None:
    assert supervised.start("no-such-command", max_restarts=3).wait(20) == 127
    (tmp_path / "plain").write_text("no program")
    assert supervised.start(str(tmp_path / "plain"), max_restarts=3).wait(20) == 126
    assert "no-such-command: No such file" in supervised.said()


def test_the_trainer_is_told_folder_run_and_a_number_that_only_grows(supervised: Supervised) -> None:
    script = 'echo "$TRAINWARDEN_DIR $TRAINWARDEN_RUN $TRAINWARDEN_ATTEMPT" >> $LOG'
    for _ in range(2):
        assert supervised.start("bash", "-c", script).wait(20) == 0
    (supervised.run.path / "attempt-6").mkdir()  # left by a start without a supervisor
    assert supervised.start("bash", "-c", script).wait(20) == 0
    base = supervised.run.path.parent
    assert supervised.lines() == [f"{base} toy {number}" for number in (0, 1, 7)]


def test_a_crash_is_restarted_up_to_the_limit_and_its_code_passed_on(supervised: Supervised) -> None:
    supervised.write_toy("sys.exit(9)")
    assert supervised.start(max_restarts=2).wait(30) == 9
    assert [line.split()[1] for line in supervised.lines()] == ["0", "1", "2"]
    assert "giving up after 2 restarts" in supervised.said()


def test_a_completed_checkpoint_starts_the_count_of_restarts_again(supervised: Supervised) -> None:
    done = encode_line(Event(kind="checkpoint", time=1.0, seq=1, step=5, fields={"path": "x", "complete": True}))
    supervised.write_toy(f"""
        if attempt in (1, 2):
            folder = os.path.join(os.environ["TRAINWARDEN_DIR"], "toy", f"attempt-{{attempt}}", "s", "rank-0")
            os.makedirs(folder)
            open(folder + "/00001.ndjson", "wb").write({done!r} + b"\\n")
        sys.exit(9)
    """)
    assert supervised.start(max_restarts=1).wait(30) == 9
    # 0 crashes (restart 1 of 1), 1 and 2 made progress (count again), 3 made none: over.
    assert len(supervised.lines()) == 4


def test_pauses_double_from_a_second_to_a_minute() -> None:
    assert [restarts.pause_before(n) for n in (1, 2, 3, 6, 7, 50)] == [1, 2, 4, 32, 60, 60]


def test_ten_minutes_of_running_are_progress(tmp_path: Path) -> None:
    run = RunFolder("r", tmp_path)
    assert restarts.made_progress(run, 0, 600)
    assert not restarts.made_progress(run, 0, 599)


def test_sigterm_reaches_the_trainer_and_what_it_makes_of_it_is_the_exit_code(supervised: Supervised) -> None:
    supervised.write_toy("signal.signal(signal.SIGTERM, lambda *_: (say('saved'), sys.exit(5)))" + SLEEP)
    process = supervised.start(max_restarts=3)
    supervised.wait_for("start")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 5
    assert supervised.lines()[-1] == "saved"
    assert supervised.state().phase == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_other_signals_are_passed_on_and_the_run_goes_on(supervised: Supervised, number: signal.Signals) -> None:
    supervised.write_toy(f"""
        signal.signal({int(number)}, lambda *_: say("got"))
        say("ready")
        while not os.path.exists(os.environ["LOG"] + ".end"): time.sleep(0.02)
    """)
    process = supervised.start()
    supervised.wait_for("ready")
    process.send_signal(number)
    supervised.wait_for("got")
    supervised.log.with_name("log.end").touch()
    assert process.wait(20) == 0


def test_a_trainer_that_dies_of_a_signal_passed_on_is_not_started_again(supervised: Supervised) -> None:
    supervised.write_toy("say('ready')" + SLEEP)
    process = supervised.start(max_restarts=3)
    supervised.wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 128 + signal.SIGUSR1
    assert len([line for line in supervised.lines() if line.startswith("start")]) == 1


def test_children_that_ignore_sigterm_and_daemons_that_left_the_session_are_ended(supervised: Supervised) -> None:
    supervised.write_toy("""
        stubborn = log.name + ".stubborn.py"
        with open(stubborn, "w") as script:
            script.write(
                "import os, signal, time\\n"
                "signal.signal(15, signal.SIG_IGN)\\n"
                "signal.signal(2, signal.SIG_IGN)\\n"
                "open(os.environ['LOG'], 'a').write('stubborn\\\\n')\\n"
                "time.sleep(600)\\n"
            )
        subprocess.Popen([sys.executable, stubborn])
        subprocess.Popen([sys.executable, stubborn], start_new_session=True)
        # A daemon: its parent is gone and it has no mark in its environment.
        subprocess.run(["bash", "-c", f"env -u TRAINWARDEN_SUPERVISOR_ID setsid {sys.executable} {stubborn} &"])
        while not os.path.exists(log.name + ".end"): time.sleep(0.05)
        sys.exit(0)
    """)
    process = supervised.start(grace=0.6)
    wait_until(lambda: supervised.lines().count("stubborn") == 3, 15)
    assert len(supervised.tree()) == 4
    supervised.log.with_name("log.end").touch()
    assert process.wait(20) == 0
    assert supervised.tree() == set()
    assert "3 process(es) had to be killed" in supervised.said()


def test_workers_are_not_signalled_while_their_trainer_shuts_down(supervised: Supervised) -> None:
    supervised.write_toy("""
        worker = subprocess.Popen(["sleep", "600"])
        def save(*_):
            time.sleep(0.5)  # a checkpoint is being written, the loader's workers are needed
            say("worker alive" if worker.poll() is None else "worker dead")
            worker.kill()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say("ready")
        while True: time.sleep(0.05)
    """)
    process = supervised.start(grace=4)
    supervised.wait_for("ready")
    process.terminate()
    assert process.wait(20) == 0
    assert supervised.lines()[-1] == "worker alive"


def test_a_second_supervisor_of_the_run_is_refused(supervised: Supervised) -> None:
    supervised.write_toy(SLEEP)
    supervised.start()
    supervised.wait_for("start")
    with pytest.raises(SupervisorBusyError, match=str(supervised.started[0].pid)):
        supervise(["true"], run="toy", base=supervised.run.path.parent)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no command"):
        supervise([], run="r", base=tmp_path)
    with pytest.raises(ValueError, match="negative"):
        supervise(["true"], run="r", base=tmp_path, grace=-1)


@pytest.mark.slow
def test_torchrun_and_its_workers_are_ended_and_started_again(supervised: Supervised) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.exists():
        pytest.skip("torch is not installed here: torchrun cannot be tested")
    supervised.write_toy("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        say("rank", rank, size, attempt)
        while True: time.sleep(0.05)
    """)
    # Both ranks log "start"; only the twin check is not for two ranks.
    supervised.toy.write_text(supervised.toy.read_text().replace('log.write("TWIN\\n")', "pass"))
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [str(torchrun), "--nproc-per-node=2", *where, str(supervised.toy)]
    process = supervised.start(*command, grace=5, OMP_NUM_THREADS="1")
    for rank in (0, 1):
        supervised.wait_for(f"rank {rank} 2 0", 60)
    first = supervised.tree()
    assert len(first) >= 3
    answer = supervised.ask("restart", attempt=0, for_attempt=1, request_id="q")
    assert answer.reason == ""
    for rank in (0, 1):
        supervised.wait_for(f"rank {rank} 2 1", 60)
    assert supervised.tree().isdisjoint(first)
    process.terminate()
    process.wait(30)
    assert supervised.tree() == set()


def test_a_full_standard_error_does_not_stop_the_run(supervised: Supervised) -> None:
    supervised.write_toy("sys.exit(0)")
    with Path("/dev/full").open("w") as full:
        code = subprocess.run(
            [sys.executable, "-c", SUPERVISE, str(supervised.run.path.parent), "toy", "1", "0", "true"],
            stderr=full,
            check=False,
            env=os.environ | {"LOG": str(supervised.log)},
        ).returncode
    assert code == 0
    wait_until(lambda: supervised.state().phase == "finished")
