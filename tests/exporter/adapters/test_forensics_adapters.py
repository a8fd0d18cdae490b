"""Each library's adapter saves a damaged state by one argument, elsewhere than the trainer's checkpoints and without a word of these."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader

from tests.exporter.adapters import lightning_fits
from tests.exporter.adapters.test_accelerate import Loop
from tests.exporter.adapters.tiny import trainer as hf_trainer
from tests.exporter.quarantines import ask, copy_of
from tests.exporter.runs import events
from tests.real import wait_until
from trainwarden.exporter import Exporter, forensics
from trainwarden.exporter.adapters.hf_trainer import TrainwardenCallback
from trainwarden.exporter.adapters.torchtitan import attach
from trainwarden.exporter.forensics import Quarantined, load

#: The step before whose end the copy is asked for, so that it is saved after it.
STEP = 5


@pytest.fixture(autouse=True)
def _asked_in_the_middle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have every exporter of the test asked for a copy at one step, and wait until its thread has seen that."""
    original = Exporter.step

    def step(self: Exporter, loss: Any = None) -> None:
        if self.global_step == STEP - 1 and self._forensics is not None and not asked:
            asked.append(ask(tmp_path, run=self._folder.run))
            wait_until(lambda: self._forensics.armed < forensics.NEVER, 30, what=str(self.notices))  # type: ignore[union-attr]
        original(self, loss)

    asked: list[Path] = []
    monkeypatch.setattr(forensics, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(Exporter, "step", step)


def quarantined(folder: Path, run: str = "run") -> Quarantined:
    """Return the copy, after checking that the record counts it as none of the checkpoints."""
    found = load(copy_of(folder, run=run))
    assert found.step == STEP
    told = events(folder, "checkpoint", run)
    assert [event.step for event in told if event.fields.get("quarantined")] == [STEP]
    inside = str(found.folder)
    assert not [event for event in told if event.fields.get("complete") and event.fields["path"].startswith(inside)]
    return found


def test_hugging_faces_trainer_saves_what_it_can_resume_from(tmp_path: Path) -> None:
    callback = TrainwardenCallback(run="run", dir=tmp_path, port=0, reader_seconds=0.0, forensics=True)
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    training = hf_trainer(tmp_path, [callback], **settings)
    training.train()
    assert callback.notices == []
    found = quarantined(tmp_path)
    names = {path.name for path in found.checkpoint.iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "trainer_state.json"} <= names
    own = [path for path in tmp_path.rglob("checkpoint-*") if path.is_dir()]
    assert len(own) == 1  # rotated among themselves
    again = hf_trainer(tmp_path / "again", [], max_steps=STEP + 1)
    again.train(resume_from_checkpoint=str(found.checkpoint))
    assert again.state.global_step == STEP + 1


def test_lightning_saves_a_checkpoint_of_its_own_kind(tmp_path: Path) -> None:
    warden = lightning_fits.warden(tmp_path, forensics=True)
    keeps = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=1)
    lightning_fits.fit(tmp_path, lightning_fits.Module(), warden, keeps, max_steps=8, max_epochs=9)
    assert warden.notices == []
    found = quarantined(tmp_path)
    state = torch.load(found.checkpoint / "state.ckpt", weights_only=False)
    assert state["global_step"] == STEP
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_accelerate_saves_a_state_that_it_neither_names_nor_counts(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    loop = Loop(tmp_path, project_config=project)
    assert loop.exporter is not None
    loop.exporter.forensics()
    before = loop.exporter.save_state()
    loop.train(last=8)
    assert loop.close() == []
    found = quarantined(tmp_path)
    assert (found.checkpoint / "optimizer.bin").exists()
    assert before.is_dir()
    assert project.automatic_checkpoint_naming is True
    assert project.iteration == 1
    with_it = {path.name for path in found.checkpoint.iterdir()}
    assert any("model" in name for name in with_it)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_torchtitans_trainer_saves_with_the_distributed_checkpoint(tmp_path: Path) -> None:
    titan = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "titan_style.py"))
    small = {"width": 16, "layers": 1, "length": 16, "steps": 8, "checkpoint_interval": 4}
    trainer = titan["Trainer"](titan["Config"](folder=str(tmp_path / "saved"), **small))
    exporter = attach(trainer, "titan", dir=tmp_path, port=0, reader_seconds=0.0, forensics=True)
    try:
        trainer.train()
    finally:
        trainer.close()
    assert exporter.notices == []
    found = quarantined(tmp_path, "titan")
    names = set(FileSystemReader(found.checkpoint).read_metadata().state_dict_metadata)
    wanted = {f"model_part_0.{name}" for name in trainer.model_parts[0].state_dict()}
    assert wanted <= names
    assert any("exp_avg" in name for name in names)
