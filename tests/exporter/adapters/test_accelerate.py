"""Loops around a real Accelerator on a CPU, under exporter/adapters/accelerate.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

from tests.exporter.adapters.conftest import forget_accelerate
from tests.exporter.adapters.tiny import order
from tests.exporter.runs import Block, events, lines, loss_of, make, norm64, tokens
from trainwarden.exporter.adapters.accelerate import AcceleratedExporter, attach
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.record import Step
from trainwarden.runfolder import RunFolder

ROWS = 42


def data() -> list[torch.Tensor]:
    return list(tokens(0, rows=ROWS))


def loss_from(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def records(folder: Path, run: str = "run") -> list[Step]:
    return [line for line in lines(folder, run) if isinstance(line, Step)]


def values(found: list[Step], signal: str) -> list[float | None]:
    return [record.value(signal) for record in found]


class Loop:
    """A loop as Accelerate's documentation writes it, two epochs of eleven batches of four rows (the last of two)."""

    def __init__(
        self,
        folder: Path,
        accumulate: int = 1,
        *,
        run: str | None = "run",
        seeded: bool = True,
        wrap: dict[str, Any] | None = None,
        before: Callable[[Loop], int] = lambda loop: 0,
        **others: Any,
    ) -> None:
        settings = DataLoaderConfiguration(use_seedable_sampler=seeded, data_seed=42)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=settings, **others
        )
        torch.manual_seed(0)
        raw = make()
        loader = DataLoader(data(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        inner = torch.optim.AdamW(raw.parameters(), lr=1e-2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(raw, inner, loader)
        self.exporter: AcceleratedExporter | None = None
        if run is not None:
            self.exporter = attach(
                self.accelerator, self.model, self.optimizer, run=run, dir=folder, port=0, reader_seconds=0.0, cadence=1
            )
            self.loader = self.exporter.wrap(self.loader, **(wrap or {}))
            self.accelerator.register_for_checkpointing(self.loader)
        #: What each update was made of, and with which weights and norm.
        self.steps: list[tuple[Block, list[torch.Tensor], float]] = []
        self._micro: list[torch.Tensor] = []
        self._start = copy.deepcopy(raw)
        self.done = before(self)
        if self.exporter is not None:
            self.exporter.resumed(self.done)

    def train(self, last: int = 10**9, epochs: int = 2, each: Callable[[int], Any] = lambda step: None) -> Loop:
        begun = self.loader.epoch if self.exporter is not None else 0
        for _ in range(begun, epochs):
            for batch in self.loader:
                if not self._micro:
                    self._start = copy.deepcopy(self.accelerator.unwrap_model(self.model))
                self._micro.append(batch)
                with self.accelerator.accumulate(self.model):
                    loss = loss_from(self.model, batch)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                        self.steps.append((self._start, self._micro, float(norm)))
                        self._micro = []
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.exporter is not None:
                    self.exporter.step(loss)
                if self.accelerator.sync_gradients:
                    self.done += 1
                    each(self.done)
                    if self.done == last:
                        return self
        return self

    def close(self) -> list[str]:
        assert self.exporter is not None
        self.exporter.close()
        return self.exporter.notices

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_record_an_update_holds_the_mean_loss_of_its_micro_batches_and_the_norm_before_clipping(
    tmp_path: Path, accumulate: int
) -> None:
    loop = Loop(tmp_path, accumulate).train()
    assert loop.close() == []
    found = records(tmp_path)
    assert len(found) == len(loop.steps) == {1: 22, 3: 8}[accumulate]
    for record, (before, micro, norm) in zip(found, loop.steps, strict=True):
        model = before.double()
        losses = [loss_from(model, batch) for batch in micro]
        assert record.value("loss") == pytest.approx(float(torch.stack(losses).mean().detach()), rel=1e-6)
        torch.stack(losses).sum().div(
            accumulate
        ).backward()  # what accelerator.backward does, also for a last step of fewer
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert record.value("grad_norm") == pytest.approx(norm64(gradients), rel=1e-5)
        assert record.value("grad_norm") == pytest.approx(norm, rel=1e-6)
        assert record.value("clipped_steps") == float(norm > 0.5)
        rows = [order(int(record.value("epoch") or 0), ROWS)[at] for a, b in record.samples for at in range(a, b)]
        assert torch.equal(torch.cat(micro), torch.stack([data()[row] for row in rows]))
    assert values(found, "lr") == [0.01] * len(found)


@pytest.mark.parametrize("others", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
def test_what_is_trained_is_the_same_to_the_last_bit_with_the_exporter(tmp_path: Path, others: dict[str, Any]) -> None:
    alone = Loop(tmp_path, 2, run=None, **others).train()
    watched = Loop(tmp_path, 2, **others).train()
    assert watched.close() == []
    assert all(torch.equal(one, other) for one, other in zip(alone.weights(), watched.weights(), strict=True))
    assert len(records(tmp_path)) == 12


def test_switched_off_the_loop_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Loop(tmp_path, 2, run=None).train()
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    off = Loop(tmp_path, 2).train()
    assert all(torch.equal(one, other) for one, other in zip(alone.weights(), off.weights(), strict=True))
    assert off.exporter is not None
    assert off.exporter.global_step == 12
    assert not (tmp_path / "run").exists()


def goes_on(folder: Path) -> Callable[[Loop], int]:
    """Return what a script does at its start: it loads what the run's folder says."""

    def load(loop: Loop) -> int:
        assert loop.exporter is not None
        target = loop.exporter.resume()
        if target is None:
            return 0
        loop.accelerator.load_state(target.path)
        return target.step

    return load


@pytest.mark.parametrize("stop", [5, 11, 15])
def test_a_saved_state_is_a_checkpoint_and_a_run_goes_on_from_it_with_the_next_samples(
    tmp_path: Path, stop: int
) -> None:
    whole = Loop(tmp_path, run="whole").train()
    whole.close()
    first = Loop(tmp_path).train(last=stop)
    assert first.exporter is not None
    path = first.exporter.save_state(tmp_path / "saved")
    assert first.close() == []
    (event,) = events(tmp_path, "checkpoint")
    assert (event.step, event.fields["path"], event.fields["complete"], event.fields["finite"]) == (
        stop,
        str(path),
        True,
        True,
    )
    forget_accelerate()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    second = Loop(tmp_path, before=goes_on(tmp_path)).train()
    assert second.close() == []
    found, expected = records(tmp_path), records(tmp_path, "whole")
    assert [record.step for record in found] == list(range(1, 23))
    for name in ("loss", "grad_norm", "sample_position", "epoch", "batch_hash", "optimizer_step"):
        assert values(found, name) == values(expected, name), name
    assert [record.samples for record in found] == [record.samples for record in expected]
    assert all(torch.equal(one, other) for one, other in zip(whole.weights(), second.weights(), strict=True))


def test_a_plan_puts_other_rows_in_the_place_of_what_it_skips(tmp_path: Path) -> None:
    first = Loop(tmp_path)
    exporter = first.exporter
    assert exporter is not None
    path = tmp_path / "saved"
    first.train(last=10, each=lambda step: exporter.save_state(path) if step == 3 else None)
    first.close()
    run = RunFolder("run", tmp_path)
    uid = run.open_identity().run_uid
    target = Target(attempt=0, step=3, path=str(path))
    run.write_plan(Plan(plan_id="p", run_uid=uid, for_attempt=1, target=target, skip_samples=[(18, 24)]))
    entry = LedgerEntry(plan_id="p", for_attempt=1, target_step=3, skip_samples=[(18, 24)])
    run.write_ledger(Ledger(run_uid=uid, entries=[entry]))
    forget_accelerate()
    second = Loop(tmp_path, before=goes_on(tmp_path), wrap={"reserve": 0.2}).train(last=10)
    assert second.close() == []
    found = records(tmp_path)
    before, after = found[3:10], found[10:]
    assert [record.samples for record in after] == [record.samples for record in before]
    assert values(after, "substituted_samples") == [0, 2, 4, 0, 0, 0, 0]
    hashes = zip(values(before, "batch_hash"), values(after, "batch_hash"), strict=True)
    assert [one == other for one, other in hashes] == [True, False, False, True, True, True, True]
    assert events(tmp_path, "start")[1].fields["plan_applied"]["not_applied"] == {}


def test_an_order_without_a_seed_has_positions_alone_until_a_seed_is_given(tmp_path: Path) -> None:
    drawn = Loop(tmp_path, seeded=False, run="drawn").train(last=2)
    assert any("no seed of its own" in notice for notice in events_of_start(drawn, tmp_path, "drawn")["notices"])
    given = Loop(tmp_path, seeded=False, run="given", wrap={"seed": 5}).train(last=2)
    assert events_of_start(given, tmp_path, "given")["replayable"] is True
    first, second = records(tmp_path, "given")
    rows = [order(0, ROWS, seed=5)[at] for at in range(8)]
    assert [first.samples, second.samples] == [[(0, 4)], [(4, 8)]]
    assert torch.equal(torch.cat([micro[0] for _, micro, _ in given.steps]), torch.stack([data()[row] for row in rows]))


def events_of_start(loop: Loop, folder: Path, run: str) -> dict[str, Any]:
    loop.close()
    return events(folder, "start", run)[0].fields


def test_a_loader_that_is_not_prepared_yet_is_prepared_by_wrapping_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := make(), torch.optim.SGD(model.parameters(), lr=0.1))
    exporter = attach(accelerator, model, optimizer, run="run", dir=tmp_path, port=0, reader_seconds=0.0)
    loader = exporter.wrap(DataLoader(data(), batch_size=4))  # type: ignore[arg-type]
    assert accelerator.prepare(loader) is loader
    assert loader.batch_sampler is accelerator._dataloaders[0].batch_sampler
    assert len(loader) == 11
    for batch in loader:
        exporter.step(loss_from(model, batch))
    exporter.close()
    assert exporter.notices == []
    assert [record.samples for record in records(tmp_path)][-2:] == [[(36, 40)], [(40, 42)]]
    assert exporter.wrap(loader, order="blocks") is loader
    assert any("keeps its own order" in notice for notice in exporter.notices)


def test_a_step_that_the_scaler_skips_is_a_record_that_says_so(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # an Accelerator wants a GPU for fp16; its optimizer does not
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    exporter = attach(accelerator, model, optimizer, run="run", dir=tmp_path, port=0, reader_seconds=0.0, scaler=scaler)
    skipped = []
    for step in range(1, 4):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 2:
            next(model.parameters()).grad[0] = torch.inf
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
        exporter.step(loss)
    exporter.close()
    assert exporter.notices == []
    assert skipped == [False, True, False]
    found = records(tmp_path)
    assert values(found, "skipped") == [0, 1, 0]
    assert values(found, "loss_scale") == [4, 4, 2]
    assert [record.value("grad_norm") is None for record in found] == [False, True, False]
    assert events(tmp_path, "start")[0].fields["loss_scaling"] is True


def test_what_is_no_accelerator_is_refused_at_once(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(TypeError, match="accelerator: Block"):
        attach(model, model, torch.optim.SGD(model.parameters(), lr=0.1), dir=tmp_path)  # type: ignore[arg-type]
