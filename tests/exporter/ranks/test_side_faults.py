"""What befalls one rank costs the others values, never time: a rank that is dense, slow, stopped, killed, absent, or switched off."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.exporter.ranks.harness import Ranks, close, records, run
from tests.exporter.runs import events
from tests.real import wait_until
from trainwarden.exporter.across import Layout
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.side import SideGroup

#: Longest time of ours in one step of the trainer's, in seconds.
MOST = 0.05

#: Ranks that train each for itself, so that the others go on where one does not. ``ours()`` is the time that this thread ran or
#: waited for something, without that in which it could have run and the machine gave its processor to others.
ALONE = """
def ours():
    ran, waited, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return time.perf_counter() - waited / 1e9

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
exporter = watch(model, optimizer, folder, side_timeout=2.0)
most = 0.0

def step(number, each=lambda: None):
    global most
    optimizer.zero_grad()
    loss = loss_of(model, 10 * number + rank)
    loss.backward()
    each()
    before, watched = ours(), exporter._parts.observer.seconds
    began = time.perf_counter()
    optimizer.step()  # its hooks are ours
    exporter.step(loss)
    waiting = (time.perf_counter() - began) - (ours() - before)
    most = max(most, exporter._parts.observer.seconds - watched - waiting)
"""

#: They say that they are ready once some steps are combined, go on until the side group is closed by what befalls one of them, and for some steps more.
UNTIL_IT_IS_CUT = (
    ALONE
    + """
side = exporter._parts.side
until(lambda: side.rounds > 2)
number, ready = 0, False
while side.open and number < 3000:
    number += 1
    step(number)
    if not ready and side.combined > 20:
        ready = True
        say(ready=True)
    time.sleep(0.01)
for number in range(number + 1, number + 20):
    step(number)
exporter.close()
say(most=most, open=side.open, notices=exporter.notices, last=number)
"""
)


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_the_others_no_step(tmp_path: Path) -> None:
    with Ranks(UNTIL_IT_IS_CUT, tmp_path) as ranks:
        for rank in range(4):
            ranks.wait_said(rank, "ready")
        ranks.kill(2)
        ended = ranks.wait()
    assert [each.code for each in ended] == [0, 0, -signal.SIGKILL, 0]
    for each in (ended[0], ended[1], ended[3]):
        assert each.said["most"] < MOST
        assert not each.said["open"]
        assert len(each.said["notices"]) == 1
        assert each.said["notices"][0].startswith("side group: ")
        own = records(tmp_path, each.rank)
        assert [one.step for one in own] == list(range(1, each.said["last"] + 1))  # none is lost
        assert own[10].ranks["loss"].n == 4
        assert not own[-1].ranks
        closed = events(tmp_path, "side_group", rank=each.rank)
        assert [event.fields["open"] for event in closed] == [False]
        assert own[-1].value("loss") == own[-1].value("rank_loss")


@pytest.mark.slow
def test_a_rank_that_stands_still_times_out_once_and_costs_the_others_no_step(tmp_path: Path) -> None:
    with Ranks(UNTIL_IT_IS_CUT, tmp_path, world=3) as ranks:
        for rank in range(3):
            ranks.wait_said(rank, "ready")
        ranks.kill(1, signal.SIGSTOP)
        said = [ranks.wait_said(rank, "last") and ranks.said(rank) for rank in (0, 2)]
    for rank, own in zip((0, 2), said, strict=True):
        assert own["most"] < MOST
        assert not own["open"]
        assert len(own["notices"]) == 1
        assert [one.step for one in records(tmp_path, rank)] == list(range(1, own["last"] + 1))


@pytest.mark.slow
def test_a_rank_that_is_slow_or_dense_alone_changes_no_value(tmp_path: Path) -> None:
    body = """
from torch.distributed.fsdp import fully_shard
for name in ("usual", "odd"):
    model = fully_shard(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dense = name == "odd" and rank == 2
    exporter = watch(model, optimizer, folder, run=name, cadence=1 if dense else 10)
    for step in range(1, 101):
        optimizer.zero_grad()
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
        if name == "odd" and step == 50 and rank == 1:
            time.sleep(2.0)
    exporter.close()
    say(**{name: exporter.notices})
"""
    ended = run(body, tmp_path)
    assert [each.said for each in ended] == [{"usual": [], "odd": []}] * 4
    for rank in range(4):
        usual, odd = (records(tmp_path, rank, name) for name in ("usual", "odd"))
        assert len(usual) == len(odd) == 100
        for one, other in zip(usual, odd, strict=True):
            for name in ("loss", "grad_norm", "weight_rms", "update_ratio", "grad_zero_ratio", "update_applied_ratio"):
                assert close(one.signals.get(name), other.signals.get(name), 1e-12), (one.step, name)
            due = one.step == 1 or one.step % 10 == 0
            assert ("weight_rms" in other.signals) == due  # what one rank alone measured is not global
            assert other.ranks["loss"].n == 4


@pytest.mark.slow
def test_a_rank_without_an_exporter_is_said_once_and_costs_the_others_what_is_global(tmp_path: Path) -> None:
    body = """
import trainwarden.exporter.side as side
from torch.distributed.fsdp import fully_shard
side.JOIN_SECONDS = 3.0
model = fully_shard(make())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
exporter = watch(model, optimizer, folder)
until = time.monotonic() + 5.0
for step in range(1, 31):
    optimizer.zero_grad()
    loss = loss_of(model, 10 * step + rank)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    exporter.step(loss)
    if rank == 0 and step == 10:
        while exporter._parts.side.open and time.monotonic() < until:
            time.sleep(0.05)
another = dist.new_group(list(range(world)))  # its name must be the same on all ranks
dist.all_reduce(torch.ones(1), group=another)
exporter.close()
say(notices=exporter.notices)
"""
    ended = run(body, tmp_path, of_rank={3: {"TRAINWARDEN_DISABLE": "1"}})
    assert [len(each.said["notices"]) for each in ended] == [1, 1, 1, 0]
    assert "not all 4 ranks" in ended[0].said["notices"][0]
    own = records(tmp_path, 1)
    assert len(own) == 30
    for one in own:
        assert one.value("loss") == one.value("rank_loss")
        assert {
            "grad_norm",
            "weight_rms",
            "moment_rms",
            "update_ratio",
            "update_applied_ratio",
            "grad_zero_ratio",
        }.isdisjoint(one.signals)
        assert one.value("rank_grad_norm") is not None
        assert one.value("clip_ratio") is not None  # the trainer's own norm was whole
    assert not records(tmp_path, 3)


@pytest.mark.slow
def test_that_it_was_never_made_is_an_event_however_early_that_is_known(tmp_path: Path) -> None:
    body = """
import threading
from trainwarden.exporter.side import SideGroup

def refuse(side):
    raise RuntimeError("no way through")

def start_and_wait(side):
    threading.Thread.start(side)
    side.join()

SideGroup._join, SideGroup.start = refuse, start_and_wait
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
exporter = watch(model, optimizer, folder)
loss_of(model, 1).backward()
optimizer.step()
exporter.step()
exporter.close()
dist.barrier()  # rank 0 holds the store in which the other one finds who this start is
"""
    for each in run(body, tmp_path, world=2):
        (event,) = events(tmp_path, "side_group", rank=each.rank)
        assert event.fields == {"open": False, "reason": "no way through"}


@pytest.mark.slow
def test_the_side_group_can_be_switched_off_on_one_rank_or_all(tmp_path: Path) -> None:
    body = """
for name in ("all", "one"):
    if name == "one" and rank == 2:
        os.environ["TRAINWARDEN_SIDE_GROUP"] = "0"
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exporter = watch(model, optimizer, folder, run=name, side_group=name == "one")
    side = exporter._parts.side
    for step in range(1, 11):
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    limit = time.monotonic() + 20.0
    while side is not None and side.open and time.monotonic() < limit:
        time.sleep(0.01)
    exporter.close()
    say(**{name: [side is not None, side is not None and side.open, exporter.notices]})
    dist.barrier()  # rank 0 holds the store through which the others agree
"""
    ended = run(body, tmp_path, world=3)
    for each in ended:
        assert each.said["all"] == [False, False, []]
        made, still_open, notices = each.said["one"]
        assert (made, still_open) == (each.rank != 2, False)
        assert [notice.partition(": it is closed")[0] for notice in notices] == (
            ["side group: it is turned off on rank 2"] if made else []
        )
        for name in ("all", "one"):
            own = records(tmp_path, each.rank, name)
            assert len(own) == 10
            assert all(one.value("loss") == one.value("rank_loss") and not one.ranks for one in own)


@pytest.mark.slow
def test_closing_does_not_wait_for_a_rank_that_stands_still(tmp_path: Path) -> None:
    body = """
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
exporter = watch(model, optimizer, folder, side_timeout=60.0)
until = time.monotonic() + 30
while exporter._parts.side.rounds < 2 and time.monotonic() < until:
    time.sleep(0.01)
say(ready=True)
while not (folder / "stopped").exists() and time.monotonic() < until:
    time.sleep(0.01)
for step in range(1, 11):
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    exporter.step(loss)
began = time.monotonic()
exporter.close()
say(closing=time.monotonic() - began, notices=exporter.notices)
sys.exit(0)
"""
    with Ranks(body, tmp_path, world=2) as ranks:
        for rank in range(2):
            ranks.wait_said(rank, "ready")
        ranks.kill(1, signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        assert ranks.wait_said(0, "closing") < 10.0  # not the 60 seconds of a round
        wait_until(lambda: ranks.processes[0].poll() is not None, 30.0)
        assert ranks.processes[0].returncode == 0
        assert ranks.said(0)["notices"] == []
    assert [one.step for one in records(tmp_path, 0)] == list(range(1, 11))


@pytest.mark.slow
def test_the_process_group_may_be_destroyed_before_the_exporter_is_closed(tmp_path: Path) -> None:
    body = (
        ALONE
        + """
side = exporter._parts.side
until(lambda: side.rounds > 1)
for number in range(1, 11):
    step(number)
dist.destroy_process_group()
for number in range(11, 21):
    step(number)
say(before=exporter.notices)
if rank == 0:
    exporter.close()
sys.exit(0)  # the others are closed by the interpreter's exit
"""
    )
    ended = run(body, tmp_path)
    assert [each.said["before"] for each in ended] == [[]] * 4
    for rank in range(4):
        own = records(tmp_path, rank)
        assert [one.step for one in own] == list(range(1, 21))
        assert [one.ranks["loss"].n for one in own] == [4] * 20


def test_a_side_group_that_was_never_started_can_be_left() -> None:
    side = SideGroup(0, 2, "key", Layout({}), "signature", 1.0, Notices(), lambda alike, all_alike: None)
    side.leave()
    assert side.take(1) is None
