"""A probe goes through a real receiver: it ends the attempt that runs, takes its fence, and the next one begins under it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from tests.receiver.requested import Receiving
from tests.receiver.supervised import Supervised
from trainwarden.plan import Probe, Target
from trainwarden.receiver.ledger import Ledger, Row

ASKED = Probe(kind="replay", first_step=8, steps=20, samples=[(640, 704)])


def probe(receiving: Receiving, running: Supervised, **fields: Any) -> Any:
    target = Target(attempt=0, step=5, path=str(receiving.checkpoints / "step-5.bin"))
    return receiving.envelope(running.run, "probe", **{"skip_samples": [], "target": target, "probe": ASKED, **fields})


def test_a_probe_ends_the_attempt_and_the_next_one_begins_under_it(running: Supervised, receiving: Receiving) -> None:
    envelope = probe(receiving, running)
    assert receiving.send(envelope).status_code == 202
    running.wait_for("ready 1")
    receiving.wait_for(envelope, "executed")
    (plan,), refused = running.run.read_plans()
    assert (plan.probe, refused) == (ASKED, [])
    ledger = running.run.ledger()
    assert ledger is not None
    assert [(entry.for_attempt, entry.target_step) for entry in ledger.entries] == [(1, 5)]
    assert running.ask("look").live.plan_id == plan.plan_id
    assert receiving.send(envelope).json()["status"] == "duplicate"
    assert "TWIN" not in running.lines()


def test_the_first_of_a_probe_and_a_rollback_ends_the_attempt_and_the_other_is_fenced(
    running: Supervised, receiving: Receiving
) -> None:
    envelope = probe(receiving, running)
    assert receiving.send(envelope).status_code == 202
    for action in ("rollback", "stop"):
        late = receiving.send(receiving.envelope(running.run, action))
        assert (late.status_code, late.json()["reason"]) == (409, "fenced")
    running.wait_for("ready 1")
    receiving.wait_for(envelope, "executed")
    # What follows from its answer ends the probe's own attempt.
    rollback = receiving.envelope(running.run, attempt=1, plan_id="p2")
    assert receiving.send(rollback).status_code == 202
    running.wait_for("ready 2")
    late = receiving.send(probe(receiving, running, plan_id="p3"))
    assert late.json() == {**late.json(), "status": "duplicate"}


def test_a_probe_is_verified_as_a_rollback_is_before_anything_is_stopped(
    running: Supervised, receiving: Receiving
) -> None:
    tree = running.tree()
    missing = Target(attempt=0, step=5, path=str(receiving.checkpoints / "gone.bin"))
    outside = Target(attempt=0, step=5, path="/etc/hostname")
    for target, reason in ((missing, "unreadable_target"), (outside, "outside_roots")):
        answer = receiving.send(probe(receiving, running, target=target))
        assert (answer.status_code, answer.json()["reason"]) == (409, reason)
    for wrong in ({"target": None}, {"probe": None}, {"skip_samples": [(640, 704)]}):
        assert receiving.send(probe(receiving, running, **wrong)).status_code == 400, wrong
    assert running.tree() == tree
    assert running.run.ledger() is None
    assert receiving.send(probe(receiving, running)).status_code == 202  # refusals took no fence


def test_a_database_in_which_probes_ended_nothing_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "receiver.db"
    Ledger(path).close()
    older = sqlite3.connect(path)
    older.execute("DROP INDEX ending")
    older.execute("CREATE UNIQUE INDEX fence ON requests (run_uid, attempt) WHERE action IN ('rollback', 'stop')")
    for name, action, status in (("a", "probe", "accepted"), ("b", "probe", "executed"), ("c", "rollback", "executed")):
        values = (name, "u", "r", 0, action, "p", "f", b"", status, "", "", 1.0, 1.0)
        older.execute(f"INSERT INTO requests VALUES ({', '.join('?' * len(values))})", values)
    older.commit()
    older.close()
    ledger = Ledger(path)
    assert ledger.winner("u", 0) == "c"
    assert ledger.pending() == []
    row = Row(id="d", run_uid="u", run="r", attempt=1, action="probe", plan_id="p", folder="f", body=b"", status="accepted", received=2.0, updated=2.0)  # fmt: skip
    ledger.accept(row)
    assert ledger.winner("u", 1) == "d"
    ledger.close()
    Ledger(path).close()


def test_a_supervised_command_is_told_which_hosts_to_leave_out(supervised: Supervised, receiving: Receiving) -> None:
    supervised.write_toy(
        "say('hosts', attempt, os.environ['TRAINWARDEN_EXCLUDE_HOSTS'] or 'none')\nsay('ready', attempt)\n"
        "while True: time.sleep(0.05)\n"
    )
    supervised.start()
    receiving.checkpoint()
    receiving.start()
    supervised.wait_for("ready 0")
    elsewhere = Probe(kind="other_host", first_step=8, steps=20)
    envelope = probe(receiving, supervised, probe=elsewhere, exclude_hosts=["h7", "h9"])
    assert receiving.send(envelope).status_code == 202
    supervised.wait_for("ready 1")
    receiving.wait_for(envelope, "executed")
    assert receiving.send(receiving.envelope(supervised.run, attempt=1, plan_id="p2")).status_code == 202
    supervised.wait_for("ready 2")  # they hold for all later attempts
    told = [line for line in supervised.lines() if line.startswith("hosts")]
    assert told == ["hosts 0 none", "hosts 1 h7,h9", "hosts 2 h7,h9"]
