"""What ``trainwarden exec`` does to a training process that it is in: nothing, and which model it finds there."""

from __future__ import annotations

import copy
import importlib
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.exporter.adapters.followed import Begin, accumulate, finish, records
from tests.exporter.runs import Block, events, lines, loss_of, make, tokens, watch
from tests.exporter.seams import Watch
from trainwarden.record import Step


def test_it_computes_what_it_computes_alone(tmp_path: Path, begin: Begin) -> None:
    weights = []
    for watched in (False, True):
        attachment = begin() if watched else None
        model = make()
        torch.manual_seed(3)
        accumulate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 5)
        if attachment is not None:
            finish(attachment)
        weights.append((model.state_dict(), torch.rand(4)))
    (alone, chance), (observed, same) = weights
    assert len(records(tmp_path)) == 5
    assert all(torch.equal(alone[name], observed[name]) for name in alone)
    assert torch.equal(chance, same)


def test_it_stands_back_where_the_script_makes_an_exporter(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = begin()
    others = [register_optimizer_step_pre_hook(lambda *_: None), register_optimizer_step_post_hook(lambda *_: None)]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path, "own")
    for step in range(1, 4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    for other in others:
        other.remove()
    assert attachment._exporter is None
    assert sum("stands back" in message for message in caplog.messages) == 1
    assert [line.step for line in lines(tmp_path, "own") if isinstance(line, Step)] == [1, 2, 3]
    assert lines(tmp_path) == []


def test_it_stands_back_also_where_the_script_makes_one_later(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, optimizer, 2)
    exporter = watch(model, optimizer, tmp_path, "own")
    for step in range(1, 4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    finish(attachment)
    assert [record.step for record in records(tmp_path)] == [1, 2]
    assert [line.step for line in lines(tmp_path, "own") if isinstance(line, Step)] == [1, 2, 3]
    assert [event.step for event in events(tmp_path, "exit")] == [2]


def test_a_copy_of_the_model_and_a_file_with_it_know_nothing_of_it(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    accumulate(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"trainwarden" not in file.getvalue().replace(b"trainwarden.tests", b"")
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other, Block)
        assert torch.equal(other(tokens(1)), model.eval()(tokens(1)))
        other(tokens(2)).sum().backward()
    finish(attachment)
    assert len(records(tmp_path)) == 2


def test_the_model_is_the_outermost_module_that_owns_what_is_trained(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    inner = make()
    outer = torch.compile(nn.Sequential(inner), backend="eager")
    other = make(1)
    broken = nn.Sequential(inner, nn.Linear(2, 2))
    broken[1]._parameters = None  # type: ignore[assignment]
    trained = [inner.attn.weight, inner.mlp.weight]  # an adapter of a frozen model
    for param in inner.parameters():
        param.requires_grad_(any(param is one for one in trained))
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(1, 4):
        loss_of(outer, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert attachment._exporter._parts.fields["model"] == "Sequential"
    finish(attachment)
    assert [record.value("tokens") for record in records(tmp_path)] == [None, 44, 88]
    assert [record.value("batch_supervised_tokens") for record in records(tmp_path)] == [None, 44, 44]
    assert set(records(tmp_path)[-1].signals["grad_norm"]) == {"all", "attention", "mlp"}  # type: ignore[arg-type]
    assert other.training
    assert broken.training


def test_a_process_in_which_no_optimizer_steps_is_left_alone(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    loss_of(make(), 1).backward()
    finish(attachment)
    assert attachment._exporter is None
    assert list(tmp_path.iterdir()) == []


def test_parameters_without_a_module_are_watched_without_names(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    said = finish(attachment)
    assert len(said) == 1
    assert said[0].startswith("no module owns")
    found = records(tmp_path)
    assert [record.value("loss") for record in found] == pytest.approx([3.0, 3 * 0.64, 3 * 0.8**4])
    assert [record.value("grad_norm") for record in found] == pytest.approx([12**0.5 * 0.8**n for n in range(3)])


def test_on_meta_no_value_is_read(tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda supports_xla=True: ["meta"])
    attachment = begin()
    with torch.device("meta"):
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)  # its constructor would read it
        for _ in range(4):
            for _ in range(2):
                ids = torch.zeros(4, 12, dtype=torch.int64)
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            attachment.logged({"train/loss": loss, "accuracy": loss.detach()})
            optimizer.zero_grad()
        assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == [1, 2, 3, 4]
    assert [record.value("loss") for record in found] == [None] * 4  # there is no value, and none was made up
    assert [record.value("tokens") for record in found] == [None, 96.0, 192.0, 288.0]


def test_no_step_after_the_first_waits_for_anything(tmp_path: Path, begin: Begin) -> None:
    with Watch() as watching:
        attachment = begin()
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accumulate(model, optimizer, 3)
        watching.caught.clear()
        for step in range(8):
            accumulate(model, optimizer, 1)
            attachment.logged({"train/loss": 1.0, "accuracy": torch.tensor(step / 8)})
        found = list(watching.caught)
    finish(attachment)
    assert found == []
    assert len(records(tmp_path)) == 11
