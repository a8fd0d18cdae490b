"""The receiver over real HTTP against a real supervised trainer: accepted, refused, duplicate, and what happens to the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
import requests

from tests.real import need_program, wait_until
from tests.receiver.requested import Receiving, fill, id_of, mounted, unmounted
from tests.receiver.supervised import TOY, Supervised
from trainwarden.plan import Ledger, LedgerEntry, Target
from trainwarden.webhook import encode_envelope


def untouched(supervised: Supervised) -> None:
    """The run is still in attempt 0, and nothing was written into its folder."""
    live = supervised.ask("look").live
    assert (live.attempt, live.phase, live.request_id) == (0, "running", None)
    assert not list(supervised.run.plan_folder.glob("*.json"))
    assert supervised.run.ledger() is None


def test_a_rollback_ends_the_attempt_writes_plan_and_ledger_and_starts_the_next(
    running: Supervised, receiving: Receiving
) -> None:
    old = running.tree()
    envelope = receiving.envelope(running.run)
    answer = receiving.send(envelope)
    assert (answer.status_code, answer.json()) == (202, {"status": "accepted", "id": id_of(envelope)})
    running.wait_for("ready 1")
    done = receiving.wait_for(envelope, "executed")
    assert done["plan_id"] == "p1"
    assert running.tree().isdisjoint(old)
    (plan,), refused = running.run.read_plans()
    assert (plan, refused) == (envelope.data.plan, [])
    ledger = running.run.ledger()
    assert ledger is not None
    assert ledger.entries == [LedgerEntry(plan_id="p1", for_attempt=1, target_step=5, skip_samples=[(640, 704)])]
    assert running.state().plan_id == "p1"
    assert running.state().restarts == 0
    assert "with plan p1" in running.said()


def test_a_repeated_delivery_is_a_duplicate_and_changes_nothing(running: Supervised, receiving: Receiving) -> None:
    envelope = receiving.envelope(running.run)
    assert receiving.send(envelope).status_code == 202
    receiving.wait_for(envelope, "executed")
    other = receiving.envelope(running.run, plan_id="p2")  # a second daemon: same id, another body
    for repeated in (envelope, other):
        answer = receiving.send(repeated)
        assert (answer.status_code, answer.json()["status"]) == (200, "duplicate")
    time.sleep(0.5)
    assert running.ask("look").live.attempt == 1


def test_of_many_requests_at_once_exactly_one_takes_effect(running: Supervised, receiving: Receiving) -> None:
    envelopes = [receiving.envelope(running.run, plan_id=f"p{n}") for n in range(4)]
    envelopes += [receiving.envelope(running.run, "stop", plan_id=f"s{n}") for n in range(2)]
    codes: list[int] = []
    threads = [threading.Thread(target=lambda e=e: codes.append(receiving.send(e).status_code)) for e in envelopes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) in ([200, 200, 200, 202, 409, 409], [200, 202, 409, 409, 409, 409])
    if codes.count(200) == 3:
        running.wait_for("ready 1")
        time.sleep(0.5)
        assert running.ask("look").live.attempt == 1
        assert len(running.run.read_plans()[0]) == 1
    else:
        assert running.started[0].wait(20) == 3


def test_the_first_ending_action_of_an_attempt_fences_the_other(running: Supervised, receiving: Receiving) -> None:
    assert receiving.send(receiving.envelope(running.run)).status_code == 202
    answer = receiving.send(receiving.envelope(running.run, "stop"))
    assert (answer.status_code, answer.json()["reason"]) == (409, "fenced")


def test_a_stop_ends_the_attempt_and_the_supervisor(running: Supervised, receiving: Receiving) -> None:
    envelope = receiving.envelope(running.run, "stop")
    assert receiving.send(envelope).status_code == 202
    assert running.started[0].wait(20) == 3
    receiving.wait_for(envelope, "executed")
    assert running.tree() == set()
    assert running.run.ledger() is None


def test_a_pin_is_recorded_and_takes_no_fence(running: Supervised, receiving: Receiving) -> None:
    pin = receiving.envelope(running.run, "pin")
    assert receiving.send(pin).status_code == 202
    receiving.wait_for(pin, "executed")
    untouched(running)
    assert receiving.send(receiving.envelope(running.run)).status_code == 202


def test_a_wrong_signature_is_401_and_leaves_no_trace(running: Supervised, receiving: Receiving) -> None:
    envelope = receiving.envelope(running.run)
    wrong = "whsec_" + "A" * 44
    assert receiving.send(envelope, secret=wrong).status_code == 401
    assert requests.post(f"{receiving.url}/webhook", data=encode_envelope(envelope), timeout=10).status_code == 401
    assert receiving.status(envelope)["status"] == "unknown"
    untouched(running)
    assert receiving.send(envelope).status_code == 202


def test_a_body_that_is_no_request_is_400_and_one_too_large_413(running: Supervised, receiving: Receiving) -> None:
    assert receiving.send(b'{"type": "training.dance.requested"}', "x").status_code == 400
    naive = receiving.envelope(running.run)
    timeless = msgspec.structs.replace(naive, data=msgspec.structs.replace(naive.data, expires_at="soon"))
    assert receiving.send(timeless).status_code == 400
    assert receiving.send(b"x" * 300_000, "x").status_code == 413
    untouched(running)


def test_each_refusal_says_why_and_the_run_goes_on(running: Supervised, receiving: Receiving, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"weights")
    (receiving.checkpoints / "empty").mkdir()
    here = receiving.checkpoints / "step-5.bin"

    def target(path: object, step: int = 5) -> Target:
        return Target(attempt=0, step=step, path=str(path))

    cases = {
        "expired": {"expires": -1},
        "stale": {"attempt": 3},
        "bad_plan": {"for_attempt": 7},
        "no_target": {"target": None},
        "outside_roots": {"target": target(outside)},
        "unreadable_target": {"target": target(receiving.checkpoints / "empty")},
    }
    for reason, changes in cases.items():
        envelope = receiving.envelope(running.run, **changes)  # type: ignore[arg-type]
        answer = receiving.send(envelope)
        assert (answer.status_code, answer.json()["reason"]) == (409, reason), answer.text
        said = receiving.status(envelope)
        assert said["status"] == ("expired" if reason == "expired" else "refused")
        untouched(running)
    for changes in (
        {"run_uid": "other"},
        {"fallback_targets": [target(here), Target(attempt=9, step=1, path=str(here))]},
    ):
        answer = receiving.send(receiving.envelope(running.run, **changes))  # type: ignore[arg-type]
        assert (answer.status_code, answer.json().get("reason")) == (409, "bad_plan"), (changes, answer.text)
    for changes in ({"plan_id": "../../evil"}, {"lr_factor": 2.0}, {"skip_samples": [(5, 5)]}):
        assert receiving.send(receiving.envelope(running.run, **changes)).status_code == 400  # type: ignore[arg-type]
    untouched(running)
    # None of them took the fence.
    assert receiving.send(receiving.envelope(running.run)).status_code == 202


def test_a_refusal_is_final_for_its_body_and_another_plan_may_follow(running: Supervised, receiving: Receiving) -> None:
    missing = receiving.checkpoints / "late.bin"
    envelope = receiving.envelope(running.run, target=Target(attempt=0, step=5, path=str(missing)))
    assert receiving.send(envelope).json()["reason"] == "unreadable_target"
    missing.write_bytes(b"there now")
    again = receiving.send(envelope)
    assert (again.status_code, again.json()["reason"]) == (409, "unreadable_target")
    other = receiving.envelope(running.run, target=Target(attempt=0, step=5, path=str(missing)), plan_id="p2")
    assert receiving.send(other).status_code == 202
    running.wait_for("ready 1")


def test_an_id_cannot_be_used_for_something_else(running: Supervised, receiving: Receiving) -> None:
    first = receiving.envelope(running.run)
    assert receiving.send(first).status_code == 202
    stop = receiving.envelope(running.run, "stop")
    assert receiving.send(stop, id_of(first)).json()["reason"] == "id_reused"


def test_a_request_for_the_attempt_before_is_stale(running: Supervised, receiving: Receiving) -> None:
    first = receiving.envelope(running.run)
    receiving.send(first)
    receiving.wait_for(first, "executed")
    late = receiving.envelope(running.run, "lower_lr")
    assert receiving.send(late).json()["reason"] == "stale"


def test_a_plan_whose_number_was_taken_by_a_start_without_a_supervisor_is_stale(
    running: Supervised, receiving: Receiving
) -> None:
    (running.run.path / "attempt-1").mkdir()
    answer = receiving.send(receiving.envelope(running.run))
    assert answer.json()["reason"] == "stale"
    assert "the next start will be attempt 2" in answer.json()["detail"]
    untouched(running)


def test_an_abandoned_checkpoint_is_refused(running: Supervised, receiving: Receiving) -> None:
    identity = running.run.identity()
    assert identity is not None
    entry = LedgerEntry(plan_id="old", for_attempt=1, target_step=3)
    running.run.write_ledger(Ledger(run_uid=identity.run_uid, entries=[entry]))
    assert receiving.send(receiving.envelope(running.run)).json()["reason"] == "abandoned_target"


def test_unknown_and_foreign_runs_are_refused(running: Supervised, receiving: Receiving, tmp_path: Path) -> None:
    envelope = receiving.envelope(running.run)
    for changes in ({"run": "other"}, {"run": "../toy"}, {"run_uid": "other"}):
        data = msgspec.structs.replace(envelope.data, **changes)
        answer = receiving.send(msgspec.structs.replace(envelope, data=data))
        assert (answer.status_code, answer.json()["reason"]) == (409, "unknown_run"), changes
    untouched(running)


def test_a_run_whose_supervisor_does_not_answer_is_refused(running: Supervised, receiving: Receiving) -> None:
    running.started[0].kill()
    answer = receiving.send(receiving.envelope(running.run))
    assert (answer.status_code, answer.json()["reason"]) == (409, "unreachable")


def test_a_run_whose_command_is_gone_is_never_stopped(supervised: Supervised, receiving: Receiving) -> None:
    supervised.write_toy(TOY)
    command = supervised.run.path.parent / "train"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} {supervised.toy}\n")
    command.chmod(0o755)
    supervised.start(str(command))
    supervised.wait_for("ready 0")
    receiving.checkpoint()
    receiving.start()
    command.unlink()
    answer = receiving.send(receiving.envelope(supervised.run))
    assert (answer.status_code, answer.json()["reason"]) == (409, "not_restartable")
    untouched(supervised)


def test_a_torn_checkpoint_is_refused_and_a_whole_one_taken(running: Supervised, receiving: Receiving) -> None:
    whole = receiving.checkpoints / "whole.pt"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    torn = receiving.checkpoints / "torn.pt"
    torn.write_bytes(whole.read_bytes()[:-100])
    answer = receiving.send(receiving.envelope(running.run, target=Target(attempt=0, step=5, path=str(torn))))
    assert answer.json()["reason"] == "unreadable_target"
    assert "did not finish" in answer.json()["detail"]
    untouched(running)
    good = receiving.envelope(running.run, target=Target(attempt=0, step=5, path=str(whole)))
    assert receiving.send(good).status_code == 202


def test_a_relative_path_starts_from_the_trainers_folder(supervised: Supervised, receiving: Receiving) -> None:
    supervised.write_toy(TOY)
    receiving.checkpoint()
    before = Path.cwd()
    try:
        os.chdir(receiving.base)
        supervised.start()
    finally:
        os.chdir(before)
    supervised.wait_for("ready 0")
    receiving.start()
    target = Target(attempt=0, step=5, path="checkpoints/step-5.bin")
    assert receiving.send(receiving.envelope(supervised.run, target=target)).status_code == 202


def test_a_plan_that_does_not_fit_on_the_disk_is_refused_and_the_run_goes_on(
    supervised: Supervised, receiving: Receiving, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    if not mounted(small, "512k"):
        pytest.skip("this user may not mount a small file system: a full disk cannot be tried")
    crowded = Supervised(small)
    try:
        crowded.log = supervised.log
        crowded.toy = supervised.toy
        crowded.write_toy(TOY)
        crowded.start()
        crowded.wait_for("ready 0")
        receiving.settings["roots"] = [str(small), str(receiving.base)]
        receiving.checkpoint()
        receiving.start()
        fill(small)
        answer = receiving.send(receiving.envelope(crowded.run))
        assert (answer.status_code, answer.json()["reason"]) == (409, "no_space"), answer.text
        untouched(crowded)
        (small / "filler").unlink()
        assert receiving.send(receiving.envelope(crowded.run, plan_id="p2")).status_code == 202
        crowded.wait_for("ready 1")
    finally:
        crowded.end()
        unmounted(small)


def test_pages_for_machines_are_clean_and_count(running: Supervised, receiving: Receiving) -> None:
    promtool = need_program("promtool")
    receiving.send(receiving.envelope(running.run, attempt=3))
    assert requests.get(f"{receiving.url}/-/healthy", timeout=10).status_code == 200
    assert requests.get(f"{receiving.url}/-/ready", timeout=10).status_code == 200
    page = requests.get(f"{receiving.url}/metrics", timeout=10).text
    checked = subprocess.run([promtool, "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert 'trainwarden_receiver_requests_total{answer="refused"} 1.0' in page
    assert 'trainwarden_receiver_refusals_total{reason="stale"} 1.0' in page
    assert 'trainwarden_receiver_refusals_total{reason="no_space"} 0.0' in page


def test_a_second_receiver_of_the_same_database_does_not_start(running: Supervised, receiving: Receiving) -> None:
    with pytest.raises(AssertionError, match="another receiver has this database"):
        receiving.start()


def test_a_receiver_ends_on_sigterm(running: Supervised, receiving: Receiving) -> None:
    receiving.started[0].send_signal(signal.SIGTERM)
    assert receiving.started[0].wait(20) == 0
    wait_until(lambda: running.phase() == "running")
