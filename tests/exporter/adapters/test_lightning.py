"""Real fits of Lightning's Trainer on a CPU under the callback: every optimizer step, its loss, its norm, its phase."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from tests.exporter.adapters.lightning_fits import (
    Module,
    Pair,
    References,
    checkpoints,
    fit,
    loader,
    records,
    reference,
    trainer,
    warden,
)
from tests.exporter.runs import events, make, norm64, steps, watch
from trainwarden.exporter.adapters.lightning import TrainwardenCallback


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
    monkeypatch.setattr("trainwarden.exporter.exporter.Exporter.step", broken)
    made = fit(tmp_path, Module(), watching, max_epochs=1)
    assert made.global_step == 6
    assert [one for one in watching.notices if "a fault of ours" in one]
    assert watching._notices.count("Lightning on_train_batch_end") == 6


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


@pytest.mark.parametrize("arguments", [{"limit_train_batches": 4}, {"reload_dataloaders_every_n_epochs": 1}])
def test_each_epoch_has_its_own_positions_also_cut_short_or_with_loaders_made_anew(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    module = Module()
    watching = warden(tmp_path, wrap={"reserve": 0})
    fit(tmp_path, module, watching, data=loader(shuffle=True), max_epochs=2, **arguments)
    batches = arguments.get("limit_train_batches", 6)
    positions = [[(at, at + 4)] for at in range(0, 4 * batches, 4)]
    assert [record.samples for record in records(tmp_path)] == positions * 2
    assert [record.value("epoch") for record in records(tmp_path)] == [0] * batches + [1] * batches
    first, second = (torch.cat(module.seen[at : at + batches]) for at in (0, batches))
    assert not torch.equal(first, second)
    assert watching.notices == []


def test_a_training_step_that_returns_nothing_is_no_fault(tmp_path: Path) -> None:
    class Skipping(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 1 else {"loss": self.loss(batch), "more": 1}

    watching = warden(tmp_path)
    fit(tmp_path, Skipping(), watching, max_epochs=1)
    losses = [record.value("loss") for record in records(tmp_path)]
    assert [loss is None for loss in losses] == [False, True, False, False, False, False]
    assert watching.notices == []


def test_steps_by_which_a_learning_rate_is_looked_for_are_not_recorded(tmp_path: Path) -> None:
    class Tuned(Module):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None)
    fit(tmp_path, Tuned(), warden(tmp_path), finder, max_epochs=1)
    assert [record.step for record in records(tmp_path)] == list(range(1, 7))


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt, ("signal", 130)), (SIGTERMException, ("signal", 143))]
)
def test_a_fit_that_is_interrupted_ends_its_record_with_the_signal(
    tmp_path: Path, error: type[BaseException], reason: tuple[str, int]
) -> None:
    class Interrupting(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises((SystemExit, SIGTERMException)):
        fit(tmp_path, Interrupting(), warden(tmp_path), max_epochs=1)
    signal.signal(signal.SIGINT, before)  # Lightning ignores it while it cleans up
    assert len(records(tmp_path)) == 3
    (end,) = events(tmp_path, "exit")
    assert (end.fields["reason"], end.fields["code"]) == reason


class Critic(Module):
    """Under manual optimization, one optimizer that steps three times a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for _ in range(3):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss}


class SecondOrder(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (lambda: torch.compile(Module(), backend="eager"), {}),
        (SecondOrder, {}),
        (Critic, {}),
        (Module, {"precision": "64-true"}),
        (Module, {"precision": "bf16-true"}),
        (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Module, {"barebones": True}),
    ],
    ids=["compiled", "closure evaluated often", "steps within a batch", "float64", "bfloat16", "clamped", "barebones"],
)
def test_in_whichever_way_a_batch_is_trained_it_has_one_record_with_its_first_gradient(
    tmp_path: Path, module: Any, arguments: dict[str, Any]
) -> None:
    made = trainer(tmp_path, warden(tmp_path, cadence=1), max_epochs=1, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module(), loader())
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 7))
    torch.manual_seed(0)
    norm = reference(Module(), [next(iter(loader()))])[1]
    assert found[0].value("grad_norm") == pytest.approx(norm, rel=5e-3 if "bf16" in str(arguments) else 1e-5)
    assert all(record.value("update_applied_ratio") for record in found)
