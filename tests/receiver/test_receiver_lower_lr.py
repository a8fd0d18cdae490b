"""The receiver passes a request for a lower learning rate on to the running attempt, once, and stops nothing for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.receiver.requested import Receiving, id_of
from tests.receiver.supervised import Supervised
from trainwarden.plan import Lowering, Target


def test_a_lowered_rate_is_a_plan_file_of_the_running_attempt_and_ends_nothing(
    running: Supervised, receiving: Receiving
) -> None:
    tree = running.tree()
    envelope = receiving.envelope(running.run, "lower_lr")
    assert receiving.send(envelope).status_code == 202
    executed = receiving.wait_for(envelope, "executed")
    [plan] = running.run.read_plans()[0]
    assert plan == envelope.data.plan
    assert plan.lowering == Lowering(factor=0.5, first_step=100, steps=50, return_steps=20)
    assert Path(executed["detail"]).stat().st_mode & 0o777 == 0o600
    assert running.tree() == tree
    assert running.run.ledger() is None
    assert receiving.send(envelope).json()["status"] == "duplicate"
    again = receiving.envelope(running.run, "lower_lr", at_step=200)
    assert receiving.send(again, id_of(again, 1)).json()["reason"] == "bad_plan"
    second = receiving.envelope(running.run, "lower_lr", lr_factor=0.25, plan_id="p2", at_step=200)
    assert receiving.send(second, id_of(second, 2)).status_code == 202
    assert receiving.send(receiving.envelope(running.run)).status_code == 202  # none of them took the fence


def test_a_lowered_rate_that_cannot_be_meant_or_comes_too_late_changes_nothing(
    running: Supervised, receiving: Receiving
) -> None:
    wrong: list[dict[str, Any]] = [
        {"at_step": None},
        {"lr_steps": 0},
        {"lr_factor": 1.0},
        {"reset_optimizer": True},
        {"target": Target(attempt=0, step=5, path=str(receiving.checkpoints / "step-5.bin"))},
    ]
    for fields in wrong:
        assert receiving.send(receiving.envelope(running.run, "lower_lr", **fields)).status_code == 400, fields
    next_one = receiving.envelope(running.run, "lower_lr", for_attempt=1)
    assert receiving.send(next_one).json()["reason"] == "bad_plan"
    late = receiving.envelope(running.run, "lower_lr", expires=-1)
    assert receiving.send(late).json()["reason"] == "expired"
    assert receiving.status(late)["status"] == "expired"
    stale = receiving.envelope(running.run, "lower_lr", attempt=3)
    assert receiving.send(stale).json()["reason"] == "stale"
    assert receiving.status(stale)["status"] == "refused"
    assert receiving.send(receiving.envelope(running.run, "lower_lr"), secret=f"whsec_{'A' * 44}").status_code == 401
    live = running.ask("look").live
    assert (live.attempt, live.phase, live.request_id) == (0, "running", None)
    assert running.run.read_plans() == ([], [])
