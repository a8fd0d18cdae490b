"""A real run whose side group is cut, judged from its journals: the loss goes on as one rank's own, and nobody is paged for it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.exporter.ranks.harness import Ranks, records
from tests.exporter.runs import events
from tests.rules.core.runs import default_pack
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged

#: Each rank trains for itself, so that one goes on where the other ends. Rank 0 reads noise, rank 1 a text that is soon known.
BODY = """
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = watch(model, optimizer, folder, side_timeout=5.0)

def step(number):
    optimizer.zero_grad()
    ids = tokens(10 * number + rank) if rank == 0 else torch.arange(12).expand(4, 12)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    time.sleep(0.005)

side = exporter._parts.side
until(lambda: side.rounds > 1)
for number in range(1, 181):
    step(number)
until(lambda: side.combined >= 180)
say(ready=True)
if rank == 1:
    if os.environ["HOW"] == "killed":
        time.sleep(60)
    exporter.close()
    end()
until(lambda: not side.open)
for number in range(181, 501):
    step(number)
exporter.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "closed"])
def test_that_the_loss_goes_on_as_a_ranks_own_is_told_and_no_fault_of_the_training(tmp_path: Path, how: str) -> None:
    with Ranks(BODY, tmp_path, world=2, environment={"HOW": how}) as ranks:
        for rank in (0, 1):
            ranks.wait_said(rank, "ready")
        if how == "killed":
            ranks.kill(1)
        assert ranks.wait()[0].code == 0
    own = records(tmp_path)
    assert [one.step for one in own] == list(range(1, 501))
    before, after = own[179], own[180]
    assert before.value("loss") == pytest.approx(before.ranks["loss"].sum / 2)
    assert after.value("loss") == after.value("rank_loss")
    assert (after.value("loss") or 0) > 1.4 * (before.value("loss") or 0)  # the mean of both is another number
    (event,) = events(tmp_path, "side_group")
    assert (event.step, event.fields["open"]) == (180, False)
    (recording,) = find_recordings([str(tmp_path / "run")], io.BytesIO(), tmp_path)
    found = Replay(Settings(), default_pack()).run(merged(recording))
    assert [one for one in found.incidents.values() if one["severity"] != "info"] == []
    assert [notice["step"] for notice in found.notices.values() if notice["signal"] == "loss"] == [180]
