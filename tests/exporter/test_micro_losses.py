"""Gradient accumulation: a step is an optimizer step, and its loss is averaged as the trainer does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import events, loss_of, make, steps, watch
from trainwarden.exporter.losses import MicroLosses


def run(folder: Path, hand_in: Any, count: int = 2, parts: int = 3) -> list[float | None]:
    """Train with accumulation; ``hand_in`` gets exporter, losses and numbers of tokens of a step, and closes it."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, folder)
    for step in range(1, count + 1):
        optimizer.zero_grad()
        losses = [loss_of(model, 10 * step + part, rows=1 + part) for part in range(parts)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        hand_in(exporter, losses, [11 * (1 + part) for part in range(parts)])
    return [record.value("loss") for record in steps(exporter, folder)]


def expected(count: int = 2, parts: int = 3, weighted: bool = False) -> list[float]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for step in range(1, count + 1):
        optimizer.zero_grad()
        losses = [loss_of(model, 10 * step + part, rows=1 + part) for part in range(parts)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        weights = [1.0 + part if weighted else 1.0 for part in range(parts)]
        total = sum(float(loss.detach().double()) * weight for loss, weight in zip(losses, weights, strict=True))
        found.append(total / sum(weights))
    return found


def with_micro(exporter: Any, losses: Any, tokens: Any) -> None:
    for loss in losses:
        exporter.micro(loss)
    exporter.step()


def with_floats(exporter: Any, losses: Any, tokens: Any) -> None:
    for loss in losses:
        exporter.micro(float(loss.detach()))
    exporter.step()


def that_are_written_into(exporter: Any, losses: Any, tokens: Any) -> None:
    for loss in losses:
        kept = loss.detach()
        exporter.micro(kept)
        kept /= 3
    exporter.step()


@pytest.mark.parametrize("hand_in", [with_micro, with_floats, that_are_written_into])
def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches(tmp_path: Path, hand_in: Any) -> None:
    assert run(tmp_path, hand_in) == pytest.approx(expected(), rel=1e-6)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_with_numbers_of_tokens_it_is_the_mean_over_all_tokens(tmp_path: Path, as_tensors: bool) -> None:
    def by_tokens(exporter: Any, losses: Any, tokens: Any) -> None:
        for loss, number in zip(losses, tokens, strict=True):
            exporter.micro(loss, tokens=torch.tensor(number) if as_tensors else number)
        exporter.step()

    assert run(tmp_path, by_tokens) == pytest.approx(expected(weighted=True), rel=1e-6)


def test_a_loss_that_the_trainer_gives_for_the_step_wins_and_the_next_step_begins_anew(tmp_path: Path) -> None:
    def both(exporter: Any, losses: Any, tokens: Any) -> None:
        exporter.micro(losses[0] * 100)
        exporter.step(sum(losses) / 3)

    assert run(tmp_path, both) == pytest.approx(expected(), rel=1e-6)


def test_one_micro_batch_that_is_not_finite_makes_the_step_so(tmp_path: Path) -> None:
    def spoilt(exporter: Any, losses: Any, tokens: Any) -> None:
        exporter.micro(losses[0])
        exporter.micro(losses[1] * math.nan)
        exporter.step()

    first, _ = run(tmp_path, spoilt)
    assert first is not None
    assert math.isnan(first)
    assert events(tmp_path, "nonfinite")[0].step == 1


def test_steps_without_any_loss_have_none_and_micro_batches_without_tokens_weigh_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, lambda exporter, losses, tokens: exporter.step()) == [None, None]
    losses = MicroLosses()
    losses.add(2.0, tokens=0)
    assert losses.take(None) is None
    losses.add(torch.tensor([1.0, 3.0]), tokens=4)
    assert losses.take(None) == 2.0


def test_what_is_no_loss_is_said_and_costs_only_itself(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.micro("high")  # type: ignore[arg-type]
    exporter.step(1.0)
    exporter.close()
    assert len(exporter.notices) == 1
    assert "micro-batch" in exporter.notices[0]
