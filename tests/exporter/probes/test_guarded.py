"""What a guard's decisions become in the record and on the page, and the events of when it begins to skip and ends."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import events, lines, loss_of, make, watch
from tests.real import wait_until
from trainwarden.exporter.guard import Guard
from trainwarden.record import Step

NAN = float("nan")


def train(folder: Path, factors: list[float], **guard: float) -> str:
    """Train with the loss of each step multiplied, and return the page after the last."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    exporter = watch(model, optimizer, folder)
    Guard(exporter, **guard)  # type: ignore[arg-type]
    for step, factor in enumerate(factors, 1):
        optimizer.zero_grad()
        (loss_of(model, step) * factor).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exporter.step(loss_of(model, step).detach())
    page = ""

    def arrived() -> bool:
        nonlocal page
        page = urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics").read().decode()
        return f'train_step{{rank="0",run="run"}} {len(factors)}.0' in page

    wait_until(arrived, 10.0)
    exporter.close()
    return page


def test_counters_on_the_page_tell_why_updates_were_left_out(tmp_path: Path) -> None:
    page = train(tmp_path, [1.0, NAN, 1e6, NAN, 1.0], limit=1e3)
    for cause, count in (("nonfinite", 2), ("limit", 1), ("surge", 0)):
        assert f'train_guard_skipped_steps_total{{cause="{cause}",rank="0",run="run"}} {count}.0' in page
    assert 'train_skipped_steps_total{rank="0",run="run"} 3.0' in page
    assert 'train_steps_total{rank="0",run="run"} 5.0' in page


def test_the_norm_that_was_refused_is_in_the_record(tmp_path: Path) -> None:
    train(tmp_path, [1.0, 1e6], limit=1e3)
    first, second = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert first.value("grad_norm") == pytest.approx(second.value("grad_norm") / 1e6, rel=1.0)
    assert second.value("grad_norm") > 1e3
    assert second.value("guard_skipped_steps", "limit") == 1


def test_an_event_tells_when_skipping_begins_when_it_does_not_stop_and_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, [1.0, 1e6, 1.0, 1.0, NAN, NAN, NAN, NAN, NAN, 1.0], limit=1e3, patience=3)
    found = events(tmp_path, "guard")
    assert [(event.step, event.fields["skips"], event.fields["in_a_row"]) for event in found] == [
        (2, True, 1),
        (3, False, 1),
        (5, True, 1),
        (7, True, 3),
        (10, False, 5),
    ]
    limit, _, nonfinite, *_ = found
    assert (limit.fields["cause"], limit.fields["bound"]) == ("limit", 1e3)
    assert limit.fields["norm"] > 1e3
    assert "above 1000" in limit.fields["says"]
    assert nonfinite.fields["cause"] == "nonfinite"
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 2  # the first of all, and that it does not stop
    assert "3 updates in a row" in said[1]


def test_without_a_guard_a_record_says_nothing_of_one(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    loss_of(model, 1).backward()
    optimizer.step()
    exporter.step()
    exporter.close()
    (record,) = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert "guard_skipped_steps" not in record.signals
    assert "skipped" not in record.signals
    assert "guard" not in events(tmp_path, "start")[0].fields
