"""Ranks lower the learning rate at the same step, all or none of them; replicas stay replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exporter.ranks.harness import Ended, records, run
from tests.exporter.runs import events
from trainwarden.plan import Lowering

#: A DDP run of small steps. ``ask(at_step)`` writes the plan on rank 0; ``go(last)`` trains up to a step, ``wait`` before each.
BODY = """
from torch.nn.parallel import DistributedDataParallel
from tests.exporter.test_soft import ask as write
model = make()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
exporter = watch(ddp, optimizer, folder)
soft, side = exporter._parts.soft, exporter._parts.side

def ask(at_step, **fields):
    if rank == 0:
        write(folder, at_step, **fields)

def go(last, wait=0.02):
    while exporter.global_step < last:
        step = exporter.global_step + 1
        optimizer.zero_grad()
        loss = loss_of(ddp, 10 * step + rank)
        loss.backward()
        optimizer.step()
        schedule.step()
        exporter.step(loss)
        time.sleep(wait)

def ended():
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    mine = [weights.clone() for _ in range(world)]
    dist.all_gather(mine, weights)
    hooked = optimizer.step.__name__ if hasattr(optimizer.step, "__name__") else ""
    exporter.close()
    say(same=all(torch.equal(mine[0], each) for each in mine), notices=exporter.notices)
"""


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [event.fields for event in events(folder, "lower_lr", rank=rank)]


def rates(folder: Path, rank: int) -> list[float | None]:
    return [record.value("lr") for record in records(folder, rank)]


def nothing_lowered(folder: Path, each: Ended) -> None:
    assert each.said["same"], each.said
    for record in records(folder, each.rank):
        assert record.value("lr") == pytest.approx(0.01 / (1 + 0.01 * (record.step - 1)))


@pytest.mark.slow
def test_two_ranks_agree_lower_the_rate_at_the_same_step_and_stay_one_model(tmp_path: Path) -> None:
    body = """
    until(lambda: side.rounds > 0)
    dist.barrier()
    ask(at_step=300, lr_steps=20, lr_return_steps=10)
    go(360)
    ended()
    """
    lowering = Lowering(factor=0.25, first_step=300, steps=20, return_steps=10)
    for each in run(BODY + _dedented(body), tmp_path, world=2):
        assert each.said["same"]
        assert each.said["notices"] == []
        assert [fields["state"] for fields in told(tmp_path, each.rank)] == ["began", "returns", "ended"]
        wanted = [0.01 / (1 + 0.01 * (step - 1)) * lowering.at(step) for step in range(1, 361)]
        assert rates(tmp_path, each.rank) == pytest.approx(wanted)


@pytest.mark.slow
def test_a_rank_that_never_reads_the_plan_keeps_all_from_it(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        soft.look = exporter._parts.drain.look = lambda: None
    until(lambda: side.rounds > 0)
    dist.barrier()
    ask(at_step=200)
    go(240)
    ended()
    """
    for each in run(BODY + _dedented(body), tmp_path, world=2):
        nothing_lowered(tmp_path, each)
    [refused] = told(tmp_path, 0)
    assert refused["state"] == "not_applied"
    assert "not every rank had read it" in refused["reason"]
    assert told(tmp_path, 1) == []


@pytest.mark.slow
def test_a_plan_that_comes_late_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    body = """
    until(lambda: side.rounds > 0)
    go(50)
    dist.barrier()
    ask(at_step=60)
    go(150)
    ended()
    """
    for each in run(BODY + _dedented(body), tmp_path, world=2):
        nothing_lowered(tmp_path, each)
        assert [fields["state"] for fields in told(tmp_path, each.rank)] == ["not_applied"]


@pytest.mark.slow
def test_one_rank_whose_optimizer_has_no_rate_keeps_all_from_it(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        soft._cannot = lambda: "Own has a group without lr"
    until(lambda: side.rounds > 0)
    dist.barrier()
    ask(at_step=400)
    until(lambda: bool(exporter.notices), 20)
    go(430, wait=0.001)
    ended()
    """
    for each in run(BODY + _dedented(body), tmp_path, world=2):
        nothing_lowered(tmp_path, each)
        [refused] = told(tmp_path, each.rank)
        why = "Own has a group without lr" if each.rank == 1 else "another rank cannot change its learning rate"
        assert refused["reason"] == why


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["switched off", "closed on the way"])
def test_ranks_without_a_side_group_cannot_agree_and_change_nothing(tmp_path: Path, closed: str) -> None:
    body = """
    if side is not None:
        until(lambda: side.rounds > 0)
        if rank == 0:
            soft._margin = lambda: 0 if soft._asked is None else 10 ** 6  # it has read, and does not offer any more
    dist.barrier()
    ask(at_step=3000)
    if side is not None:
        until(lambda: rank == 0 or soft._asked is not None)
        dist.barrier()
        side.leave()
    until(lambda: bool(exporter.notices), 20)
    go(20)
    ended()
    """
    environment = {"TRAINWARDEN_SIDE_GROUP": "0"} if closed == "switched off" else {}
    for each in run(BODY + _dedented(body), tmp_path, world=2, environment=environment):
        nothing_lowered(tmp_path, each)
        assert {fields["state"] for fields in told(tmp_path, each.rank)} == {"not_applied"}
    assert "side group" in told(tmp_path, 1)[0]["reason"]


def _dedented(body: str) -> str:
    import textwrap

    return textwrap.dedent(body)
