"""The harness of the tests of ranks: several processes are started, listened to, and killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.exporter.ranks.harness import Ranks, records, run


def test_ranks_train_together_and_what_they_say_and_record_comes_back(tmp_path: Path) -> None:
    body = """
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, folder)
    loss = loss_of(model, rank)
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    exporter.close()
    say(loss=float(loss))
    """
    ended = run(body, tmp_path, world=2)
    for rank in (0, 1):
        assert [step.value("rank_loss") for step in records(tmp_path, rank)] == [ended[rank].said["loss"]]


def test_a_rank_can_be_killed_and_one_that_hangs_fails_the_test_with_what_was_printed(tmp_path: Path) -> None:
    with Ranks("say(here=rank); time.sleep(600)", tmp_path, world=2) as ranks:
        assert [ranks.wait_said(rank, "here") for rank in (0, 1)] == [0, 1]
        ranks.kill(1)
        with pytest.raises(AssertionError, match=r"ranks \[0\] still run(.|\n)*SAID"):
            ranks.wait(1.0)
    assert [process.returncode for process in ranks.processes] == [-signal.SIGKILL, -signal.SIGKILL]
