"""Several ranks save a damaged state after the same step, or none of them does: nobody is waited for that does not come."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.exporter.quarantines import ask, copy_of, outcome
from tests.exporter.ranks.harness import Ranks, records
from tests.exporter.runs import events
from tests.real import wait_until
from trainwarden.exporter.forensics import load
from trainwarden.exporter.forensics_agreed import Agreement
from trainwarden.runfolder import RunFolder

#: Trains until the file "stop" is there, which rank 0 decides for all; the function that saves issues a collective.
BODY = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
from trainwarden.exporter import forensics
forensics.AHEAD_SECONDS = 1.0
model = make()
if os.environ.get("SHARDED"):
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
exporter = watch(model, optimizer, folder, run="run")
saved = []

def save(path):
    dist.barrier()  # hangs where a rank does not come
    if os.environ.get("SHARDED"):
        import torch.distributed.checkpoint as dcp
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    elif rank == 0:
        torch.save(model.state_dict(), path / "state.pt")
    if os.environ.get("FAILS"):
        raise RuntimeError("no room here")
    saved.append(exporter.global_step)

if not os.environ.get("APART"):
    exporter.forensics(save)
say(started=True)
step = 0
while True:
    step += 1
    optimizer.zero_grad()
    loss = loss_of(model, step % 50)
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    time.sleep(0.005)
    over = torch.tensor(int((folder / "stop").exists()))
    dist.broadcast(over, 0)
    if over:
        break
exporter.close()
say(saved=saved, notices=exporter.notices, steps=step)
dist.destroy_process_group()
"""


def ended(ranks: Ranks, folder: Path) -> list[list[int]]:
    """Let the ranks end, and return after which steps each of them saved."""
    (folder / "stop").touch()
    found = ranks.wait()
    assert [each.code for each in found] == [0] * len(found), ranks._all()
    return [each.said["saved"] for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["", "1"])
def test_all_ranks_save_after_the_same_step_and_each_leaves_its_part(tmp_path: Path, sharded: str) -> None:
    with Ranks(BODY, tmp_path, world=2, environment={"SHARDED": sharded}) as ranks:
        ranks.wait_said(1, "started")
        wait_until(lambda: len(records(tmp_path)) > 20, 60, what="the ranks train")
        ask(tmp_path)
        assert outcome(tmp_path, seconds=60)["saved"] is True, ranks._all()
        first, second = ended(ranks, tmp_path)
    assert first == second
    assert len(first) == 1
    copy = copy_of(tmp_path)
    for rank in (0, 1):
        found = load(copy, rank)
        assert found.step == first[0]
        assert found.positions.rank == rank
        [seen] = [line for line in records(tmp_path, rank) if line.step == found.step]
        assert found.seen(found.step).number("loss") == seen.value("loss")
    [event] = events(tmp_path, "checkpoint")
    assert event.fields["quarantined"] is True
    assert event.step == first[0]
    assert (copy / "checkpoint" / (".metadata" if sharded else "state.pt")).exists()


@pytest.mark.slow
def test_a_rank_that_takes_no_part_keeps_the_others_from_saving_and_from_hanging(tmp_path: Path) -> None:
    with Ranks(BODY, tmp_path, world=2, of_rank={1: {"APART": "1"}}) as ranks:
        wait_until(lambda: len(records(tmp_path)) > 20, 60, what="the ranks train")
        ask(tmp_path)
        found = outcome(tmp_path, seconds=60)
        assert found["saved"] is False
        assert "absent: 1" in found["error"]
        assert ended(ranks, tmp_path) == [[], []]
    left = RunFolder("run", tmp_path).quarantine_folder
    assert not copy_of(tmp_path).exists()
    assert not list(left.glob("*.partial"))


@pytest.mark.slow
def test_a_rank_that_fails_takes_the_copy_of_all_with_it(tmp_path: Path) -> None:
    with Ranks(BODY, tmp_path, world=2, of_rank={1: {"FAILS": "1"}}) as ranks:
        wait_until(lambda: len(records(tmp_path)) > 20, 60, what="the ranks train")
        ask(tmp_path)
        assert outcome(tmp_path, seconds=60)["error"] == "rank 1: RuntimeError: no room here"
        first, second = ended(ranks, tmp_path)
    assert (len(first), second) == (1, [])
    assert not copy_of(tmp_path).exists()


def test_the_first_to_get_there_decides_for_all_and_once(tmp_path: Path) -> None:
    for number in range(40):
        ranks = [Agreement(tmp_path, number, rank, 3) for rank in range(3)]
        ranks[0].prepare()
        ranks[0].armed()
        ranks[1].armed()
        late = number % 2 == 0
        if not late:
            ranks[2].armed()
        assert ranks[0].absent() == ([2] if late else [])
        gate, answers = threading.Barrier(3), [False, False, False]

        def go(
            rank: int, gate: threading.Barrier = gate, answers: list[bool] = answers, ranks: list[Agreement] = ranks
        ) -> None:
            gate.wait()
            if rank == 2:
                ranks[2].armed()  # says so at the very moment at which the others decide
            answers[rank] = ranks[rank].decide()

        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(answers)) == 1, number
        assert late or answers == [True, True, True]
        assert ranks[1].decide() == answers[0]


def test_a_rank_that_was_told_too_late_is_not_waited_for(tmp_path: Path) -> None:
    first, second = Agreement(tmp_path, 0, 0, 2), Agreement(tmp_path, 0, 1, 2)
    first.prepare()
    first.armed()
    assert first.decide() is False
    second.armed()  # its training thread has passed the step
    assert second.decide() is False
