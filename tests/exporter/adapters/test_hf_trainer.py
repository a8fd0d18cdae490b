"""transformers' own Trainer on a CPU, under the callback of exporter/adapters/hf_trainer.py."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from typer.testing import CliRunner

from tests.exporter.adapters.tiny import arguments, curve, loss64, make, order, rows, rows_at, trainer, weights
from tests.exporter.runs import events, lines
from trainwarden.exporter.adapters.hf_trainer import TrainwardenCallback
from trainwarden.plan import Exclusion, Ledger, LedgerEntry, Plan, Probe, Target
from trainwarden.record import Step
from trainwarden.rules.cli import app
from trainwarden.runfolder import RunFolder


def warden(folder: Path, run: str = "run", **settings: Any) -> TrainwardenCallback:
    return TrainwardenCallback(run=run, dir=folder, port=0, reader_seconds=0.0, **settings)


def records(folder: Path, run: str = "run") -> list[Step]:
    return [line for line in lines(folder, run) if isinstance(line, Step)]


def values(found: list[Step], signal: str) -> list[float | None]:
    return [record.value(signal) for record in found]


class Snapshots(TrainerCallback):
    """Keeps the model as it was before each step, in float64."""

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.models.append(copy.deepcopy(kwargs["model"]).double())


def test_a_record_a_step_holds_what_the_trainer_logs_and_positions_hold_the_rows_that_it_read(tmp_path: Path) -> None:
    seen, callback = Snapshots(), warden(tmp_path)
    training = trainer(tmp_path, [callback, seen], gradient_accumulation_steps=3)
    training.train()
    assert callback.notices == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 11))
    assert values(found, "loss") == curve(training)
    assert values(found, "grad_norm") == pytest.approx(curve(training, "grad_norm"), rel=1e-6)
    assert values(found, "lr") == curve(training, "learning_rate")
    data = rows()
    for record, before in zip(found, seen.models, strict=True):
        epoch = int(record.value("epoch") or 0)
        chosen = [data[row] for row in rows_at(epoch, record.samples)]
        micro = [chosen[at : at + 4] for at in range(0, len(chosen), 4)]
        assert record.value("loss") == pytest.approx(loss64(before, micro), rel=1e-6)
        assert record.value("batch_supervised_tokens") == sum(int((row["labels"] != -100).sum()) for row in chosen)
    # 50 rows are 13 batches of four: four whole steps of an epoch, and one of a last batch of two rows
    assert [record.samples for record in found[:6]] == [
        [(0, 12)],
        [(12, 24)],
        [(24, 36)],
        [(36, 48)],
        [(48, 50)],
        [(0, 12)],
    ]
    assert values(found, "epoch")[:6] == [0, 0, 0, 0, 0, 1]


def test_what_is_trained_is_the_same_to_the_last_bit_with_the_callback(tmp_path: Path) -> None:
    alone, watched = trainer(tmp_path, []), trainer(tmp_path, [warden(tmp_path, cadence=1)])
    for training in (alone, watched):
        training.train()
    assert all(torch.equal(one, other) for one, other in zip(weights(alone.model), weights(watched.model), strict=True))
    assert [set(entry) for entry in watched.state.log_history] == [set(entry) for entry in alone.state.log_history]
    assert "training_step" not in vars(watched)


class SometimesNaN(GPT2LMHeadModel):
    """Loses its loss in the fourth step, while its gradients stay as they are."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        self.calls += 1
        if self.training and self.calls == 4:
            found.loss = found.loss + math.nan
        return found


def test_a_nan_that_the_trainers_log_hides_is_in_the_record_of_its_step(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], model=make(SometimesNaN), logging_nan_inf_filter=True)
    training.train()
    assert all(math.isfinite(loss) for loss in curve(training))
    losses = values(records(tmp_path), "loss")
    assert [step for step, loss in enumerate(losses, 1) if loss is None or not math.isfinite(loss)] == [4]
    assert math.isnan(losses[3] or 0)
    nonfinite = records(tmp_path)[3].signals["nonfinite"]
    assert isinstance(nonfinite, dict)
    assert nonfinite["loss"] == 1.0


def test_a_loss_of_ones_own_is_taken_as_the_trainer_takes_it(tmp_path: Path) -> None:
    def halved(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch / 2

    training = trainer(tmp_path, [warden(tmp_path)], compute_loss_func=halved, gradient_accumulation_steps=2)
    training.train()
    assert values(records(tmp_path), "loss") == curve(training)


@pytest.mark.parametrize(
    "others", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}], ids=["bf16", "compiled"]
)
def test_autocast_and_compiled_models_are_watched_all_the_same(tmp_path: Path, others: dict[str, Any]) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], max_steps=3, **others)
    training.train()
    found = records(tmp_path)
    assert values(found, "loss") == curve(training)
    assert values(found, "grad_norm") == pytest.approx(curve(training, "grad_norm"), rel=1e-5)
    assert events(tmp_path, "start")[0].fields["model"] == "GPT2LMHeadModel"


def test_a_trainer_that_does_not_clip_has_its_norm_and_is_not_said_to_clip(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], max_steps=3, max_grad_norm=0.0)
    training.train()
    found = records(tmp_path)
    assert values(found, "grad_norm") == pytest.approx(curve(training, "grad_norm"), rel=1e-6)
    assert values(found, "clip_ratio") == [None] * 3


def test_an_evaluation_is_a_phase_and_an_event_and_no_record(tmp_path: Path) -> None:
    training = trainer(
        tmp_path,
        [warden(tmp_path)],
        eval_dataset=rows(8),
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
    )
    training.train()
    assert [record.step for record in records(tmp_path)] == list(range(1, 11))
    told = [event for event in events(tmp_path) if event.kind in ("phase", "evaluation", "checkpoint")]
    assert [(event.kind, event.step, event.fields.get("phase")) for event in told[:6]] == [
        ("phase", 4, "evaluation"),
        ("phase", 4, "train"),
        ("evaluation", 4, None),
        ("phase", 4, "checkpoint"),
        ("phase", 4, "train"),
        ("checkpoint", 4, None),
    ]
    evaluation = next(event for event in told if event.kind == "evaluation")
    assert evaluation.fields["eval_loss"] == next(
        entry["eval_loss"] for entry in training.state.log_history if "eval_loss" in entry
    )


def test_an_evaluation_before_the_first_step_is_a_phase_too(tmp_path: Path) -> None:
    trainer(
        tmp_path, [warden(tmp_path)], max_steps=1, eval_dataset=rows(8), eval_strategy="steps", eval_on_start=True
    ).train()
    seen = [event for event in events(tmp_path) if event.kind in ("start", "phase", "evaluation")]
    assert [(event.kind, event.step, event.fields.get("phase")) for event in seen][:4] == [
        ("start", 0, None),
        ("phase", 0, "evaluation"),
        ("phase", 0, "init"),
        ("evaluation", 0, None),
    ]


def test_checkpoints_are_reported_whole_with_their_step_and_again_when_they_are_deleted(tmp_path: Path) -> None:
    trainer(tmp_path, [warden(tmp_path)], save_strategy="steps", save_steps=3, save_total_limit=2).train()
    out = tmp_path / "out"
    reported = [event for event in events(tmp_path, "checkpoint") if event.fields.get("complete")]
    assert [(event.step, event.fields["path"], event.fields["finite"]) for event in reported] == [
        (step, str(out / f"checkpoint-{step}"), True) for step in (3, 6, 9, 10)
    ]
    deleted = [event for event in events(tmp_path, "checkpoint") if event.fields.get("deleted")]
    assert [(event.step, event.fields["path"]) for event in deleted] == [
        (step, str(out / f"checkpoint-{step}")) for step in (3, 6)
    ]
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-10", "checkpoint-9"]


def test_checkpoints_of_the_model_alone_are_no_place_to_go_back_to(tmp_path: Path) -> None:
    callback = warden(tmp_path)
    trainer(tmp_path, [callback], save_strategy="steps", save_steps=5, save_only_model=True).train()
    assert events(tmp_path, "checkpoint") == []
    assert any("save_only_model" in notice for notice in callback.notices)
    assert callback.checkpoint() is None


def resumed(folder: Path, stop: int, last: int, **others: Any) -> tuple[Trainer, Trainer]:
    """Train to ``stop``, begin again from what the run's folder says, and train to ``last``."""
    first = trainer(folder, [warden(folder)], max_steps=stop, save_strategy="steps", save_steps=100, **others)
    first.train()
    callback = warden(folder)
    second = trainer(folder, [callback], max_steps=last, **others)
    torch.rand(7)  # another process has other random numbers
    second.train(resume_from_checkpoint=callback.checkpoint())
    return first, second


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_goes_on_with_the_next_number_and_the_next_samples(tmp_path: Path, accumulate: int) -> None:
    whole = trainer(tmp_path, [warden(tmp_path, run="whole")], max_steps=20, gradient_accumulation_steps=accumulate)
    whole.train()
    _, second = resumed(tmp_path, 15, 20, gradient_accumulation_steps=accumulate)
    expected, found = records(tmp_path, "whole"), records(tmp_path)
    assert [record.step for record in found] == list(range(1, 21))
    for name in ("loss", "grad_norm", "sample_position", "epoch", "batch_hash", "samples_seen", "optimizer_step"):
        assert values(found, name) == values(expected, name), name
    assert [record.samples for record in found] == [record.samples for record in expected]
    assert all(torch.equal(one, other) for one, other in zip(weights(whole.model), weights(second.model), strict=True))
    starts = events(tmp_path, "start")
    assert [start.fields["attempt"] for start in starts] == [0, 1]
    assert starts[1].fields["notices"] == []
    assert starts[1].fields["resumed_from"] == {
        "attempt": 0,
        "step": 15,
        "path": str(tmp_path / "out/checkpoint-15"),
    }


def test_an_order_that_the_arguments_do_not_fix_is_said(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], max_steps=1)
    torch.manual_seed(7)
    training.train()
    (start,) = events(tmp_path, "start")
    assert any("from seed 7" in notice and "data_seed" in notice for notice in start.fields["notices"])


def planned(folder: Path, target: int, **fields: Any) -> Plan:
    """Write a rollback of attempt 0 as the receiver does."""
    run = RunFolder("run", folder)
    uid = run.open_identity().run_uid
    where = Target(attempt=0, step=target, path=str(folder / f"out/checkpoint-{target}"))
    plan = Plan(plan_id="p1", run_uid=uid, for_attempt=1, target=where, **fields)
    run.write_plan(plan)
    entry = LedgerEntry(
        plan_id="p1",
        for_attempt=1,
        target_step=target,
        skip_samples=plan.skip_samples,
        skip_epoch=plan.skip_epoch,
        exclude=plan.exclude,
        skip_mode=plan.skip_mode,
    )
    run.write_ledger(Ledger(run_uid=uid, entries=[entry]))
    return plan


def rolled_back(
    folder: Path, others: dict[str, Any], **fields: Any
) -> tuple[list[Step], list[Step], TrainwardenCallback]:
    """Return the records of ten steps, and those made after a rollback to step 5."""
    first = trainer(folder, [warden(folder)], save_strategy="steps", save_steps=5, **others)
    first.train()
    planned(folder, 5, **fields)
    callback = warden(folder, dataset="tiny", shards=[("a", 0, 25), ("b", 25, 50)], reserve=0.1)
    second = trainer(folder, [callback], **others)
    path = callback.checkpoint()
    assert path == str(folder / "out/checkpoint-5")
    second.train(resume_from_checkpoint=path)
    found = records(folder)
    return found[:10], found[10:], callback


def test_a_plan_takes_the_run_back_and_puts_other_rows_in_the_place_of_what_it_skips(tmp_path: Path) -> None:
    before, after, callback = rolled_back(tmp_path, {}, skip_samples=[(26, 31)], lr_factor=0.5)
    assert [record.step for record in after] == [6, 7, 8, 9, 10]
    (start,) = (event for event in events(tmp_path, "start") if event.fields["attempt"] == 1)
    applied = start.fields["plan_applied"]
    assert (applied["plan_id"], applied["skip_samples"], applied["not_applied"]) == ("p1", [[26, 31]], {})
    assert values(after, "lr") == [0.5 * (rate or 0) for rate in values(before[5:], "lr")]
    assert [record.samples for record in after] == [record.samples for record in before[5:]]
    assert values(after, "substituted_samples") == [0, 2, 3, 0, 0]  # steps 7 and 8 read 24–28 and 28–32
    same = [one.value("batch_hash") == other.value("batch_hash") for one, other in zip(before[5:], after, strict=True)]
    assert same == [True, False, False, True, True]
    assert values(after, "loss")[0] == values(before[5:], "loss")[0]
    assert callback.notices == []
    skipped = {order(0)[position] for position in range(26, 31)}
    read = {row for record in after for row in rows_at(0, record.samples)} - skipped
    assert len(read) == 15


def test_a_probe_without_evaluation_keeps_the_trainer_from_evaluating(tmp_path: Path) -> None:
    often: dict[str, Any] = {"eval_dataset": rows(8), "eval_strategy": "steps", "eval_steps": 2}
    probe = Probe(kind="without_evaluation", first_step=6, steps=4)
    before, after, callback = rolled_back(tmp_path, often, action="probe", probe=probe)
    assert [record.step for record in after] == [6, 7, 8, 9, 10]
    told = {0: 0, 1: 0}
    attempt = 0
    for event in events(tmp_path):
        attempt = event.fields["attempt"] if event.kind == "start" else attempt
        told[attempt] += event.kind == "evaluation"
    assert told == {0: 5, 1: 0}
    assert values(after, "loss")[0] == values(before[5:], "loss")[0]
    assert callback.notices == []


def test_rows_that_a_plan_excludes_are_replaced_wherever_they_come(tmp_path: Path) -> None:
    what = Exclusion(dataset="tiny", shard="b", first=0, end=5)  # rows 25 to 29
    before, after, _ = rolled_back(tmp_path, {}, exclude=[what])
    expected = [sum(25 <= row < 30 for row in rows_at(0, record.samples)) for record in before[5:]]
    assert sum(expected) > 0
    assert values(after, "substituted_samples") == expected
    assert {span.name for span in after[0].shards} <= {"a", "b"}


def test_a_loader_whose_order_nobody_can_repeat_has_positions_and_refuses_to_skip(tmp_path: Path) -> None:
    others = {"accelerator_config": {"use_seedable_sampler": False}}
    before, after, _ = rolled_back(tmp_path, others, skip_samples=[(26, 31)])
    assert [record.samples for record in after] == [record.samples for record in before[5:]]
    start = events(tmp_path, "start")[1].fields
    assert (start["replayable"], start["can_skip"]) == (False, [])
    assert "no seed of its own" in start["plan_applied"]["not_applied"]["skip_samples"]
    assert any("not replayable" in notice for notice in start["notices"])


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(rows())


def test_a_stream_has_positions_alone(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], train_dataset=Stream(), max_steps=4)
    training.train()
    found = records(tmp_path)
    assert [record.samples for record in found] == [[(0, 4)], [(4, 8)], [(8, 12)], [(12, 16)]]
    assert values(found, "loss") == curve(training)
    assert events(tmp_path, "start")[0].fields["replayable"] is False


def test_switched_off_nothing_is_seen_or_written_and_the_skip_holds_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, after, _ = rolled_back(tmp_path, {}, skip_samples=[(26, 31)])
    watched = Snapshots()
    before = sorted((tmp_path / "run").rglob("*"))
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    callback = warden(tmp_path, dataset="tiny", shards=[("a", 0, 25), ("b", 25, 50)], reserve=0.1)
    training = trainer(tmp_path, [callback, watched])
    training.train(resume_from_checkpoint=callback.checkpoint())
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert curve(training)[5:] == values(after, "loss")


def test_each_training_of_one_trainer_is_a_start_of_its_own(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], max_steps=2)
    training.train()
    training.train()
    assert [record.step for record in records(tmp_path)] == [1, 2, 1, 2]
    assert [event.fields["attempt"] for event in events(tmp_path, "start")] == [0, 1]
    assert [event.fields["reason"] for event in events(tmp_path, "exit")] == ["finished", "finished"]


class Fragile(Trainer):
    """Has too little memory for batches of four."""

    steps = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(inputs["input_ids"]) == 4 and self.state.global_step == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss


def test_a_training_that_begins_again_with_smaller_batches_is_a_new_attempt(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], kind=Fragile, max_steps=3, auto_find_batch_size=True)
    training.train()
    assert [record.step for record in records(tmp_path)] == [1, 1, 2, 3]
    assert [record.samples for record in records(tmp_path)] == [[(0, 4)], [(0, 3)], [(3, 6)], [(6, 9)]]
    assert [event.fields["reason"] for event in events(tmp_path, "exit")] == ["exception", "finished"]


def test_a_training_that_raises_is_closed_by_the_next_and_leaves_nothing_in_the_trainer(tmp_path: Path) -> None:
    training = trainer(tmp_path, [warden(tmp_path)], kind=Fragile, max_steps=3)
    with pytest.raises(RuntimeError, match="allocate"):
        training.train()
    training.args.per_device_train_batch_size = 2
    training._train_batch_size = 2
    training.train()
    assert [record.step for record in records(tmp_path)] == [1, 1, 2, 3]
    assert "training_step" not in vars(training)


def test_the_callback_can_be_given_as_a_class_pickled_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWARDEN_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINWARDEN_RUN", "named")
    trainer(tmp_path, [TrainwardenCallback], max_steps=2).train()
    assert [record.step for record in records(tmp_path, "named")] == [1, 2]

    class Copying(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert callback.exporter is not None
            self.copy = pickle.loads(pickle.dumps(callback))

    callback, copying = warden(tmp_path, cadence=3), Copying()
    training = trainer(tmp_path, [callback, copying], max_steps=2)
    training.train()
    training.save_state()
    assert copying.copy.exporter is None
    assert copy.deepcopy(callback)._settings == copying.copy._settings == callback._settings


def test_a_fault_of_the_exporters_own_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("trainwarden.exporter.adapters.hf_trainer.Exporter", broken)
    callback = warden(tmp_path)
    training = trainer(tmp_path, [callback], max_steps=2)
    training.train()
    assert len(curve(training)) == 2
    assert any("broken" in notice for notice in callback.notices)


def test_an_argument_of_no_use_is_said_when_the_callback_is_made() -> None:
    with pytest.raises(ValueError, match="cadence"):
        TrainwardenCallback(cadence=0)
    with pytest.raises(TypeError, match="no_such_setting"):
        TrainwardenCallback(no_such_setting=1)


def test_the_journal_is_replayed_like_any_other(tmp_path: Path) -> None:
    trainer(tmp_path, [warden(tmp_path)], model=make(SometimesNaN)).train()
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "--output", "json"])
    (report,) = json.loads(replayed.stdout)
    assert report["records"] == 10
    assert {"loss", "grad_norm", "lr", "sample_position", "batch_hash"} <= set(report["signals"])
    assert "TrainingNonFinite" in {name for incident in report["incidents"] for name in incident["alerts"]}
    asked = ["data", "show", "--run", "run", "--dir", str(tmp_path), "--step", "2-3", "--output", "json"]
    shown = json.loads(CliRunner().invoke(app, asked).stdout)
    found = [[row["row"] for row in step["ranks"][0]["rows"]] for step in shown["steps"]]
    assert found == [order(0)[4:8], order(0)[8:12]]


def test_nothing_of_a_micro_batch_is_read_on_the_way(tmp_path: Path) -> None:
    class OnMeta(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for _ in range(2):  # reading a value on this device raises
                inputs = {"input_ids": torch.zeros((2, 3), dtype=torch.int64, device="meta")}
                callback._micro_step(inputs, torch.zeros((), device="meta"))
            self.loss = callback._loss

    callback, reading = warden(tmp_path), OnMeta()
    trainer(tmp_path, [callback, reading], max_steps=2).train()
    assert callback.notices == []
    assert reading.loss is not None
    assert reading.loss.device.type == "meta"


def test_the_exporter_is_told_how_many_steps_there_will_be(tmp_path: Path) -> None:
    class Looking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert callback.exporter is not None
            self.total = callback.exporter._settings.total_steps

    callback, looking = warden(tmp_path), Looking()
    trainer(tmp_path, [callback, looking], max_steps=-1, num_train_epochs=1).train()
    assert looking.total == 13


def test_without_the_trainer_itself_what_optimizers_do_is_recorded_and_the_rest_is_said(tmp_path: Path) -> None:
    callback, model = warden(tmp_path), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = CallbackHandler([DefaultFlowCallback(), callback], model, None, optimizer, None)
    handler.train_dataloader = torch.utils.data.DataLoader(rows(), batch_size=4)
    args, state, control = arguments(tmp_path), TrainerState(max_steps=2, logging_steps=1), TrainerControl()
    control = handler.on_train_begin(args, state, control)
    for step, batch in zip((1, 2), handler.train_dataloader, strict=False):
        control = handler.on_step_begin(args, state, control)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step
        control = handler.on_step_end(args, state, control)
    handler.on_train_end(args, state, control)
    assert any("the trainer was not found" in notice for notice in callback.notices)
    found = records(tmp_path)
    assert values(found, "loss") == [None, None]
    assert all(record.value("grad_norm") for record in found)
