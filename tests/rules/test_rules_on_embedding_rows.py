"""The rule on damaged rows of the tables of tokens: on made-up looks, and on a real training in which one row is ruined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.runs import events, steps, watch
from tests.rules.test_default_pack import fired, stream
from trainwarden.rules.core.damaged import Damaged, few, sentence, take

RULE = "TrainingEmbeddingRowDamaged"


def looks(length: int = 2400, **changes: Any) -> Any:
    """Return a healthy run whose tables are looked at every hundredth step; ``changes`` replace numbers of both tables."""

    def change(step: int, signals: dict[str, Any]) -> None:
        if step % 100 == 0 or step == 1:
            usual = {
                "embedding_rows_nonfinite": 0.0,
                "embedding_rows_long": 0.0,
                "embedding_rows_lost": 0.0,
                "embedding_row_ratio": 1.5 + step / 2000,
                "embedding_row_max": 2.0,
                "embedding_row_argmax": 7.0,
            }
            for name, value in usual.items():
                signals[name] = {"token": changes[name](step) if name in changes else value, "head": value}

    return stream(21, length, change)


def from_step(first: int, value: float, before: float = 0.0) -> Any:
    return lambda step: value if step >= first else before


@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_rows_nonfinite": from_step(1500, 1.0)},
        {"embedding_rows_lost": lambda step: float(step == 1500)},
        {"embedding_rows_long": from_step(1500, 2.0), "embedding_row_ratio": from_step(1500, 30.0, 2.0)},
    ],
)
def test_a_damaged_row_is_seen_at_the_look_that_finds_it(changes: Any) -> None:
    assert fired(looks(**changes))[RULE] == (1500, 1500)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Long from the start on: a model that is made so.
        {"embedding_rows_long": lambda step: 3.0, "embedding_row_ratio": lambda step: 25.0},
    ],
)
def test_tables_that_are_as_they_were_are_silent(changes: Any) -> None:
    assert RULE not in fired(looks(**changes))


def test_a_real_row_that_is_ruined_is_seen_and_one_of_a_healthy_run_is_not(tmp_path: Path) -> None:
    found = {}
    for kind in ("healthy", "ruined"):
        model = gpt(vocabulary=48)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        exporter = watch(model, optimizer, tmp_path / kind, cadence=2, preflight=False)
        for step in range(1, 62):
            if step == 30 and kind == "ruined":
                with torch.no_grad():
                    model.wte.weight[40] = float("nan")  # no token of the data
            optimizer.zero_grad()
            loss = loss_on(model, batch(step))
            loss.backward()
            optimizer.step()
            exporter.step(loss)
        found[kind] = fired(steps(exporter, tmp_path / kind))
    assert RULE not in found["healthy"]
    assert 30 <= found["ruined"][RULE][0] <= 60


def test_the_event_of_a_real_row_that_is_ruined_names_its_token_in_the_judgement(tmp_path: Path) -> None:
    model = gpt(vocabulary=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=2, preflight=False)
    for step in range(1, 62):
        if step == 30:
            with torch.no_grad():
                model.wte.weight[7] *= 200
        optimizer.zero_grad()
        loss = loss_on(model, batch(step))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    steps(exporter, tmp_path)
    known: list[Damaged] = []
    for event in events(tmp_path, "embedding_rows"):
        take(known, 0, event)
    assert [(one.table, one.ids) for one in known] == [("token", (7,))]
    assert few(known)
    assert not known[0].nonfinite
    assert sentence(known).startswith("The row of token 7 was found damaged in the embedding at step ")
