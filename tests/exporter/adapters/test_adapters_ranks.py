"""Trainer and Accelerator with two real processes over gloo: who reads what, whose loss is whose, where a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.adapters.tiny import order
from tests.exporter.ranks.harness import records, run
from tests.exporter.runs import events

BODY = """
torch.set_num_threads(1)
from torch.utils.data import DataLoader
from accelerate import Accelerator, DataLoaderConfiguration
from tests.exporter.adapters.tiny import curve, make as gpt2, trainer
from trainwarden.exporter.adapters.accelerate import attach
from trainwarden.exporter.adapters.hf_trainer import TrainwardenCallback

def train(run, last, **others):
    warden = TrainwardenCallback(run=run, dir=folder, port=0, reader_seconds=0.0)
    one = trainer(folder, [warden], max_steps=last, output_dir=str(folder / run), **others)
    fed = []
    inner = one.training_step
    def training_step(model, inputs, *rest):
        fed.append(int(inputs["input_ids"].sum()))
        return inner(model, inputs, *rest)
    one.training_step = training_step
    one.train(resume_from_checkpoint=warden.checkpoint())
    return one, fed

whole, fed = train("whole", 12)
first, before = train("run", 9, save_strategy="steps", save_steps=100)
second, after = train("run", 12)
say(losses=curve(whole), norms=curve(whole, "grad_norm"), fed=fed, again=before + after)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2,
                          dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42))
data = list(tokens(0, rows=50))
model, optimizer, loader = accelerator.prepare(
    model := make(), torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True))
exporter = attach(accelerator, model, optimizer, run="loop", dir=folder, port=0, reader_seconds=0.0)
loader = exporter.wrap(loader)
drawn, states = [], []
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            ids = batch
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        exporter.step(loss)
        drawn.append(batch.tolist())
        if len(drawn) == 10:
            state = loader.state_dict()
            exporter.save_state(folder / "loop-state")
loader.load_state_dict(state)
again = [batch.tolist() for batch in loader]
say(drawn=drawn, again_drawn=again, data=[row.tolist() for row in data])
exporter.close()
"""


@pytest.mark.slow
def test_two_ranks_share_the_data_record_their_own_losses_and_go_on_where_they_were(tmp_path: Path) -> None:
    ended = run(BODY, tmp_path, world=2)
    own = [records(tmp_path, rank, "whole") for rank in (0, 1)]
    said = ended[0].said
    for at, logged in enumerate(said["losses"]):
        mean = sum(own[rank][at].value("rank_loss") or 0 for rank in (0, 1)) / 2
        assert mean == pytest.approx(logged, rel=1e-6)
        assert [own[rank][at].value("loss") for rank in (0, 1)] == pytest.approx([logged] * 2, rel=1e-6)
        assert [own[rank][at].value("grad_norm") for rank in (0, 1)] == pytest.approx([said["norms"][at]] * 2, rel=1e-6)
    # 50 rows in steps of two times four: six whole steps, and one of two rows and six from the epoch's beginning
    assert [record.samples for record in own[0][:7]] == [[(8 * step, 8 * step + 4)] for step in range(6)] + [
        [(0, 2), (48, 50)]
    ]
    assert [record.samples for record in own[1][:7]] == [[(8 * step + 4, 8 * step + 8)] for step in range(6)] + [
        [(2, 6)]
    ]
    assert [record.value("sample_position") for record in own[0]][5:8] == [48, 50, 8]
    resumed = records(tmp_path, 0, "run")
    assert [record.step for record in resumed] == list(range(1, 13))
    assert [record.samples for record in resumed] == [record.samples for record in own[0]]
    for rank in (0, 1):
        reported = [(event.step, event.fields["complete"]) for event in events(tmp_path, "checkpoint", "run", rank)]
        assert reported == [(9, True)]
        assert ended[rank].said["again"] == ended[rank].said["fed"]
        assert [event.fields["notices"] for event in events(tmp_path, "start", "run", rank)] == [[], []]

    loops = [records(tmp_path, rank, "loop") for rank in (0, 1)]
    assert [len(loop) for loop in loops] == [8, 8]  # seven batches of a rank are four steps, twice
    data = said["data"]
    for rank, loop in enumerate(loops):
        drawn = [row for batch in ended[rank].said["drawn"] for row in batch]
        read: list[list[int]] = []
        for record in loop:
            rows = [order(int(record.value("epoch") or 0))[at] for a, b in record.samples for at in range(a, b)]
            read += [data[row] for row in rows]
        assert sorted(drawn) == sorted(read)
        assert ended[rank].said["again_drawn"] == ended[rank].said["drawn"][10:]
        (event,) = events(tmp_path, "checkpoint", "loop", rank)
        assert (event.step, event.fields["complete"]) == (
            5,
            True,
        )  # four steps of the first epoch, and one of two batches
