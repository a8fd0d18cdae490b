"""A training loop without a line of ours, followed from inside its process as ``trainwarden exec`` has it followed."""

from __future__ import annotations

import copy
import gc
import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.exporter.runs import Block, events, lines, loss_of, make, norm64, tokens, watch
from tests.exporter.seams import Watch
from trainwarden.exporter.hooks import backward
from trainwarden.exporter.unmodified.attach import Attachment
from trainwarden.exporter.unmodified.options import Options
from trainwarden.record import Step

Begin = Callable[[], Attachment]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Give a function that has this process followed as a fresh one below ``trainwarden exec`` is."""
    monkeypatch.setenv("TRAINWARDEN_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINWARDEN_EXEC_ATTACHED", "")
    monkeypatch.delenv("TRAINWARDEN_EXEC_ATTACHED")
    gc.collect()
    begun: list[Attachment] = []

    def start() -> Attachment:
        begun.append(Attachment(Options(port=0, cadence=1)))
        begun[-1].listen()
        return begun[-1]

    yield start
    for attachment in begun:
        finish(attachment)
    assert not list(backward._listeners)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def finish(attachment: Attachment) -> list[str]:
    """Do what the end of the process does, and return what was said."""
    exporter = attachment._exporter
    if exporter is not None:
        attachment._at_exit()
        exporter.close()
    attachment.remove()
    return [] if exporter is None else [one for one in exporter.notices if "preflight" not in one]


def records(folder: Path) -> list[Step]:
    return [line for line in lines(folder) if isinstance(line, Step)]


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seen: list[Any] | None = None) -> None:
    """Train with gradients of two micro-batches, clipped; put each step's mean loss and norm into ``seen``."""
    for step in range(1, count + 1):
        mean = 0.0
        for half in (0, 1):
            loss = loss_of(model, 2 * step + half) / 2
            loss.backward()
            mean += float(loss.detach())
        norm = norm64([p.grad for p in model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if seen is not None:
            seen.append((mean, norm))


def test_each_step_has_its_mean_loss_and_its_norm_before_clipping_from_the_first_one_on(
    tmp_path: Path, begin: Begin
) -> None:
    attachment = begin()
    model = make()
    seen: list[tuple[float, float]] = []
    accumulate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 6, seen)
    assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 7))
    for record, (loss, norm) in zip(found, seen, strict=True):
        assert record.value("loss") == pytest.approx(loss, rel=1e-6)
        assert record.value("grad_norm") == pytest.approx(norm, rel=1e-5)
        assert record.value("clip_ratio") == pytest.approx(norm / 0.5, rel=1e-5)
        assert record.value("lr") == 1e-2
        assert record.value("update_ratio") is not None
        assert record.value("optimizer_step") == record.step
    assert [record.value("batch_hash") is not None for record in found] == [False] + [True] * 5
    assert found[-1].value("tokens") == 5 * 2 * 4 * 11
    (start,) = events(tmp_path, "start")
    assert start.fields["attached"] == "exec"
    assert start.fields["model"] == "Block"
    assert "checkpoints" in start.fields["absent"]
    assert [event.step for event in events(tmp_path, "exit")] == [6]


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


class Overflows(torch.autograd.Function):
    """Passes its input on, and makes an infinite gradient where it is told to."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * (float("inf") if ctx.bad else 1.0), None


@pytest.mark.parametrize("divided_after", [False, True])
def test_a_grad_scalers_skipped_steps_are_steps_and_the_loss_is_without_its_scale(
    tmp_path: Path, begin: Begin, divided_after: bool
) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    seen = []
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = Overflows.apply(loss_of(model, step), step in (1, 4, 8))
        seen.append(float(loss.detach()) / (2 if divided_after else 1))
        (scaler.scale(loss) / 2 if divided_after else scaler.scale(loss)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 9))
    assert [record.value("skipped") for record in found] == [1, 0, 0, 1, 0, 0, 0, 1]
    assert [record.value("loss") for record in found] == pytest.approx(seen, rel=1e-6)
    assert [record.value("loss_scale") for record in found] == [2.0**n for n in (10, 9, 9, 9, 8, 8, 8, 8)]
    assert [record.value("loss_scale_backoffs") for record in found] == [1, 0, 0, 1, 0, 0, 0, 1]
    assert [record.value("grad_norm") is None for record in found] == [n in (1, 4, 8) for n in range(1, 9)]
    assert events(tmp_path, "start")[0].fields["loss_scaling"] is True


def test_two_optimizers_that_step_one_after_the_other_make_one_step(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    first, second = torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=1e-3)
    for step in range(1, 5):
        loss_of(model, step).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == [1, 2, 3, 4]
    assert [record.signals["lr"] for record in found] == [{"all": 0.1, "0.0": 0.1, "1.0": 1e-3}] * 4
    assert events(tmp_path, "start")[0].fields["optimizer"] == "SGD+AdamW"


class Net(nn.Module):
    """One layer; of two such no module owns both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("critic", [1, 3])
def test_optimizers_with_backward_passes_of_their_own_make_one_step_until_one_comes_again(
    tmp_path: Path, begin: Begin, critic: int
) -> None:
    attachment = begin()
    torch.manual_seed(0)
    judge, maker = Net(), Net()
    on_judge, on_maker = torch.optim.SGD(judge.parameters(), lr=0.1), torch.optim.SGD(maker.parameters(), lr=0.2)
    expected: list[tuple[float, float]] = []
    for _ in range(4):
        for _turn in range(critic):
            on_judge.zero_grad()
            loss = (judge(maker(torch.randn(3, 4)).detach()) ** 2).mean()
            loss.backward()
            norm = norm64([p.grad for p in judge.parameters() if p.grad is not None])
            torch.nn.utils.clip_grad_norm_(judge.parameters(), 1e-3)
            on_judge.step()
            expected.append((float(loss.detach()), norm))
        on_maker.zero_grad()
        loss = -judge(maker(torch.randn(3, 4))).mean()
        loss.backward()
        norm = norm64([p.grad for p in maker.parameters() if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(maker.parameters(), 1e-3)
        on_maker.step()
        before, judged = expected.pop()
        expected.append((before + float(loss.detach()), (judged**2 + norm**2) ** 0.5))
    assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 4 * critic + 1))
    assert [record.value("loss") for record in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [record.value("grad_norm") for record in found] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert events(tmp_path, "start")[0].fields["model"] == "Several"


def test_an_optimizer_that_never_steps_keeps_no_record_open_for_good(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer, idle = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(make(1).parameters(), lr=0.1)
    seen = []
    for step in range(1, 25):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        seen.append(float(loss.detach()))
        optimizer.step()
    assert idle.state == {}
    closed = attachment._exporter.global_step
    loss_of(model, 25).backward()
    assert attachment._exporter.global_step == closed + 1 == 24
    finish(attachment)
    assert [record.value("loss") for record in records(tmp_path)] == pytest.approx(seen, rel=1e-6)


def test_an_optimizer_that_asks_its_closure_several_times_has_the_first_loss(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = Net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, seen = torch.ones(2, 4, dtype=torch.double), []

    def closure() -> float:
        optimizer.zero_grad()
        loss = ((model(x) - 1) ** 2).sum()
        loss.backward()
        seen[-1].append(float(loss.detach()))
        return loss  # type: ignore[return-value]

    for _ in range(3):
        seen.append([])
        optimizer.step(closure)
    finish(attachment)
    assert [len(one) for one in seen] > [1, 1, 1]
    assert [record.value("loss") for record in records(tmp_path)] == pytest.approx([one[0] for one in seen])


def test_what_is_logged_belongs_to_the_step_that_it_was_logged_after_and_is_not_there_twice(
    tmp_path: Path, begin: Begin
) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment.logged({"config/width": 8})
    for step in range(1, 4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        attachment.logged({"train/loss": 99.0, "lr": 99.0, "grad_norm": 99.0, "global_step": step, "aux_loss": 1.5})
        attachment.logged(
            {"train": {"accuracy": torch.tensor(step / 10)}, "name": "x", "many": torch.ones(3), "on": True}
        )
        with torch.no_grad():
            model.eval()
            loss_of(model, step)
            model.train()
        attachment.logged({"val/loss": float(step)})
    finish(attachment)
    found = records(tmp_path)
    assert found[0].value("config_width") == 8.0
    assert [record.value("train_accuracy") for record in found] == pytest.approx([0.1, 0.2, 0.3])
    assert [record.value("val_loss") for record in found] == [1.0, 2.0, 3.0]
    assert [record.value("router_aux_loss") for record in found] == [1.5] * 3
    assert not any(99.0 in record.signals.values() for record in found)
    assert not {"name", "many", "on", "global_step", "step"} & {name for record in found for name in record.signals}


def test_a_logged_loss_stands_in_where_no_backward_pass_was_seen(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(model, step), params), strict=True):
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        attachment.logged({"loss": float("nan") if step == 2 else float(step), "train/loss_mean": 7.0})
    finish(attachment)
    found = records(tmp_path)
    assert [record.value("loss") for record in found] == [1.0, pytest.approx(float("nan"), nan_ok=True), 3.0]
    assert [record.value("nonfinite", "loss") for record in found] == [0.0, 1.0, 0.0]
    assert all((record.value("clip_ratio") or 0) > 1 for record in found)


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


def test_a_process_in_which_no_optimizer_steps_is_left_alone(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    loss_of(make(), 1).backward()
    finish(attachment)
    assert attachment._exporter is None
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_made_later_is_counted_and_one_of_something_else_is_not(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model, other = make(), make(1)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        optimizer = kind(model.parameters(), lr=0.1)
        accumulate(model, optimizer, 2)
    aside = torch.optim.SGD(other.parameters(), lr=0.1)
    accumulate(other, aside, 2)
    said = finish(attachment)
    assert len(said) == 1
    assert "Adam was made after the first step" in said[0]
    found = records(tmp_path)
    assert [record.step for record in found] == [1, 2, 3, 4]
    assert [record.value("lr") for record in found] == [0.1, 0.1, None, None]
    assert all(record.value("grad_norm") for record in found)


def test_an_optimizer_for_each_parameter_is_not_followed_and_that_is_said_once(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = begin()
    model = nn.ModuleList(Net() for _ in range(9))
    each = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    hooks = [param.register_post_accumulate_grad_hook(lambda param: each[param].step()) for param in each]  # type: ignore[arg-type, func-returns-value]
    for _ in range(2):
        sum(net(torch.ones(2, 4)).sum() for net in model).backward()  # type: ignore[union-attr]
    for hook in hooks:  # they keep their optimizers alive, and no collector sees that
        hook.remove()
    assert attachment._exporter is None
    assert [message for message in caplog.messages if "18 optimizers" in message] == caplog.messages
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_breaks_off_and_is_made_again_is_one_step(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        raise MemoryError

    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 2:
            with pytest.raises(MemoryError):
                optimizer.step(closure)
        optimizer.step()
    finish(attachment)
    assert [record.step for record in records(tmp_path)] == [1, 2, 3]


def test_a_model_that_is_called_without_a_gradient_for_a_while_is_being_evaluated(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, optimizer, 2)
    for seconds in (100.0, 0.0):
        monkeypatch.setattr("trainwarden.exporter.unmodified.attach.EVALUATION_SECONDS", seconds)
        with torch.no_grad():
            loss_of(model, 1)
            loss_of(model.eval(), 2)
        assert attachment._exporter._phase == ("train" if seconds else "evaluation")
        accumulate(model.train(), optimizer, 1)
        assert attachment._exporter._phase == "train"
    finish(attachment)
    assert [event.fields["phase"] for event in events(tmp_path, "phase")] == ["evaluation", "train"]
    assert len(records(tmp_path)) == 4


def test_a_compiled_function_may_hold_the_backward_pass(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def forward_and_backward(ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    backward.leave_untraced()
    seen = []
    for step in range(1, 4):
        seen.append(float(forward_and_backward(tokens(step))))
        optimizer.step()
        optimizer.zero_grad()
    finish(attachment)
    assert [record.value("loss") for record in records(tmp_path)] == pytest.approx(seen, rel=1e-6)


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


class OwnScale(torch.amp.GradScaler):
    """A scaler that multiplies losses by itself, as those for sharded models do."""

    def scale(self, outputs: Any) -> Any:
        assert self._scale is not None or self._lazy_init_scale_growth_tracker(outputs.device) is None
        return outputs * self._scale


def test_a_loss_that_is_scaled_out_of_sight_is_left_out_and_that_is_said(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = OwnScale("cpu", init_scale=2.0**10)
    for step in range(1, 4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    said = finish(attachment)
    assert len(said) == 1
    assert said[0].startswith("the loss is scaled")
    found = records(tmp_path)
    assert [record.value("loss") for record in found] == [None] * 3
    assert [record.value("loss_scale") for record in found] == [2.0**10] * 3
    assert all(0 < (record.value("grad_norm") or 0) < 10 for record in found)


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
