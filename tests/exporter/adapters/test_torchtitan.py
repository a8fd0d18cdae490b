"""A trainer built like torchtitan's under the adapter: the example's own, with its containers, checkpoints and loader."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.exporter.runs import events, lines, norm64
from tests.real import free_port
from tests.rules.core.runs import default_pack
from trainwarden.exporter import Exporter
from trainwarden.exporter.adapters.torchtitan import attach
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.record import Step
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.runfolder import RunFolder

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "titan_style.py"


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def titan() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def make_trainer(titan: dict[str, Any], folder: Path, **config: Any) -> Any:
    small = {"width": 16, "layers": 1, "length": 16, "steps": 6, "checkpoint_interval": 4}
    return titan["Trainer"](titan["Config"](folder=str(folder / "saved"), **{**small, **config}))


def run(trainer: Any, folder: Path, **arguments: Any) -> Exporter:
    exporter = attach(trainer, "titan", dir=folder, **{"port": 0, "reader_seconds": 0.0, "cadence": 1, **arguments})
    try:
        trainer.train()
    finally:
        trainer.close()
    return exporter


def records(folder: Path, rank: int = 0) -> list[Step]:
    return [line for line in lines(folder, "titan", rank) if isinstance(line, Step)]


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for part in trainer.model_parts for parameter in part.parameters()]


def reference(titan: dict[str, Any], trainer: Any, batches: list[Any]) -> tuple[float, float]:
    """Return the mean loss over all tokens of a step and its gradient's norm, in float64."""
    model = titan["Llama"](trainer.config).double()
    model.load_state_dict({name: value.double() for name, value in trainer.model_parts[0].state_dict().items()})
    inputs = torch.cat([inputs["input"] for inputs, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    return float(loss.detach()), norm64([parameter.grad for parameter in model.parameters()])


def test_each_step_has_the_mean_loss_of_its_tokens_and_the_norm_before_clipping(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    trainer = make_trainer(titan, tmp_path, max_norm=0.3)
    expected: list[tuple[float, float]] = []
    original = trainer.train_step

    def train_step(batches: Any) -> None:
        drawn = [next(batches) for _ in range(trainer.gradient_accumulation_steps)]
        expected.append(reference(titan, trainer, drawn))
        original(iter(drawn))

    trainer.train_step = train_step
    exporter = run(trainer, tmp_path)
    assert exporter.notices == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 7))
    for record, (loss, norm) in zip(found, expected, strict=True):
        assert record.value("loss") == pytest.approx(loss, rel=1e-5)
        assert record.value("grad_norm") == pytest.approx(norm, rel=1e-5)
        assert record.value("clip_ratio") == pytest.approx(norm / 0.3, rel=1e-5)
        assert record.value("lr") == pytest.approx(3e-3 * min(1.0, record.step / 5))
        assert record.value("update_applied_ratio") == pytest.approx(record.value("update_ratio"), rel=0.1)
        assert record.value("batch_supervised_tokens") == 2 * 4 * 16
    assert [record.samples for record in found] == [[(at, at + 8)] for at in range(0, 48, 8)]
    (start,) = events(tmp_path, "start", "titan")
    assert start.fields["optimizer"] == "AdamW+Adam"
    assert start.fields["model"] == "Llama"


def test_checkpoints_are_complete_once_the_background_has_written_them(tmp_path: Path, titan: dict[str, Any]) -> None:
    run(make_trainer(titan, tmp_path), tmp_path)
    found = [(event.step, event.fields["path"]) for event in events(tmp_path, "checkpoint", "titan")]
    assert found == [(step, str(tmp_path / "saved" / f"step-{step}")) for step in (4, 6)]
    assert all(event.fields["complete"] and event.fields["finite"] for event in events(tmp_path, "checkpoint", "titan"))
    assert [event.fields["phase"] for event in events(tmp_path, "phase", "titan")].count("checkpoint") == 2
    (end,) = events(tmp_path, "exit", "titan")
    assert end.fields["reason"] == "finished"


def test_a_run_that_broke_goes_on_with_its_numbers_its_data_and_its_weights(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    whole = make_trainer(titan, tmp_path / "whole", steps=8)
    run(whole, tmp_path / "whole")
    trainer = make_trainer(titan, tmp_path, steps=8)
    original = trainer.train_step

    def breaking(batches: Any) -> None:
        if trainer.step == 7:
            raise RuntimeError("the node is gone")
        original(batches)

    trainer.train_step = breaking
    with pytest.raises(RuntimeError, match="node"):
        run(trainer, tmp_path)
    (end,) = events(tmp_path, "exit", "titan")
    assert (end.fields["reason"], end.fields["code"]) == ("exception", 1)
    again = make_trainer(titan, tmp_path, steps=8)
    run(again, tmp_path)
    assert [record.step for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    start = events(tmp_path, "start", "titan")[1]
    path = str(tmp_path / "saved" / "step-4")
    assert start.fields["resumed_from"] == {"attempt": 0, "step": 4, "path": path}
    for one, other in zip(records(tmp_path)[6:], records(tmp_path / "whole")[4:], strict=True):
        assert (one.samples, one.value("loss"), one.value("lr")) == (
            other.samples,
            other.value("loss"),
            other.value("lr"),
        )
    assert all(torch.equal(one, other) for one, other in zip(weights(whole), weights(again), strict=True))


def test_what_the_plan_names_is_loaded_and_not_the_newest_that_was_given_up_and_its_data_left_out(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    run(make_trainer(titan, tmp_path, steps=8), tmp_path)
    folder = RunFolder("titan", tmp_path)
    identity = folder.identity()
    assert identity is not None
    target = Target(attempt=0, step=4, path=str(tmp_path / "saved" / "step-4"))
    skip: dict[str, Any] = {"skip_samples": [(40, 48)], "skip_epoch": 0, "skip_mode": "shift"}
    plan = Plan(plan_id="p1", run_uid=identity.run_uid, for_attempt=1, target=target, lr_factor=0.5, **skip)
    folder.write_plan(plan)
    entry = LedgerEntry(plan_id="p1", for_attempt=1, target_step=4, **skip)
    folder.write_ledger(Ledger(run_uid=identity.run_uid, entries=[entry]))
    exporter = run(make_trainer(titan, tmp_path, steps=8), tmp_path)
    assert [record.step for record in records(tmp_path)] == [*range(1, 9), 5, 6, 7, 8]
    assert records(tmp_path)[-1].value("lr") == pytest.approx(1.5e-3)
    assert [record.samples for record in records(tmp_path)[8:]] == [[(32, 40)], [(48, 56)], [(56, 64)], [(64, 72)]]
    applied = events(tmp_path, "start", "titan")[1].fields["plan_applied"]
    assert (applied["plan_id"], applied["not_applied"]) == ("p1", {})
    assert exporter.global_step == 8
    run(make_trainer(titan, tmp_path, steps=9), tmp_path)  # its positions go on behind what was left out
    assert (records(tmp_path)[-1].step, records(tmp_path)[-1].samples) == (9, [(72, 80)])


def test_the_weights_are_bit_for_bit_those_of_a_trainer_without_the_adapter(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    plain, watched = make_trainer(titan, tmp_path / "a"), make_trainer(titan, tmp_path / "b")
    dataloader = watched.dataloader
    plain.train()
    plain.close()
    run(watched, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(watched), strict=True))
    assert watched.dataloader is dataloader
    left = {"train", "close", "train_step", "forward_backward_step"} & set(vars(watched))
    assert not left
    assert not {"save", "load"} & set(vars(watched.checkpointer))


def test_switched_off_it_trains_and_writes_nothing(
    tmp_path: Path, titan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    exporter = run(make_trainer(titan, tmp_path), tmp_path / "runs")
    assert exporter.global_step == 6
    assert not (tmp_path / "runs").exists()


def test_a_step_that_fails_on_its_loss_is_recorded_and_one_without_data_is_not(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    class DataloaderExhaustedError(Exception):
        pass

    trainer = make_trainer(titan, tmp_path, steps=5)
    original = trainer.train_step

    def failing(batches: Any) -> None:
        if trainer.step == 3:  # as torchtitan's own check does, between backward and update
            inputs, labels = next(batches)
            valid = torch.tensor(float("nan"))
            trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=valid)
            raise RuntimeError("Loss is not finite")
        original(batches)

    trainer.train_step = failing
    with pytest.raises(RuntimeError, match="not finite"):
        run(trainer, tmp_path)
    found = records(tmp_path)
    assert [record.value("nonfinite", "loss") for record in found] == [0, 0, 1]

    empty = make_trainer(titan, tmp_path / "empty", steps=5)
    original_step = empty.train_step

    def exhausted(batches: Any) -> None:
        if empty.step == 3:
            inputs, labels = next(batches)
            empty.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=torch.tensor(64.0))
            raise DataloaderExhaustedError
        original_step(batches)

    empty.train_step = exhausted
    with pytest.raises(DataloaderExhaustedError):
        run(empty, tmp_path / "empty")
    assert len(records(tmp_path / "empty")) == 2


def test_of_a_pipeline_only_the_last_stage_has_a_loss_and_each_stage_the_norm_of_its_parts(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    trainer = make_trainer(titan, tmp_path, steps=2)
    model = trainer.model_parts[0]
    trainer.model_parts = [model.layers, nn.ModuleList([model.tok_embeddings, model.norm, model.output])]
    trainer.optimizers = titan["OptimizersContainer"](trainer.model_parts, 1e-3)
    trainer.lr_schedulers = titan["LRSchedulersContainer"](trainer.optimizers, lambda step: 1.0)
    trainer.checkpointer.save = lambda *_, **__: False
    trainer.parallel_dims.pp_enabled, trainer.pp_has_last_stage = True, False

    original = trainer.forward_backward_step
    assert original.__self__ is trainer

    def staged(**given: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(
            model(given["input_dict"]["input"]).flatten(0, 1), given["labels"].flatten(), reduction="sum"
        )
        (loss / given["global_valid_tokens"]).backward()
        return torch.tensor(-1.0)  # what a stage without the loss answers

    trainer.forward_backward_step = staged
    run(trainer, tmp_path)
    found = records(tmp_path)
    assert [record.value("loss") for record in found] == [None, None]
    assert [record.value("clip_ratio") for record in found] == pytest.approx(
        [record.value("grad_norm") for record in found], rel=1e-5
    )
    assert len(events(tmp_path, "start", "titan")[0].fields["optimizer"].split("+")) == 2


def test_a_trainer_of_the_older_interface_returns_means_and_does_not_say_whether_it_saved(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    """torchtitan 0.2.0: no tokens of all ranks, meshes by name, save() returns nothing."""

    class Dims:
        pp_enabled = dp_enabled = False

    trainer = make_trainer(titan, tmp_path, steps=4, checkpoint_interval=3)
    trainer.parallel_dims = Dims()
    saved, made, expected = trainer.checkpointer.save, trainer.forward_backward_step, []

    def save(curr_step: int, last_step: bool = False) -> None:
        saved(curr_step, last_step)

    def train_step(batches: Any) -> None:
        drawn = [next(batches) for _ in range(2)]
        expected.append(reference(titan, trainer, drawn)[0])
        for inputs, labels in drawn:
            trainer.forward_backward_step(inputs, labels)
        for each in (trainer.optimizers.step, trainer.optimizers.zero_grad):
            each()

    def forward_backward_step(input_dict: Any, labels: torch.Tensor) -> torch.Tensor:
        halved = torch.tensor(2.0 * labels.numel())
        found: torch.Tensor = made(input_dict=input_dict, labels=labels, global_valid_tokens=halved)
        return found

    trainer.checkpointer.save, trainer.train_step = save, train_step
    trainer.forward_backward_step = forward_backward_step
    exporter = run(trainer, tmp_path)
    assert exporter.notices == []
    assert [record.value("loss") for record in records(tmp_path)] == pytest.approx(expected, rel=1e-5)
    assert [event.step for event in events(tmp_path, "checkpoint", "titan")] == [3, 4]
    assert records(tmp_path)[-1].samples == [(24, 32)]


def test_what_is_no_such_trainer_is_refused_with_all_that_it_lacks() -> None:
    class Half:
        step = 0
        optimizers: tuple[()] = ()

    with pytest.raises(TypeError) as refused:
        attach(Half())
    assert all(name in str(refused.value) for name in ("model_parts", "train_step", "forward_backward_step"))
    assert "optimizers (" not in str(refused.value)


def test_a_trainer_with_the_least_is_watched_and_what_is_gone_without_is_said(tmp_path: Path) -> None:
    class Least:
        def __init__(self) -> None:
            self.model_parts = [nn.Linear(4, 1)]
            self.optimizers = [torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)]
            self.step = 0

        def forward_backward_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.model_parts[0](batch).pow(2).mean()
            loss.backward()
            found: torch.Tensor = loss
            return found

        def train_step(self, batches: Iterator[torch.Tensor]) -> None:
            self.optimizers[0].zero_grad()
            self.forward_backward_step(next(batches))
            self.optimizers[0].step()

        def train(self) -> None:
            for _ in range(3):
                self.step += 1
                self.train_step(iter([torch.ones(2, 4)]))

    trainer = Least()
    exporter = attach(trainer, "titan", dir=tmp_path, port=0, reader_seconds=0.0)
    trainer.train()
    assert [record.step for record in records(tmp_path)] == [1, 2, 3]
    assert all(record.value("loss") and record.value("grad_norm") for record in records(tmp_path))
    assert ["checkpointer" in exporter.notices[0], "dataloader" in exporter.notices[1]] == [True, True]


def test_clipping_experts_and_the_rest_by_one_norm_is_seen_as_one(tmp_path: Path, titan: dict[str, Any]) -> None:
    """As torchtitan's clipping under expert parallelism does it: two norms, one total, two calls."""
    expected: list[float] = []

    def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        parts = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]]
        norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
        total = torch.stack(norms).square().sum().sqrt()
        expected.append(float(total))
        for part in parts:
            nn.utils.clip_grads_with_norm_(part, max_norm, total)
        return total

    trainer = make_trainer(titan, tmp_path, steps=3, max_norm=0.5)
    type(trainer).train_step.__globals__["clip_grad_norm_"] = clip
    run(trainer, tmp_path)
    assert [record.value("grad_norm") for record in records(tmp_path)] == pytest.approx(expected, rel=1e-5)
    assert [record.value("clip_ratio") for record in records(tmp_path)] == pytest.approx(
        [norm / 0.5 for norm in expected], rel=1e-5
    )


def launch(folder: Path, ranks: int, steps: int) -> None:
    """Run the example for some steps more, under torchrun where it has several ranks; its records and checkpoints lie in ``folder``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TRAINWARDEN_DIR": str(folder),
    }
    under = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    command = [sys.executable, *(under if ranks > 1 else []), str(EXAMPLE), str(steps)]
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_that_share_the_model_have_the_losses_and_norms_of_one_that_reads_all(
    tmp_path: Path, titan: dict[str, Any]
) -> None:
    launch(tmp_path, ranks=2, steps=4)
    whole = titan["Trainer"](titan["Config"](steps=4, folder=str(tmp_path / "one"), gradient_accumulation_steps=4))
    run(whole, tmp_path / "one")
    of_one, first, second = records(tmp_path / "one"), records(tmp_path), records(tmp_path, 1)
    for one, left, right in zip(of_one, first, second, strict=True):
        means = [record.value("rank_loss") for record in (left, right)]
        assert sum(value for value in means if value is not None) / 2 == pytest.approx(one.value("loss"), rel=1e-5)
        assert left.value("clip_ratio") == pytest.approx(one.value("clip_ratio"), rel=1e-4)
        assert [*left.samples, *right.samples] == [
            (at + n, at + n + 4) for at in [one.samples[0][0]] for n in (0, 8, 4, 12)
        ]
    assert [event.step for event in events(tmp_path, "checkpoint", "titan")] == [4]


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_ranks_has_positions_of_what_was_read_and_no_false_alert(tmp_path: Path) -> None:
    for ranks, steps in ((2, 25), (1, 15), (2, 15)):
        launch(tmp_path, ranks, steps)
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 56))
    read = [16] * 25 + [8] * 15 + [16] * 15  # samples of a step: two micro-batches of four from each rank
    assert [record.value("sample_position") for record in found] == [sum(read[:n]) for n in range(1, 56)]
    assert [event.fields["world_size"] for event in events(tmp_path, "start", "titan")] == [2, 1, 2]
    (recording,) = find_recordings([str(tmp_path / "titan")], io.BytesIO(), tmp_path)
    judged = Replay(Settings(), default_pack()).run(merged(recording)).incidents.values()
    assert [one for one in judged if "TrainingSampleOrder" in one["alerts"]] == []
