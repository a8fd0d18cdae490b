"""The learning rate of a running training is lowered by a plan file, from the named step on, and comes back by itself."""

from __future__ import annotations

import copy
import importlib
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.exporter.runs import events, loss_of, make, steps, watch
from tests.exporter.seams import Watch
from tests.exporter.test_no_host_sync import Spy
from tests.real import wait_until
from trainwarden.exporter import Exporter
from trainwarden.exporter.soft import NEVER
from trainwarden.plan import Lowering, Plan, Target
from trainwarden.record import Step
from trainwarden.runfolder import RunFolder


def ask(folder: Path, at_step: int, run: str = "run", attempt: int = 0, **fields: Any) -> Plan:
    """Write a plan as the receiver does; ``fields`` replace its own."""
    runs = RunFolder(run, folder)
    identity = runs.identity()
    assert identity is not None
    given: dict[str, Any] = {"lr_factor": 0.25, "lr_steps": 4, "lr_return_steps": 2, "plan_id": "soft-1", **fields}
    plan = Plan(run_uid=identity.run_uid, for_attempt=attempt, action="lower_lr", at_step=at_step, **given)
    path = runs.write_plan(plan)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return plan


def armed(exporter: Exporter) -> None:
    """Wait until the plan was read: no step is made meanwhile."""
    assert exporter._parts is not None
    soft = exporter._parts.soft
    wait_until(lambda: soft.armed < NEVER, 10, what="the plan is read")


def told(folder: Path, **kwargs: Any) -> list[dict[str, Any]]:
    return [event.fields for event in events(folder, "lower_lr", **kwargs)]


def refusal(exporter: Exporter, folder: Path) -> str:
    """Wait for what is said where nothing is lowered, close, and return it as the event has it."""
    wait_until(lambda: any("is not lowered" in said for said in exporter.notices), 10, what="it is refused")
    exporter.close()
    [fields] = told(folder)
    assert fields["state"] == "not_applied"
    return str(fields["reason"])


class Trained:
    """A small model under a scheduler; what the optimizer was given at each step, and what the scheduler saw."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer], schedule: Any = None) -> None:
        self.model = make()
        self.optimizer = optimizer(self.model.parameters())
        self.schedule = None if schedule is None else lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.seen: list[float] = []
        self.step = 0
        self.compiled: Any = None

    def go(self, count: int, exporter: Exporter | None = None, factor: Callable[[int], float] | None = None) -> None:
        """Train on; ``factor`` multiplies the rate by hand, for the reference."""
        for _ in range(count):
            self.step += 1
            self.optimizer.zero_grad()
            loss = loss_of(self.model, self.step)
            loss.backward()
            group = self.optimizer.param_groups[0]
            given = group["lr"]
            if factor is not None:
                group["lr"] = given * factor(self.step)
            (self.compiled or self.optimizer.step)()
            if factor is not None:
                group["lr"] = given
            self.seen.append(float(group["lr"]))
            if self.schedule is not None:
                self.schedule.step()
            if exporter is not None:
                exporter.step(loss)

    def same_as(self, other: Trained) -> bool:
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def decay(step: int) -> float:
    return 1.0 / (1.0 + 0.05 * step)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "fused tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_lowered_for_the_named_steps_comes_back_and_no_scheduler_sees_it(kind: str, tmp_path: Path) -> None:
    run, reference = Trained(KINDS[kind], decay), Trained(KINDS[kind], decay)
    exporter = watch(run.model, run.optimizer, tmp_path, cadence=1)
    before = run.optimizer.step
    run.go(3, exporter)
    lowering = ask(tmp_path, at_step=6).lowering
    assert lowering is not None
    armed(exporter)
    run.go(12, exporter)
    assert exporter._parts is not None
    assert exporter._parts.soft.armed == NEVER
    assert run.optimizer.step == before  # torch is as it was
    found = steps(exporter, tmp_path)
    reference.go(15, factor=lowering.at)
    assert run.same_as(reference)
    assert run.seen == reference.seen
    rate = 0.05 if kind == "sgd" else 0.01
    wanted = [rate * decay(step - 1) * lowering.at(step) for step in range(1, 16)]
    assert [record.value("lr") for record in found] == pytest.approx(wanted, rel=1e-5)
    said = told(tmp_path)
    assert [fields["state"] for fields in said] == ["began", "returns", "ended"]
    assert [event.step for event in events(tmp_path, "lower_lr")] == [5, 9, 11]
    asked = {"plan_id": "soft-1", "factor": 0.25, "first_step": 6, "steps": 4, "return_steps": 2}
    assert said[0] == {"state": "began", **asked}
    assert said[2] == {"state": "ended", "updates": 6, **asked}


def test_each_is_told_before_the_first_step_that_is_trained_under_it(tmp_path: Path) -> None:
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    ask(tmp_path, at_step=4, lr_return_steps=0)
    armed(exporter)
    run.go(12, exporter)
    found = steps(exporter, tmp_path)
    seq = {record.step: record.seq for record in found}
    began, ended = events(tmp_path, "lower_lr")
    assert seq[3] < began.seq < seq[4]
    assert seq[7] < ended.seq < seq[8]
    assert [record.step for record in found if record.value("lr") == pytest.approx(0.0025)] == [4, 5, 6, 7]


def test_the_window_goes_by_global_steps_also_where_a_scaler_skips_one(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    exporter = watch(model, optimizer, tmp_path, scaler=scaler)
    ask(tmp_path, at_step=3)
    armed(exporter)
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (float("inf") if step == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.param_groups[0]["lr"] == 0.01
        exporter.step(loss)
    found = steps(exporter, tmp_path)
    assert [record.value("skipped") for record in found].count(1.0) == 1
    lowering = Lowering(factor=0.25, first_step=3, steps=4, return_steps=2)
    assert [record.value("lr") for record in found] == pytest.approx([0.01 * lowering.at(s) for s in range(1, 11)])
    assert told(tmp_path)[-1]["updates"] == 5


def test_all_of_several_optimizers_are_lowered_and_one_without_a_rate_keeps_all_as_they_are(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    for name, broken in (("both", False), ("none", True)):
        model = make()
        parameters = list(model.parameters())
        first = torch.optim.AdamW(parameters[:4], lr=0.01)
        second = Own(parameters[4:], lr=0.02)
        exporter = watch(model, [first, second], tmp_path, run=name)
        if broken:
            second.param_groups[0]["lr"] = None
        ask(tmp_path, at_step=3, run=name)
        if broken:
            wait_until(lambda one=exporter: one.notices, 10, what="it is refused")  # type: ignore[misc]
            second.param_groups[0]["lr"] = 0.02
        else:
            armed(exporter)
        for step in range(1, 12):
            loss = loss_of(model, step)
            loss.backward()
            first.step()
            second.step()
            exporter.step(loss)
        exporter.close()
        said = told(tmp_path, run=name)
        if broken:
            assert [fields["state"] for fields in said] == ["not_applied"]
            assert said[0]["reason"] == "Own has a group without lr"
        else:
            assert said[-1]["updates"] == 12
            rates = {one.step: one.signals["lr"] for one in _records(tmp_path, name)}
            assert rates[4] == pytest.approx({"all": 0.005, "0.0": 0.0025, "1.0": 0.005})
            assert rates[9] == pytest.approx({"all": 0.02, "0.0": 0.01, "1.0": 0.02})


def _records(folder: Path, run: str) -> list[Step]:
    from tests.exporter.runs import lines

    return [line for line in lines(folder, run) if isinstance(line, Step)]


def test_a_plan_that_was_read_too_late_changes_nothing_and_says_so(tmp_path: Path) -> None:
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    run.go(6, exporter)
    ask(tmp_path, at_step=6)
    assert "it was read after step 6: too late for step 6" in refusal(exporter, tmp_path)


def test_a_training_thread_that_passed_the_step_meanwhile_changes_nothing(tmp_path: Path) -> None:
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    run.go(2, exporter)
    ask(tmp_path, at_step=5)
    armed(exporter)
    assert exporter._parts is not None
    soft = exporter._parts.soft
    soft.armed = NEVER  # as if it had come to know two steps later
    run.go(4, exporter)
    soft.armed = 4
    run.go(4, exporter)
    assert "this rank had passed step 5 when it came to know" in refusal(exporter, tmp_path)
    assert {record.value("lr") for record in _records(tmp_path, "run")} == {0.01}


def test_what_is_of_another_attempt_or_lay_there_before_the_start_is_passed_over(tmp_path: Path) -> None:
    RunFolder("run", tmp_path).open_identity()
    ask(tmp_path, at_step=5)
    ask(tmp_path, at_step=5, attempt=1, plan_id="next")
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    ask(tmp_path, at_step=5, attempt=1, plan_id="next-2")
    ask(tmp_path, at_step=5, plan_id="mine")
    armed(exporter)
    run.go(14, exporter)
    steps(exporter, tmp_path)
    assert {fields["plan_id"] for fields in told(tmp_path)} == {"mine"}


def test_a_second_one_waits_for_nobody_and_a_third_after_the_first_is_over_is_taken(tmp_path: Path) -> None:
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    ask(tmp_path, at_step=5)
    armed(exporter)
    ask(tmp_path, at_step=7, plan_id="soft-2")
    wait_until(lambda: exporter.notices, 10, what="the second is refused")
    assert "lowered already, by plan soft-1 up to step 10" in exporter.notices[0]
    run.go(12, exporter)
    ask(tmp_path, at_step=15, plan_id="soft-3", lr_steps=1, lr_return_steps=0)
    armed(exporter)
    run.go(6, exporter)
    exporter.close()
    states = [(fields["plan_id"], fields["state"]) for fields in told(tmp_path)]
    assert states == [
        ("soft-2", "not_applied"),
        *[("soft-1", state) for state in ("began", "returns", "ended")],
        *[("soft-3", state) for state in ("began", "ended")],
    ]
    assert [one.value("lr") for one in _records(tmp_path, "run") if one.step in (14, 15, 16)] == [0.01, 0.0025, 0.01]


def test_a_plan_file_that_others_may_write_is_refused_and_a_rollback_is_none(tmp_path: Path) -> None:
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    runs = RunFolder("run", tmp_path)
    identity = runs.identity()
    assert identity is not None
    target = Target(attempt=0, step=1, path="c")
    runs.write_plan(Plan(plan_id="back", run_uid=identity.run_uid, for_attempt=0, target=target, lr_factor=0.5))
    path = runs.plan_folder / "0-soft-1.json"
    ask(tmp_path, at_step=5)
    path.chmod(0o666)
    wait_until(lambda: exporter.notices, 10, what="it is refused")
    run.go(8, exporter)
    exporter.close()
    assert "a plan must be 0600" in exporter.notices[0]
    assert told(tmp_path) == []
    assert {record.value("lr") for record in _records(tmp_path, "run")} == {0.01}


def test_a_factor_that_a_resume_left_and_a_lower_rate_multiply_and_both_are_taken_back(tmp_path: Path) -> None:
    runs = RunFolder("run", tmp_path)
    identity = runs.open_identity()
    (runs.path / "attempt-0").mkdir()
    target = Target(attempt=0, step=4, path=str(tmp_path / "c.pt"))
    (tmp_path / "c.pt").write_bytes(b"state")
    runs.write_plan(Plan(plan_id="back", run_uid=identity.run_uid, for_attempt=1, target=target, lr_factor=0.5))
    for rate in (0.01, torch.tensor(0.01)):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=copy.copy(rate), foreach=False)
        exporter = watch(model, optimizer, tmp_path)
        attempt = exporter.attempt
        assert attempt is not None
        assert exporter.resume() == target
        exporter.resumed(4)
        ask(tmp_path, at_step=8, attempt=attempt, plan_id=f"soft-{attempt}")
        armed(exporter)
        for step in range(5, 18):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
            exporter.step(loss)
        exporter.close()
        lowering = Lowering(factor=0.25, first_step=8, steps=4, return_steps=2)
        mine = {one.step: one.value("lr") for one in _records(tmp_path, "run")}  # the newest attempt's are the last
        assert mine == pytest.approx({step: 0.005 * lowering.at(step) for step in range(5, 18)})


def test_where_no_update_goes_through_the_optimizer_it_is_said_that_nothing_was_lowered(tmp_path: Path) -> None:
    run = Trained(KINDS["adamw"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    ask(tmp_path, at_step=3)
    armed(exporter)
    for step in range(1, 10):
        exporter.step(loss_of(run.model, step))  # as where a graph is replayed
    assert "no optimizer step of these was seen" in refusal_of(exporter, tmp_path)


def refusal_of(exporter: Exporter, folder: Path) -> str:
    exporter.close()
    said = told(folder)
    assert [fields["state"] for fields in said] == ["began", "not_applied"]
    return str(said[1]["reason"])


def test_it_goes_on_and_comes_back_behind_the_exporters_end(tmp_path: Path) -> None:
    run, reference = Trained(KINDS["sgd"]), Trained(KINDS["sgd"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    lowering = ask(tmp_path, at_step=3).lowering
    assert lowering is not None
    armed(exporter)
    run.go(4, exporter)
    exporter.close()
    run.go(8, exporter)
    reference.go(12, factor=lowering.at)
    assert run.same_as(reference)


def test_where_the_exporter_is_off_no_plan_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder("run", tmp_path).open_identity()
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    run, reference = Trained(KINDS["sgd"]), Trained(KINDS["sgd"])
    exporter = watch(run.model, run.optimizer, tmp_path)
    ask(tmp_path, at_step=3)
    time.sleep(1.2)
    run.go(8, exporter)
    reference.go(8)
    assert run.same_as(reference)
    assert exporter.notices == []


def test_no_step_waits_for_anything_while_the_rate_is_lowered_and_comes_back(tmp_path: Path) -> None:
    with Watch() as watching:
        run = Trained(KINDS["adamw"], decay)
        exporter = watch(run.model, run.optimizer, tmp_path, cadence=2)
        run.go(3, exporter)
        ask(tmp_path, at_step=6)
        armed(exporter)
        watching.caught.clear()
        run.go(12, exporter)
        found = list(watching.caught)
    exporter.close()
    assert [fields["state"] for fields in told(tmp_path)] == ["began", "returns", "ended"]
    assert found == []


def test_a_rate_on_the_device_is_multiplied_there_and_no_value_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda supports_xla=True: ["meta"])
    with torch.device("meta"):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        rate = optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)  # its constructor would read it
        exporter = watch(model, optimizer, tmp_path)
        ask(tmp_path, at_step=2)
        armed(exporter)
        for _ in range(9):
            ids = torch.zeros(4, 12, dtype=torch.int64)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            exporter.step(loss)
    steps(exporter, tmp_path)  # fails if anything in the exporter raised: reading a value does, on meta
    assert optimizer.param_groups[0]["lr"] is rate
    assert told(tmp_path)[-1]["updates"] == 6
    seen = []
    for lowered in (False, True):
        run = Trained(KINDS["tensor"])
        exporter = watch(run.model, run.optimizer, tmp_path, run=f"spied-{lowered}")
        if lowered:
            ask(tmp_path, at_step=2, run=f"spied-{lowered}")
            armed(exporter)
        with Spy() as spy:
            run.go(9, exporter)
        seen.append(spy.seen)
        exporter.close()
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_a_compiled_optimizer_step_with_a_tensor_as_its_rate_is_not_compiled_anew(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    run, reference = Trained(KINDS["tensor"]), Trained(KINDS["tensor"])
    exporter = watch(run.model, run.optimizer, tmp_path, cadence=1000)
    run.compiled = torch.compile(run.optimizer.step, backend="eager")
    run.go(3, exporter)
    lowering = ask(tmp_path, at_step=5).lowering
    assert lowering is not None
    armed(exporter)
    run.go(1, exporter)
    before = counters["stats"]["unique_graphs"]
    run.go(8, exporter)
    assert counters["stats"]["unique_graphs"] == before > 0
    exporter.close()
    reference.go(12, factor=lowering.at)
    for mine, theirs in zip(run.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert told(tmp_path)[-1]["updates"] == 6
