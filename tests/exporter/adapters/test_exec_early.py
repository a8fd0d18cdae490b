"""What ``trainwarden exec`` keeps until an optimizer steps is bounded, and let go of where none is going to be watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.exporter.adapters.followed import Begin
from tests.exporter.runs import loss_of, make
from trainwarden.exporter.unmodified import attach
from trainwarden.exporter.unmodified.early import ROUNDS


class Hand:
    """An optimizer that is none of torch's."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        self.params = list(params)

    def step(self) -> None:
        with torch.no_grad():
            for param in self.params:
                if param.grad is not None:
                    param -= 0.01 * param.grad
                    param.grad = None


class Whole(torch.optim.SGD):
    """Holds another optimizer, and does its work itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = inner


def test_gradients_of_steps_that_no_optimizer_of_torchs_makes_are_let_go(begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = Hand(model.parameters())
    for step in range(1, 21):
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert 0 < len(attachment._early) <= 2 * ROUNDS, "a norm and a clipping each"
    attachment.leave()
    assert len(attachment._early) == 0


def test_nothing_is_kept_where_nothing_is_watched_in_the_end(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    attachment = begin()
    model = make()
    optimizers = [torch.optim.SGD([param], lr=0.1) for _ in range(3) for param in model.parameters()]
    loss_of(model, 1).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert len(attachment._early) == 2
    optimizers[0].step()
    assert attachment._exporter is None
    assert any("optimizers, more than" in message for message in caplog.messages)
    assert len(attachment._early) == 0


def test_it_does_not_look_for_what_trains_at_every_step(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = begin()
    looked = []
    find = attach.find
    monkeypatch.setattr(attach, "find", lambda optimizer: looked.append(optimizer) or find(optimizer))
    model = make()
    optimizer = Whole(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 7):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert attachment._exporter is None
    assert len(looked) == attach.LOOKS
    assert any("Whole holds optimizers that never step" in message for message in caplog.messages)
