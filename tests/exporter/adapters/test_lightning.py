"""Real fits of Lightning's Trainer on a CPU under the callback: every optimizer step, its loss, its norm, and where it goes on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from tests.exporter.runs import Block, events, lines, make, norm64, steps, tokens, watch
from trainwarden.exporter.adapters.lightning import TrainwardenCallback
from trainwarden.record import Step

ROOT = Path(__file__).parents[3]
ROWS = [tokens(step)[0] for step in range(48)]


class Module(pl.LightningModule):
    """A small language model; ``poison`` is the batch whose loss is not finite."""

    def __init__(self, poison: int | None = None, schedule: bool = False) -> None:
        super().__init__()
        self.model = make()
        self.poison = poison
        self.schedule = schedule
        self.seen: list[torch.Tensor] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.clone())
        loss = self.loss(batch)
        return loss * float("nan") if batch_idx == self.poison else loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(count: int = 24, shuffle: bool = False, **arguments: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(ROWS[:count], batch_size=4, shuffle=shuffle, **arguments)  # type: ignore[arg-type]


def warden(folder: Path, **arguments: Any) -> TrainwardenCallback:
    return TrainwardenCallback("run", dir=folder, port=0, reader_seconds=0.0, **arguments)


def trainer(folder: Path, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": saves,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **arguments})


def fit(
    folder: Path,
    module: pl.LightningModule,
    *callbacks: Any,
    data: Any = None,
    path: str | None = None,
    **arguments: Any,
) -> pl.Trainer:
    made = trainer(folder, *callbacks, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, loader() if data is None else data, ckpt_path=path)
    return made


def records(folder: Path) -> list[Step]:
    return [line for line in lines(folder) if isinstance(line, Step)]


def reference(module: Module, batches: list[torch.Tensor], divisor: int | None = None) -> tuple[float, float]:
    """Return mean loss and gradient norm of some micro-batches, in float64."""
    model = Block().double()
    model.load_state_dict({name: value.double() for name, value in module.model.state_dict().items()})
    losses = []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        (loss / (divisor or len(batches))).backward()
        losses.append(float(loss))
    return sum(losses) / len(losses), norm64([p.grad for p in model.parameters() if p.grad is not None])


class References(pl.Callback):
    """Computes each step's loss and norm anew, in float64, before the step is made."""

    def __init__(self, accumulate: int = 1, batches: int = 6) -> None:
        self.window: list[torch.Tensor] = []
        self.accumulate, self.batches = accumulate, batches
        self.expected: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.window.append(batch.clone())
        if len(self.window) == self.accumulate or batch_idx + 1 == self.batches:
            self.expected.append(reference(pl_module, self.window, self.accumulate))
            self.window = []


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (4, 0.5)])
def test_each_optimizer_step_has_its_mean_loss_and_its_norm_before_clipping(
    tmp_path: Path, accumulate: int, clip: float | None
) -> None:
    watching, references = warden(tmp_path, cadence=1), References(accumulate)
    fit(
        tmp_path,
        Module(schedule=True),
        references,
        watching,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 1 + {1: 12, 4: 4}[accumulate]))
    assert [record.value("loss") for record in found] == pytest.approx(
        [loss for loss, _ in references.expected], rel=1e-5
    )
    assert [record.value("grad_norm") for record in found] == pytest.approx(
        [norm for _, norm in references.expected], rel=1e-5
    )
    assert [record.value("lr") for record in found] == pytest.approx([1e-2 / step for step in range(1, len(found) + 1)])
    for record in found:
        assert record.value("update_applied_ratio") == pytest.approx(record.value("update_ratio"), rel=0.05)
        if clip is not None:
            assert record.value("clip_ratio") == pytest.approx(record.value("grad_norm") / clip, rel=1e-5)  # type: ignore[operator]
    assert all(record.value("tokens") for record in found)
    assert watching.notices == []
    (end,) = events(tmp_path, "exit")
    assert (end.fields["reason"], end.fields["code"]) == ("finished", 0)


def test_a_loss_that_is_not_a_number_is_recorded_at_its_step(tmp_path: Path) -> None:
    fit(tmp_path, Module(poison=2), warden(tmp_path), max_epochs=1)
    nonfinite = [record.step for record in records(tmp_path) if record.value("nonfinite", "loss")]
    assert nonfinite == [3, 4, 5, 6]  # the update spreads it
    assert records(tmp_path)[2].value("loss") != records(tmp_path)[2].value("loss")


def test_validation_is_a_phase_and_no_record(tmp_path: Path) -> None:
    module = Module()
    made = trainer(tmp_path, warden(tmp_path), max_epochs=2, val_check_interval=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, loader(), loader(8))
    assert len(records(tmp_path)) == 12
    phases = [event.fields["phase"] for event in events(tmp_path, "phase")]
    assert phases.count("evaluation") == 1 + 4  # the sanity check, and four validations
    assert {record.phase for record in records(tmp_path)} == {"train"}


@pytest.mark.parametrize("wrap", [False, {"reserve": 0}])
def test_the_weights_are_bit_for_bit_those_of_a_fit_without_the_callback(tmp_path: Path, wrap: Any) -> None:
    weights = []
    for watched in (False, True):
        torch.manual_seed(3)
        module = Module(schedule=True)
        callbacks = [warden(tmp_path, wrap=wrap, cadence=1)] if watched else []
        fit(
            tmp_path,
            module,
            *callbacks,
            data=loader(shuffle=not wrap, num_workers=0),
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.3,
        )
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert len(records(tmp_path)) == 6


def checkpoints(folder: Path) -> list[tuple[int, str]]:
    found = [event for event in events(folder, "checkpoint") if event.fields.get("complete")]
    return [(event.step or 0, Path(event.fields["path"]).name) for event in found]


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


class Pair(pl.LightningModule):
    """Two optimizers under manual optimization; the second steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = make(1), make(2)
        self.losses: list[list[tuple[float, float]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        total = torch.zeros(())
        self.losses.append([])
        for number, (part, optimizer) in enumerate(zip((self.first, self.second), self.optimizers(), strict=True)):
            if number == 1 and batch_idx % 2:
                continue
            loss = nn.functional.cross_entropy(part(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses[-1].append((float(loss), norm64([p.grad for p in part.parameters() if p.grad is not None])))
            optimizer.step()
            total = total + loss.detach()
        return total

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.first.parameters(), lr=1e-2), torch.optim.SGD(self.second.parameters(), lr=1e-1)]


def test_under_manual_optimization_a_record_is_a_batch_with_the_updates_of_all_its_optimizers(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", "last", every_n_epochs=1)
    module = Pair()
    made = fit(tmp_path, module, warden(tmp_path, cadence=1), saving, max_epochs=1)
    assert made.global_step == 9  # what Lightning counts
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 7))
    assert checkpoints(tmp_path) == [(6, "last.ckpt")]
    assert {(record.value("lr", "0.0"), record.value("lr", "1.0")) for record in found} == {(1e-2, 0.1)}
    for batch, record in enumerate(found):
        both = module.losses[batch]
        assert record.value("loss") == pytest.approx(sum(loss for loss, _ in both), rel=1e-6)
        assert record.value("grad_norm") == pytest.approx(sum(norm**2 for _, norm in both) ** 0.5, rel=1e-5)
    fit(tmp_path, Pair(), warden(tmp_path), max_epochs=2, path=str(tmp_path / "saved" / "last.ckpt"))
    assert [record.step for record in records(tmp_path)] == list(range(1, 13))


def test_bf16_mixed_keeps_the_loss_and_the_norms(tmp_path: Path) -> None:
    fit(tmp_path, Module(), warden(tmp_path), max_epochs=1, precision="bf16-mixed")
    assert all(record.value("loss") and record.value("grad_norm") for record in records(tmp_path))


def test_a_step_that_the_scaler_skipped_counts_and_is_called_skipped(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    references = References()
    fit(tmp_path, Module(poison=1), references, warden(tmp_path), max_epochs=1, plugins=[plugin], gradient_clip_val=0.5)
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 7))
    assert [record.value("skipped") for record in found] == [0, 1, 0, 0, 0, 0]
    assert [record.value("loss_scale") for record in found] == [256, 256, 128, 128, 128, 128]
    for record, (loss, norm) in zip(found, references.expected, strict=True):
        if record.value("skipped"):
            continue
        assert record.value("loss") == pytest.approx(loss, rel=2e-2)  # half precision in the forward pass
        assert record.value("grad_norm") == pytest.approx(norm, rel=5e-2)


def test_switched_off_the_fit_is_the_same_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    watching = warden(tmp_path / "runs", wrap={"reserve": 0})
    module, plain = Module(), Module()
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, module, watching, saving, max_epochs=1)
    fit(tmp_path, plain, max_epochs=1)
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), plain.parameters(), strict=True))
    assert watching.checkpoint() is None
    assert not (tmp_path / "runs").exists()
    assert watching.notices == []


def test_a_fast_dev_run_leaves_no_trace(tmp_path: Path) -> None:
    fit(tmp_path / "lightning", Module(), warden(tmp_path / "runs"), fast_dev_run=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "error"), [({"cadence": 0}, ValueError), ({"wrap": "yes"}, TypeError), ({"port": "a"}, TypeError)]
)
def test_a_wrong_argument_is_refused_when_the_callback_is_made(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        TrainwardenCallback("run", **arguments)


def test_a_fault_in_the_callback_never_reaches_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    watching = warden(tmp_path)
    monkeypatch.setattr(TrainwardenCallback, "_mean", broken)
    made = fit(tmp_path, Module(), watching, max_epochs=1)
    assert made.global_step == 6
    assert "a fault of ours" in watching.notices[0]
    assert watching._notices.count("Lightning on_train_batch_end") == 6


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
from tests.exporter.adapters.test_lightning import Module, loader, trainer, warden
from lightning.pytorch.callbacks import ModelCheckpoint
folder = Path(sys.argv[1])
watching = warden(folder, wrap={"seed": 1, "reserve": 0}, cadence=1)
saving = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
made = trainer(folder, watching, saving, devices=2, strategy="ddp", max_epochs=2, gradient_clip_val=0.5)
made.fit(Module(), loader(shuffle=True), ckpt_path=watching.checkpoint())
sys.stdout.flush()
os._exit(1 if watching.notices else 0)  # torch sometimes aborts while the interpreter exits
"""


@pytest.mark.slow
def test_two_processes_share_the_data_and_the_norm_and_have_their_own_losses(tmp_path: Path) -> None:
    """Lightning's own launcher starts the second rank, and gives the loader a distributed sampler."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, second = ([line for line in lines(tmp_path, rank=rank) if isinstance(line, Step)] for rank in (0, 1))
    assert [record.step for record in first] == [record.step for record in second] == list(range(1, 7))
    for epoch in (first[:3], second[:3]), (first[3:], second[3:]):
        drawn = [
            position for ranges in epoch for record in ranges for pair in record.samples for position in range(*pair)
        ]
        assert sorted(drawn) == list(range(24))
    for one, other in zip(first, second, strict=True):
        assert one.value("grad_norm") == pytest.approx(other.value("grad_norm"), rel=1e-6)
        assert one.value("rank_loss") != other.value("rank_loss")
        assert one.value("clip_ratio") == pytest.approx(one.value("grad_norm") / 0.5, rel=1e-5)  # type: ignore[operator]
    starts = [events(tmp_path, "start", rank=rank)[0].fields for rank in (0, 1)]
    assert [start["world_size"] for start in starts] == [2, 2]
    assert starts[0]["start_id"] == starts[1]["start_id"]
    assert checkpoints(tmp_path) == [(4, "step=4.ckpt")]


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


def test_fabric_is_a_loop_of_ones_own_around_what_it_wraps(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    module = make()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    exporter = watch(model.module, optimizer.optimizer, tmp_path, cadence=1)
    data = exporter.wrap(loader(), reserve=0)
    norms = []
    for batch in data:
        batch = fabric.to_device(batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        fabric.backward(loss)
        norms.append(norm64([p.grad for p in module.parameters() if p.grad is not None]))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        exporter.step(loss)
    found = steps(exporter, tmp_path)
    assert [record.step for record in found] == list(range(1, 7))
    assert [record.value("grad_norm") for record in found] == pytest.approx(norms, rel=1e-5)
    assert all(record.value("clip_ratio") for record in found)
    for record in found:
        assert record.value("update_applied_ratio") == pytest.approx(record.value("update_ratio"), rel=0.05)
    assert found[-1].samples == [(20, 24)]
