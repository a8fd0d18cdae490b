"""When a step begins and ends in a training loop that ``trainwarden exec`` follows, and which optimizers belong to it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.adapters.followed import Begin, Net, accumulate, finish, records
from tests.exporter.gpt import batch, loss_on
from tests.exporter.gpt import gpt as make_gpt
from tests.exporter.runs import events, loss_of, make, norm64


def test_each_step_has_its_mean_loss_and_its_norm_before_clipping_from_the_first_one_on(
    tmp_path: Path, begin: Begin
) -> None:
    attachment = begin()
    model = make()
    seen: list[tuple[float, float]] = []
    accumulate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 12, seen)
    assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 13))
    for record, (loss, norm) in zip(found, seen, strict=True):
        assert record.value("loss") == pytest.approx(loss, rel=1e-6)
        assert record.value("grad_norm") == pytest.approx(norm, rel=1e-5)
        assert record.value("clip_ratio") == pytest.approx(norm / 0.5, rel=1e-5)
        assert record.value("lr") == 1e-2
        assert record.value("update_ratio") is not None
        assert record.value("optimizer_step") == record.step
    assert [record.value("batch_hash") is not None for record in found] == [False] + [True] * 11
    assert found[-1].value("tokens") == 11 * 2 * 4 * 11
    (start,) = events(tmp_path, "start")
    assert start.fields["attached"] == "exec"
    assert start.fields["model"] == "Block"
    assert "checkpoints" in start.fields["absent"]
    assert events(tmp_path, "preflight") == []  # no fault of the settings is what nobody can set
    assert [event.step for event in events(tmp_path, "exit")] == [12]


def scaled(factor: float, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return factor * out


class WithHead(nn.Module):
    """A model with its head outside of the module that has the blocks, as transformers builds them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = make_gpt()
        self.transformer.lm_head = nn.Identity()  # type: ignore[assignment]
        self.lm_head = nn.Linear(16, 31)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.transformer(ids))
        return out


def test_the_micro_batch_in_which_a_number_broke_is_counted_from_the_step_that_it_belongs_to(
    tmp_path: Path, begin: Begin
) -> None:
    attachment = begin()
    model = WithHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 7):
        for part in (0, 1):
            factor = math.nan if (step, part) == (4, 1) else 1.0
            handle = model.transformer.h[1].mlp.register_forward_hook(partial(scaled, factor), prepend=True)
            loss_on(model, batch(2 * step + part)).backward()
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    assert finish(attachment) == []
    (event,) = events(tmp_path, "nonfinite")
    assert (event.step, event.fields["module"], event.fields["micro_batch"]) == (4, "transformer.h.1.mlp", 1)


def test_two_optimizers_that_step_one_after_the_other_make_one_step(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    second = torch.optim.AdamW(rest, lr=1e-3)  # made first, and named second: the model's order counts
    first = torch.optim.SGD(matrices, lr=0.1)
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


class Both(torch.optim.Optimizer):
    """Several optimizers as one, the way some trainers keep them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([one for each in optimizers for group in each.param_groups for one in group["params"]], {})
        self.optimizers = optimizers

    def step(self, closure: object = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_an_optimizer_that_has_others_step_is_none_of_its_own(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    halves = list(model.parameters())[::2], list(model.parameters())[1::2]
    accumulate(model, Both([torch.optim.SGD(halves[0], lr=0.1), torch.optim.AdamW(halves[1], lr=0.2)]), 3)
    assert finish(attachment) == []
    assert [record.signals["lr"] for record in records(tmp_path)] == [{"all": 0.2, "0.0": 0.1, "1.0": 0.2}] * 3
