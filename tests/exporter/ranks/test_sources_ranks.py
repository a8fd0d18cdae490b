"""Two real ranks that draw from two sources, each its own: the expected loss is of the batches that the mean loss is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.ranks.harness import records, run

BODY = """
model = nn.parallel.DistributedDataParallel(make())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = watch(model, optimizer, folder)
for number in range(1, 241):
    noisy = torch.rand(2, generator=torch.Generator().manual_seed(number)) < 0.3
    ids = tokens(10 * number + rank) if noisy[rank] else torch.arange(12).expand(4, 12)
    untold = number == 200 and rank == 1
    exporter.batch(ids, source=None if untold else "noise" if noisy[rank] else "text")
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    exporter.step(loss)
exporter.close()
"""


@pytest.mark.slow
def test_the_loss_that_is_expected_is_of_the_batches_of_all_ranks_as_the_loss_is(tmp_path: Path) -> None:
    run(BODY, tmp_path, world=2)
    first, second = records(tmp_path), records(tmp_path, 1)
    settled = [pair for pair in zip(first, second, strict=True) if pair[0].step > 120 and pair[0].step != 200]
    unlike = 0
    for one, other in settled:
        expected, loss = one.value("loss_expected"), one.value("loss")
        assert expected == other.value("loss_expected") is not None
        assert loss == other.value("loss") is not None
        assert abs(loss - expected) < 0.6
        of_ranks = one.ranks["loss_expected"]
        unlike += of_ranks.max - of_ranks.min > 1.5  # ranks whose own expectation would be far off the mean loss
        assert one.signals["source_share"] in ({"noise": 1.0}, {"text": 1.0})  # the mix is the rank's own
    assert unlike > 20
    of_200 = [next(record for record in own if record.step == 200) for own in (first, second)]
    assert [record.value("loss_expected") for record in of_200] == [None, None]
    assert [record.ranks["loss_expected"].n for record in of_200] == [1, 1]
