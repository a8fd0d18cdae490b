"""Where a fit of Lightning's Trainer goes on: checkpoints, positions, second fits, several processes, the other package."""

from __future__ import annotations

import os
import pickle
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, IterableDataset

from tests.exporter.adapters.lightning_fits import (
    ROOT,
    ROWS,
    Module,
    checkpoints,
    fit,
    loader,
    records,
    trainer,
    warden,
)
from tests.exporter.runs import events, lines
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.record import Step
from trainwarden.runfolder import RunFolder


def test_checkpoints_are_reported_with_the_step_they_hold_and_when_they_are_deleted(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=2, save_top_k=1)
    watching = warden(tmp_path)
    module = Module()
    fit(tmp_path, module, watching, saving, max_epochs=1, accumulate_grad_batches=2, max_steps=-1)
    assert checkpoints(tmp_path) == [(2, "step=2.ckpt")]
    fit(
        tmp_path / "more",
        Module(),
        warden(tmp_path / "more"),
        ModelCheckpoint(tmp_path / "s", "{step}", every_n_train_steps=2),
        max_epochs=1,
    )
    assert checkpoints(tmp_path / "more") == [(2, "step=2.ckpt"), (4, "step=4.ckpt"), (6, "step=6.ckpt")]
    deleted = [event for event in events(tmp_path / "more", "checkpoint") if event.fields.get("deleted")]
    assert [(event.step, Path(event.fields["path"]).name) for event in deleted] == [
        (2, "step=2.ckpt"),
        (4, "step=4.ckpt"),
    ]
    whole = [event for event in events(tmp_path / "more", "checkpoint") if event.fields.get("complete")]
    assert all(event.fields["finite"] is True for event in whole)


def test_a_checkpoint_written_in_the_background_is_complete_when_it_is_written(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, Module(), warden(tmp_path), saving, max_epochs=1, plugins=[AsyncCheckpointIO()])
    assert checkpoints(tmp_path) == [(3, "step=3.ckpt"), (6, "step=6.ckpt")]


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    watching = warden(tmp_path)
    fit(tmp_path, Module(), watching, ModelCheckpoint(tmp_path / "s", save_weights_only=True), max_epochs=1)
    assert checkpoints(tmp_path) == []
    assert len(watching.notices) == 1


class Stop(Exception):
    pass


class StopAfter(pl.Callback):
    def __init__(self, steps: int, error: type[BaseException] = Stop) -> None:
        self.steps, self.error = steps, error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.steps:
            raise self.error


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("every", [4, 6])
def test_a_fit_that_broke_goes_on_from_its_checkpoint_with_its_numbers_and_its_data(
    tmp_path: Path, every: int, shuffle: bool
) -> None:
    """``every`` 4 saves in the middle of an epoch of six batches, 6 at its end."""
    whole = Module()
    wrap = {"reserve": 0, "seed": 5}
    torch.manual_seed(0)
    fit(tmp_path / "whole", whole, warden(tmp_path / "whole", wrap=wrap), data=loader(shuffle=shuffle), max_epochs=3)

    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=every, save_top_k=-1)
    first = warden(tmp_path, wrap=wrap)
    assert first.checkpoint() is None
    with pytest.raises(Stop):
        fit(tmp_path, Module(), first, StopAfter(every + 1), saving, data=loader(shuffle=shuffle), max_epochs=3)
    assert first.exporter is None
    (end,) = events(tmp_path, "exit")
    assert (end.fields["reason"], end.fields["code"]) == ("exception", 1)

    second, again = warden(tmp_path, wrap=wrap), Module()
    path = second.checkpoint()
    assert path == str(tmp_path / "saved" / f"step={every}.ckpt")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer(tmp_path, second, max_epochs=3).fit(again, loader(shuffle=shuffle), ckpt_path=path)
    assert not [str(one.message) for one in warned if "resum" in str(one.message)]
    assert second.notices == []
    (_, start) = events(tmp_path, "start")
    assert start.fields["attempt"] == 1
    assert start.fields["resumed_from"] == {"attempt": 0, "step": every, "path": path}
    assert start.fields["replayable"] is True
    found = records(tmp_path)[every + 1 :]
    assert [record.step for record in found] == list(range(every + 1, 19))
    expected = records(tmp_path / "whole")[every:]
    assert [record.samples for record in found] == [record.samples for record in expected]
    assert [record.value("epoch") for record in found] == [record.value("epoch") for record in expected]
    assert [record.value("loss") for record in found] == [record.value("loss") for record in expected]
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_of_a_watched_fit_is_loaded_by_one_that_is_not(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, Module(), warden(tmp_path, wrap=True), saving, max_epochs=1)
    made = fit(tmp_path / "other", Module(), max_epochs=2, path=str(tmp_path / "saved" / "step=4.ckpt"))
    assert made.global_step > 4


def test_a_checkpoint_of_a_fit_that_was_not_watched_numbers_on_by_its_steps(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=6, save_top_k=-1)
    fit(tmp_path, Module(), saving, max_epochs=1)
    fit(tmp_path, Module(), warden(tmp_path), max_epochs=2, path=str(tmp_path / "saved" / "step=6.ckpt"))
    assert [record.step for record in records(tmp_path)] == list(range(7, 13))


def test_a_second_fit_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    watching = warden(tmp_path)
    module = Module()
    made = fit(tmp_path, module, watching, max_epochs=1)
    made.fit_loop.max_epochs = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, loader())
    assert [record.step for record in records(tmp_path)] == list(range(1, 13))
    assert [event.fields["attempt"] for event in events(tmp_path, "start")] == [0, 1]
    assert "save_checkpoint" not in vars(made)
    assert not {"teardown", "remove_checkpoint", "process_dataloader"} & set(vars(made.strategy))


def test_the_callback_can_be_copied_into_another_process(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(warden(tmp_path, wrap={"seed": 3})))
    fit(tmp_path, Module(), copy, max_epochs=1)
    assert len(records(tmp_path)) == 6


SCRIPT = """
import os, sys, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
from tests.exporter.adapters.lightning_fits import Module, loader, trainer, warden
from lightning.pytorch.callbacks import ModelCheckpoint
folder = Path(sys.argv[1])
watching = warden(folder, wrap={"seed": 1, "reserve": 0}, cadence=1)
saving = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
made = trainer(folder, watching, saving, devices=2, strategy="ddp", max_epochs=int(sys.argv[2]), gradient_clip_val=0.5)
made.fit(Module(), loader(shuffle=True), ckpt_path=watching.checkpoint())
sys.stdout.flush()
os._exit(1 if watching.notices else 0)  # torch sometimes aborts while the interpreter exits
"""


@pytest.mark.slow
def test_two_processes_share_the_data_and_the_norm_have_their_own_losses_and_go_on_in_the_middle_of_an_epoch(
    tmp_path: Path,
) -> None:
    """Lightning's own launcher starts the second rank, and gives the loader a distributed sampler."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for epochs in ("1", "2"):  # three steps; then on from the checkpoint of the second
        command = [sys.executable, str(script), str(tmp_path), epochs]
        ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr[-3000:]
    first, second = ([line for line in lines(tmp_path, rank=rank) if isinstance(line, Step)] for rank in (0, 1))
    assert [record.step for record in first] == [record.step for record in second] == [1, 2, 3, 3, 4, 5, 6]
    for part in slice(0, 3), slice(4, 7):
        ranges = [pair for record in (*first[part], *second[part]) for pair in record.samples]
        assert sorted(position for pair in ranges for position in range(*pair)) == list(range(24))
    for records_of in (first, second):  # step 3 is made again with its own data
        assert records_of[2].samples == records_of[3].samples
        assert records_of[2].value("rank_loss") == records_of[3].value("rank_loss")
    for one, other in zip(first, second, strict=True):
        assert one.value("grad_norm") == pytest.approx(other.value("grad_norm"), rel=1e-6)
        assert one.value("rank_loss") != other.value("rank_loss")
        assert one.value("clip_ratio") == pytest.approx(one.value("grad_norm") / 0.5, rel=1e-5)  # type: ignore[operator]
    starts = [events(tmp_path, "start", rank=rank) for rank in (0, 1)]
    assert [start.fields["world_size"] for start in starts[0]] == [2, 2]
    assert [start.fields["start_id"] for start in starts[0]] == [start.fields["start_id"] for start in starts[1]]
    assert checkpoints(tmp_path) == [(step, f"step={step}.ckpt") for step in (2, 4, 6)]


@pytest.mark.slow
def test_the_other_package_is_watched_as_well(tmp_path: Path) -> None:
    """pytorch_lightning holds classes of its own; a process that has loaded both gets a callback for both."""
    script = """
import sys, torch
torch.set_num_threads(1)
import pytorch_lightning as pl
from pathlib import Path
from trainwarden.exporter.adapters.lightning import TrainwardenCallback
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.part(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
watching = TrainwardenCallback("run", dir=Path(sys.argv[1]), port=0, reader_seconds=0.0)
assert isinstance(watching, pl.Callback)
trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=3, callbacks=[watching])
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=2))
assert watching.notices == [], watching.notices
assert "lightning" not in sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [record.step for record in records(tmp_path)] == [1, 2, 3]


class Sized(IterableDataset[torch.Tensor]):
    """A stream that says how long it is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS[:24])

    def __len__(self) -> int:
        return 24


class Endless(IterableDataset[torch.Tensor]):
    """A stream that does not say how long it is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS[:24])


class Resumable:
    """A loader with a state of its own, as torchdata's is one: each pass has the 24 rows in another order."""

    num_workers, batch_size = 0, 4

    def __init__(self) -> None:
        self.passes, self.at, self.loaded = 0, 0, False

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.loaded:
            self.passes, self.at = self.passes + 1, 0
        self.loaded = False
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.passes)).tolist()
        while self.at < 6:
            self.at += 1
            yield torch.stack([ROWS[row] for row in order[4 * self.at - 4 : 4 * self.at]])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.passes, self.loaded = state["at"], state["passes"], True


def test_a_loader_with_a_state_of_its_own_goes_on_by_lightnings_own_means_and_with_its_positions(
    tmp_path: Path,
) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    whole = Module()
    fit(tmp_path, whole, warden(tmp_path, wrap=True), saving, data=Resumable(), max_epochs=2)
    path = str(tmp_path / "saved" / "step=4.ckpt")
    plain, again = Module(), Module()
    fit(tmp_path / "plain", plain, data=Resumable(), max_epochs=2, path=path)
    fit(tmp_path / "again", again, warden(tmp_path / "again", wrap=True), data=Resumable(), max_epochs=2, path=path)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))
    found, expected = records(tmp_path / "again"), records(tmp_path)[4:]
    assert [record.samples for record in found] == [record.samples for record in expected]
    assert [record.value("epoch") for record in found] == [record.value("epoch") for record in expected]


def test_a_stream_has_positions_by_epoch(tmp_path: Path) -> None:
    watching = warden(tmp_path, wrap=True)
    fit(tmp_path, Module(), watching, data=DataLoader(Sized(), batch_size=4), max_epochs=2)
    assert [record.samples for record in records(tmp_path)] == [[(at, at + 4)] for at in range(0, 24, 4)] * 2
    assert [record.value("epoch") for record in records(tmp_path)] == [0] * 6 + [1] * 6
    assert watching.notices == []


def test_the_example_goes_on_when_it_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWARDEN_DIR", str(tmp_path / "runs"))
    main = runpy.run_path(str(ROOT / "examples" / "lightning_fit.py"))["main"]
    for _ in range(2):
        main(25)
    found = [line for line in lines(tmp_path / "runs", "lightning") if isinstance(line, Step)]
    assert [record.step for record in found] == list(range(1, 51))
    assert "steps 26 to 50 are recorded" in capsys.readouterr().out


def test_what_a_plan_asks_is_done_target_rate_and_data(tmp_path: Path) -> None:
    wrap = {"seed": 5, "dataset": "web"}
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    first = Module()
    fit(tmp_path, first, warden(tmp_path, wrap=wrap), saving, data=loader(48, shuffle=True), max_epochs=1)
    folder = RunFolder("run", tmp_path)
    identity = folder.identity()
    assert identity is not None
    path = str(tmp_path / "saved" / "step=4.ckpt")
    target = Target(attempt=0, step=4, path=path)
    skip: dict[str, Any] = {"skip_samples": [(20, 24)], "skip_epoch": 0}
    plan = Plan(plan_id="p1", run_uid=identity.run_uid, for_attempt=1, target=target, lr_factor=0.5, **skip)
    folder.write_plan(plan)
    entry = LedgerEntry(plan_id="p1", for_attempt=1, target_step=4, **skip)
    folder.write_ledger(Ledger(run_uid=identity.run_uid, entries=[entry]))

    watching, second = warden(tmp_path, wrap=wrap), Module()
    assert watching.checkpoint() == path  # not that of step 8, which was given up
    fit(tmp_path, second, watching, data=loader(48, shuffle=True), max_epochs=1, path=watching.checkpoint())
    applied = events(tmp_path, "start")[1].fields["plan_applied"]
    assert (applied["plan_id"], applied["start_step"], applied["not_applied"]) == ("p1", 5, {})
    found = records(tmp_path)
    before, after = found[4:11], found[11:]
    assert [record.step for record in after] == [record.step for record in before] == list(range(5, 12))
    assert [record.samples for record in after] == [record.samples for record in before]
    assert {record.value("lr") for record in after} == {5e-3}
    same = [torch.equal(one, other) for one, other in zip(first.seen[4:], second.seen, strict=True)]
    assert same == [step != 6 for step in range(5, 12)]  # the step at positions 20 to 24 alone has other rows


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_without_a_length_is_drawn_ahead_and_its_batches_count_at_their_own_steps(
    tmp_path: Path, accumulate: int
) -> None:
    watching = warden(tmp_path, wrap=True)
    data = DataLoader(Endless(), batch_size=4)
    fit(tmp_path, Module(), watching, data=data, max_epochs=1, accumulate_grad_batches=accumulate)
    rows = 4 * accumulate
    assert [record.samples for record in records(tmp_path)] == [[(at, at + rows)] for at in range(0, 24, rows)]
    assert [record.value("batch_supervised_tokens") for record in records(tmp_path)] == [rows * 12] * (6 // accumulate)
    fit(tmp_path / "sized", Module(), warden(tmp_path / "sized"), data=loader(24), max_epochs=1)
    if accumulate == 1:
        hashes = [record.value("batch_hash") for record in records(tmp_path / "sized")]
        assert [record.value("batch_hash") for record in records(tmp_path)] == hashes
    assert watching.notices == []
