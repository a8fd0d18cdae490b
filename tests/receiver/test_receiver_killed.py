"""kill -9 of the receiver between any two of its steps, and of the supervisor meanwhile: the effect comes, and once."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import requests

from tests.real import wait_until
from tests.receiver.requested import Receiving
from tests.receiver.supervised import TOY, Supervised
from trainwarden.receiver.ledger import Ledger
from trainwarden.receiver.schedulers.local import LocalScheduler

STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TOY

STEPS = [
    "before accept",
    "after accept",
    "after write_plan",
    "before write_ledger",
    "after write_ledger",
    "before restart",
    "after restart",
    "before settle",
    "after settle",
]


@pytest.mark.parametrize("die", STEPS)
def test_a_receiver_killed_at_any_step_is_followed_by_one_that_finishes(
    supervised: Supervised, receiving: Receiving, die: str
) -> None:
    supervised.write_toy(TOY)
    supervised.start()
    receiving.checkpoint()
    process = receiving.start(die)
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run)
    with contextlib.suppress(requests.ConnectionError):  # it may die before it answers
        receiving.send(envelope)
    assert process.wait(20) == -9
    receiving.start()
    again = receiving.send(envelope)  # the daemon's second delivery
    assert again.status_code == (202 if die == "before accept" else 200)
    receiving.wait_for(envelope, "executed")
    supervised.wait_for("ready 1")
    time.sleep(0.6)  # time for a second restart, if there were one
    assert supervised.ask("look").live.attempt == 1
    assert "TWIN" not in supervised.lines()
    ledger = supervised.run.ledger()
    assert ledger is not None
    assert [entry.plan_id for entry in ledger.entries] == ["p1"]
    assert len(supervised.run.read_plans()[0]) == 1


@pytest.mark.parametrize("die", ["before stop", "after stop"])
def test_a_stop_survives_the_receiver_too(supervised: Supervised, receiving: Receiving, die: str) -> None:
    supervised.write_toy(TOY)
    supervised.start()
    process = receiving.start(die)
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run, "stop")
    with contextlib.suppress(requests.ConnectionError):
        receiving.send(envelope)
    assert process.wait(20) == -9
    receiving.start()
    receiving.wait_for(envelope, "executed")
    assert supervised.started[0].wait(20) == 3


def test_a_supervisor_killed_in_the_middle_of_a_rollback_is_followed_by_one_that_starts_the_plan(
    supervised: Supervised, receiving: Receiving
) -> None:
    supervised.write_toy(STUBBORN)
    supervised.start(grace=1.5)
    receiving.checkpoint()
    receiving.start()
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run)
    assert receiving.send(envelope).status_code == 202
    wait_until(lambda: supervised.phase() == "ending")
    supervised.started[0].kill()
    assert receiving.status(envelope)["status"] == "accepted"
    supervised.start(grace=1.5)
    supervised.wait_for("ready 1")
    receiving.wait_for(envelope, "executed")
    assert supervised.state().plan_id == "p1"
    assert "TWIN" not in supervised.lines()
    assert len(supervised.tree()) == 1


def test_a_run_that_restarted_by_itself_before_the_plan_was_written_is_left_alone(
    supervised: Supervised, receiving: Receiving
) -> None:
    supervised.write_toy(
        "say('ready', attempt)\nwhile attempt or not os.path.exists(os.environ['LOG'] + '.crash'): time.sleep(0.05)\nsys.exit(1)\n"
    )
    supervised.start(max_restarts=1)
    receiving.checkpoint()
    receiving.start("after accept")
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run)
    with pytest.raises(requests.ConnectionError):
        receiving.send(envelope)
    Path(f"{supervised.log}.crash").touch()
    supervised.wait_for("ready 1")
    receiving.start()
    said = receiving.wait_for(envelope, "failed")
    assert said["reason"] == "stale"
    assert supervised.run.ledger() is None
    assert supervised.ask("look").live.phase == "running"


def test_a_plan_that_was_written_but_not_ordered_takes_effect_at_the_next_crash_and_is_executed(
    supervised: Supervised, receiving: Receiving
) -> None:
    supervised.write_toy(
        "say('ready', attempt)\nwhile attempt or not os.path.exists(os.environ['LOG'] + '.crash'): time.sleep(0.05)\nsys.exit(1)\n"
    )
    supervised.start(max_restarts=1)
    receiving.checkpoint()
    receiving.start("after write_plan")  # the ledger entry is missing
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run)
    with pytest.raises(requests.ConnectionError):
        receiving.send(envelope)
    assert supervised.run.ledger() is None
    Path(f"{supervised.log}.crash").touch()
    supervised.wait_for("ready 1")
    assert supervised.state().plan_id == "p1"
    receiving.start()
    receiving.wait_for(envelope, "executed")
    ledger = supervised.run.ledger()
    assert ledger is not None
    assert [entry.plan_id for entry in ledger.entries] == ["p1"]


def test_a_plan_that_was_not_ordered_before_it_expired_is_taken_back(
    supervised: Supervised, receiving: Receiving
) -> None:
    supervised.write_toy(TOY)
    supervised.start()
    receiving.checkpoint()
    receiving.start("before restart")
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run, expires=2)
    with contextlib.suppress(requests.ConnectionError):
        receiving.send(envelope)
    assert receiving.started[0].wait(20) == -9
    time.sleep(2)
    receiving.start()
    assert receiving.wait_for(envelope, "expired")["reason"] == "expired"
    assert supervised.run.read_plans() == ([], [])
    ledger = supervised.run.ledger()
    assert ledger is not None
    assert ledger.entries == []
    live = supervised.ask("look").live
    assert (live.attempt, live.phase) == (0, "running")


def test_a_rollback_whose_supervisor_never_comes_back_fails_and_leaves_the_plan_for_the_next_start(
    supervised: Supervised, receiving: Receiving
) -> None:
    supervised.write_toy(STUBBORN)
    supervised.start(grace=1.5)
    receiving.checkpoint()
    receiving.start()
    supervised.wait_for("ready 0")
    envelope = receiving.envelope(supervised.run, expires=2)
    assert receiving.send(envelope).status_code == 202
    wait_until(lambda: supervised.phase() == "ending")
    supervised.started[0].kill()
    said = receiving.wait_for(envelope, "failed")
    assert said["reason"] == "unreachable"
    assert "next start applies it" in said["detail"]
    supervised.start()
    supervised.wait_for("ready 1")
    assert supervised.state().plan_id == "p1"


def test_two_receivers_with_ledgers_of_their_own_still_roll_back_once(
    supervised: Supervised, receiving: Receiving
) -> None:
    supervised.write_toy(STUBBORN)
    supervised.start(grace=1)
    receiving.checkpoint()
    receiving.start()
    first = receiving.url
    receiving.settings["db"] = str(receiving.base / "second.db")
    receiving.start()
    second = receiving.url
    supervised.wait_for("ready 0")
    receiving.url = first
    assert receiving.send(receiving.envelope(supervised.run)).status_code == 202
    receiving.url = second
    answer = receiving.send(receiving.envelope(supervised.run, plan_id="p2"))
    assert (answer.status_code, answer.json()["reason"]) == (409, "fenced")
    supervised.wait_for("ready 1")
    assert len(supervised.run.read_plans()[0]) == 1


def test_the_ledger_forgets_what_is_old_and_final(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    ledger.refuse("a", b"body", "p", "stale", "d", 100.0)
    ledger.forget(101.0)
    assert ledger.refusal("a", b"body") is not None
    ledger.forget(100.0 + 91 * 86400)
    assert ledger.refusal("a") is None
    ledger.close()


def test_the_local_scheduler_reads_the_end_of_a_run_whose_supervisor_is_gone(supervised: Supervised) -> None:
    assert supervised.start("true").wait(20) == 0
    situation = LocalScheduler().look(supervised.run)
    assert (situation.state, situation.attempt) == ("over", 0)
    assert "finished" in situation.cannot
