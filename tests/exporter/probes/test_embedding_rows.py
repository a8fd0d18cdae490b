"""Damaged rows of the tables of tokens: which, how long, beside rows that never were trained; against float64, and on real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.runs import Block, events, steps, watch
from trainwarden.exporter.probes.embedding_rows import EVERY, NAMED
from trainwarden.record import Step

torch.set_num_threads(1)


class Tokens(Block):
    """A block whose data uses 31 of its tokens."""

    def __init__(self, vocabulary: int = 48) -> None:
        super().__init__(vocabulary=vocabulary)


def run(
    folder: Path,
    model: nn.Module,
    count: int,
    each: Any = lambda step: None,
    optimizer: Any = None,
    of: Any = batch,
    **settings: Any,
) -> list[Step]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, folder, cadence=1, **settings)
    for step in range(1, count + 1):
        each(step)
        optimizer.zero_grad()
        loss = loss_on(model, of(step))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder)


def looked(records: list[Step]) -> list[Step]:
    return [record for record in records if "embedding_row_max" in record.signals]


@pytest.mark.parametrize("tied", [False, True])
def test_norms_are_those_of_float64_in_every_tenth_step_that_is_due(tmp_path: Path, tied: bool) -> None:
    model = gpt(tied=tied)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(step: int) -> None:
        if step > 1:
            kept.append((model.wte.weight.detach().double().clone(), model.lm_head.weight.detach().double().clone()))

    records = run(tmp_path, model, 2 * EVERY + 2, keep)
    found = looked(records)
    assert [record.step for record in found] == [1, 1 + EVERY, 1 + 2 * EVERY]
    for record in found:
        for table, weight in zip(["token"] if tied else ["token", "head"], kept[record.step - 1], strict=False):
            norms = weight.norm(dim=1)
            assert record.value("embedding_row_max", table) == pytest.approx(float(norms.max()), rel=1e-6)
            assert record.value("embedding_row_argmax", table) == int(norms.argmax())
            median = norms.sort().values[(len(norms) - 1) // 2]
            # Of the rows that have been trained: all of a head's, of the first steps' tokens in a table that is not tied.
            if table == "head" or tied:
                assert record.value("embedding_row_ratio", table) == pytest.approx(
                    float(norms.max() / median), rel=1e-6
                )
            assert record.value("embedding_rows_nonfinite", table) == 0
        assert ("head" in record.signals["embedding_row_max"]) is not tied  # type: ignore[operator]
    assert events(tmp_path, "embedding_rows") == []


@torch.no_grad()
def put(weight: torch.Tensor, row: int, value: float) -> None:
    weight[row] = value


def test_a_row_that_is_not_finite_is_named_once(tmp_path: Path) -> None:
    model = Tokens()
    # Row 40 is no token of the data: nothing else becomes NaN.
    records = run(
        tmp_path, model, 3 * EVERY, lambda step: put(model.wte.weight, 40, float("nan")) if step == 5 else None
    )
    assert [record.value("embedding_rows_nonfinite", "token") for record in looked(records)] == [0, 1, 1]
    (event,) = events(tmp_path, "embedding_rows")
    assert event.step == 1 + EVERY
    assert {name: event.fields[name] for name in ("table", "nonfinite", "long", "lost", "ids")} == {
        "table": "token",
        "nonfinite": 1,
        "long": 0,
        "lost": 0,
        "ids": [40],
    }


def test_rows_that_are_far_too_long_or_suddenly_gone_are_named_the_worst_first(tmp_path: Path) -> None:
    model = Tokens()

    def damage(step: int) -> None:
        if step == 5:
            put(model.wte.weight, 33, 30.0)
            put(model.wte.weight, 34, 60.0)
        if step == 15:
            put(model.wte.weight, 35, 0.0)

    found = looked(run(tmp_path, model, 3 * EVERY, damage))
    assert [record.value("embedding_rows_long", "token") for record in found] == [0, 2, 2]
    assert [record.value("embedding_rows_lost", "token") for record in found] == [0, 0, 1]
    assert found[1].value("embedding_row_argmax", "token") == 34
    first, second = events(tmp_path, "embedding_rows")
    assert (first.step, first.fields["ids"]) == (11, [34, 33])
    assert (second.step, second.fields["ids"]) == (21, [35])
    assert first.fields["norms"][0] == pytest.approx(60 * 8**0.5, rel=0.1)


def test_tokens_that_never_were_in_the_data_are_no_damage_and_no_measure(tmp_path: Path) -> None:
    model = Tokens(vocabulary=100)  # most of it is not in the data
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=10.0)

    def hold(step: int) -> None:
        """Keep the trained rows as they are; the others shrink by a fifth a step."""
        with torch.no_grad():
            model.wte.weight[:31] = trained

    trained = model.wte.weight.detach()[:31].clone()
    found = looked(run(tmp_path, model, 6 * EVERY, hold, optimizer))
    norms = model.wte.weight.detach().norm(dim=1)
    assert float(norms[31:].max()) < 0.01 * float(norms[:31].median())  # far below what counts as short
    assert [record.value("embedding_rows_lost", "token") for record in found[:3]] == [0, 0, 0]
    assert found[-1].value("embedding_row_ratio", "token") < 3  # type: ignore[operator]


def test_one_token_repeated_ten_thousand_times_damages_its_row_and_it_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.wte.weight.mul_(0.1)

    def drift(step: int) -> None:
        """A head that has grown meanwhile: clean batches do no harm through it."""
        if step == 12:
            with torch.no_grad():
                model.lm_head.weight.mul_(3)

    def dirty(step: int) -> torch.Tensor:
        return torch.full((40, 251), 7) if step > 12 else batch(step)

    found = looked(run(tmp_path, model, 2 * EVERY + 1, drift, optimizer, dirty))
    ratios = [record.value("embedding_row_ratio", "token") for record in found]
    assert ratios[1] < 3  # type: ignore[operator]
    assert ratios[2] > 10  # type: ignore[operator]
    assert found[2].value("embedding_row_argmax", "token") == 7
    (event,) = [event for event in events(tmp_path, "embedding_rows") if event.fields["table"] == "token"]
    assert (event.step, event.fields["ids"]) == (21, [7])


def test_a_model_that_trains_in_good_health_has_none(tmp_path: Path) -> None:
    for name, options in {"adam": {}, "tied": {"tied": True}}.items():
        found = looked(run(tmp_path / name, gpt(**options), 12 * EVERY, optimizer=None))
        assert len(found) == 12
        assert events(tmp_path / name, "embedding_rows") == []


def test_many_damaged_rows_are_counted_and_some_are_named(tmp_path: Path) -> None:
    model = Tokens()

    def damage(step: int) -> None:
        if step == 5:
            for row in range(31, 48):
                put(model.wte.weight, row, float("inf"))

    run(tmp_path, model, EVERY + 1, damage)
    (event,) = events(tmp_path, "embedding_rows")
    assert event.fields["nonfinite"] == 17
    assert len(event.fields["ids"]) == NAMED
    assert set(event.fields["ids"]) <= set(range(31, 48))


def test_a_frozen_table_and_positions_are_left_alone(tmp_path: Path) -> None:
    model = gpt()
    model.wte.weight.requires_grad_(False)
    (record, *_) = looked(run(tmp_path, model, 2))
    assert set(record.signals["embedding_row_max"]) == {"head"}  # type: ignore[arg-type]


def test_bfloat16_and_meta(tmp_path: Path) -> None:
    model = gpt(dtype=torch.bfloat16)
    (record, *_) = looked(run(tmp_path / "half", model, 1))
    assert record.value("embedding_row_max", "head") == pytest.approx(
        float(model.lm_head.weight.detach().double().norm(dim=1).max()), rel=1e-6
    )
    with torch.device("meta"):
        empty = Tokens()
        optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
        exporter = watch(empty, optimizer, tmp_path / "meta", cadence=1)
        ids = torch.zeros(2, 12, dtype=torch.int64)
        empty(ids).sum().backward()
        optimizer.step()
        exporter.step(None)
    assert looked(steps(exporter, tmp_path / "meta")) == []
