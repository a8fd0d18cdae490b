"""What the guard cannot leave out it refuses, before the first update, in a sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.runs import events, lines, loss_of, make, watch
from trainwarden.exporter.guard import Guard
from trainwarden.exporter.guard.undo import undo_of
from trainwarden.record import Step


class Own(torch.optim.AdamW):
    """A step of its own, with state that nobody else knows of."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def refused(build: Any) -> str:
    with torch.device("meta"):
        model = make()
    with pytest.raises(ValueError, match="cannot leave out") as found:
        undo_of(build(model))
    return str(found.value)


def test_an_optimizer_whose_state_is_not_known_is_refused_by_name() -> None:
    assert "Own: it is not known where it keeps its state" in refused(lambda model: Own(model.parameters()))
    for kind in (torch.optim.LBFGS, torch.optim.ASGD, torch.optim.Rprop):
        assert kind.__name__ in refused(lambda model, kind=kind: kind(model.parameters()))


def test_a_step_counter_on_the_host_is_refused_where_parameters_are_on_a_device() -> None:
    said = refused(lambda model: torch.optim.AdamW(model.parameters()))
    assert "step counter is on the host" in said
    assert "fused=True or capturable=True" in said
    said = refused(lambda model: torch.optim.NAdam(model.parameters()))
    assert "fused" not in said
    assert "capturable=True" in said
    assert "Use another" in refused(lambda model: torch.optim.Adagrad(model.parameters()))
    with torch.device("meta"):
        assert undo_of(torch.optim.SGD(make().parameters(), momentum=0.9)).how == "copies"


def test_what_begins_otherwise_or_is_mixed_is_refused() -> None:
    assert "dampening=0" in refused(lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.5))
    assert "differentiable" in refused(lambda model: torch.optim.Adam(model.parameters(), differentiable=True))
    model = make()
    first, *rest = model.parameters()
    mixed = torch.optim.AdamW([{"params": [first], "fused": True}, {"params": rest, "fused": False}])
    with pytest.raises(ValueError, match="some parameter groups are fused and some are not"):
        undo_of(mixed)
    elsewhere = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="on the host and elsewhere"):
        undo_of(torch.optim.SGD([*model.parameters(), *elsewhere.parameters()]))


def test_a_sharded_wrapper_and_a_second_guard_are_refused(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters()), tmp_path)
    with pytest.raises(TypeError, match="SGD is no"):
        Guard(torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    Guard(exporter)
    with pytest.raises(ValueError, match="a guard already"):
        Guard(exporter)
    exporter.close()


def test_sparse_gradients_are_refused_in_the_first_step(tmp_path: Path) -> None:
    model = nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    Guard(exporter)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    exporter.close()


def test_switched_off_the_exporter_guards_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    guard = Guard(exporter)
    assert ["no update is left out" in said for said in exporter.notices] == [True]
    (loss_of(model, 1) * float("nan")).backward()
    optimizer.step()
    exporter.step()
    guard.remove()
    assert not bool(next(model.parameters()).isfinite().all())


def test_a_guard_that_is_removed_lets_everything_through(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    guard = Guard(exporter)
    for step in (1, 2):
        optimizer.zero_grad()
        (loss_of(model, step) * float("nan")).backward()
        optimizer.step()
        exporter.step()
        assert bool(next(model.parameters()).isfinite().all()) == (step == 1)
        guard.remove()
    exporter.close()
    first, second = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert first.value("skipped") == 1
    assert second.value("skipped") is None
    assert [event.fields for event in events(tmp_path, "guard")][-1] == {"removed": True}


def test_a_fault_of_the_guard_costs_its_step_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    Guard(exporter)
    monkeypatch.setattr("trainwarden.exporter.guard.verdict.Verdicts.judge", lambda *_: 1 / 0)
    before = next(model.parameters()).detach().clone()
    loss_of(model, 1).backward()
    optimizer.step()
    exporter.step()
    exporter.close()
    assert not torch.equal(before, next(model.parameters()))
    assert ["ZeroDivisionError" in said for said in exporter.notices] == [True]


def test_nothing_of_the_exporter_imports_the_guard() -> None:
    program = (
        "import sys, importlib, pathlib, trainwarden.exporter as room\n"
        "home = pathlib.Path(room.__file__).parent\n"
        "for path in sorted(home.rglob('*.py')):\n"
        "    parts = path.relative_to(home).with_suffix('').parts\n"
        "    if parts[0] not in ('guard', 'adapters', 'startup'):\n"
        "        importlib.import_module('.'.join(('trainwarden.exporter', *parts)).removesuffix('.__init__'))\n"
        "assert 'trainwarden.exporter.observer' in sys.modules\n"
        "print([name for name in sys.modules if name.startswith('trainwarden.exporter.guard')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[]"
