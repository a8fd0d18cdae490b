"""Whatever goes wrong in the exporter, training goes on as if it were not there, and it is said once."""

from __future__ import annotations

import errno
import logging
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import events, lines, loss_of, make, steps, train, watch
from trainwarden.exporter import Exporter
from trainwarden.exporter.probes.grad_norm import GradNorm
from trainwarden.exporter.probes.loss import Loss
from trainwarden.exporter.probes.optimizer_state import OptimizerState
from trainwarden.record import Step


def weights_after(folder: Path | None, count: int = 5, **arguments: Any) -> list[torch.Tensor]:
    """Return the parameters after some steps, with an exporter if a folder is given."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = None if folder is None else watch(model, optimizer, folder, **arguments)
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        if exporter is not None:
            exporter.step(loss)
    if exporter is not None:
        exporter.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_training_with_the_exporter_is_bit_for_bit_training_without(tmp_path: Path) -> None:
    assert same(weights_after(tmp_path, cadence=1), weights_after(None))


@pytest.mark.parametrize("moment", ["before", "after", "close", "signals"])
@pytest.mark.parametrize("probe", [GradNorm, OptimizerState, Loss])
def test_a_probe_that_raises_costs_its_own_signals_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, probe: type, moment: str
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(probe, moment, broken)
    assert same(weights_after(tmp_path, cadence=1), weights_after(None))
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert len(records) == 5
    assert all(record.value("lr") == 1e-2 for record in records)
    said = [record for record in caplog.records if "planted" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    "place",
    [
        "trainwarden.exporter.staging.Staging.send",
        "trainwarden.exporter.recorder.Recorder.step",
        "trainwarden.exporter.series.Page.step",
        "trainwarden.exporter.cadence.Cadence.look",
        "trainwarden.exporter.observer.Observer._open_update",
        "trainwarden.exporter.observer.Observer._clipping",
        "trainwarden.exporter.sinks.journal.Journal.flush",
        "trainwarden.exporter.assembly.establish",
        "trainwarden.exporter.assembly.Watched",
        "trainwarden.exporter.serving.Server",
    ],
)
def test_a_fault_anywhere_inside_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(place, broken)
    assert same(weights_after(tmp_path), weights_after(None))
    assert 1 <= len([record for record in caplog.records if "planted" in record.getMessage()]) <= 2


def test_a_fault_in_reading_the_plan_costs_the_plan_and_not_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr("trainwarden.exporter.exporter.Resume.read", broken)
    assert same(weights_after(tmp_path), weights_after(None))
    assert len([line for line in lines(tmp_path) if isinstance(line, Step)]) == 5
    assert "planted" in events(tmp_path, "start")[0].fields["notices"][0]


def test_a_folder_that_cannot_be_written_costs_the_journal_and_not_the_page(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path / "file")
    train(model, optimizer, exporter, 3)
    assert exporter.global_step == 3
    assert exporter.port is not None
    assert any("run folder" in sentence for sentence in exporter.notices)
    exporter.close()


def test_a_disk_that_fills_up_in_the_middle_is_said_once_and_counted(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import resource, signal, sys
        from pathlib import Path
        from tests.exporter.runs import make, watch, train
        import torch
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter = watch(model, optimizer, Path({str(tmp_path)!r}))
        train(model, optimizer, exporter, 2)
        import time
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
        train(model, optimizer, exporter, 30)
        exporter.close()
        print(exporter.global_step, len(exporter.notices), exporter.notices)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32 1 "), done.stdout
    assert "File too large" in done.stdout
    assert done.stderr.count("File too large") == 1
    found = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert [record.step for record in found] == list(range(1, len(found) + 1))  # whole lines, none torn
    assert 2 <= len(found) < 32


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_disabled_it_touches_nothing_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRAINWARDEN_DISABLE", value)
    before = torch.nn.utils.clip_grad.clip_grad_norm_, torch.nn.utils.get_total_norm
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    exporter = watch(model, optimizer, tmp_path)
    assert list(exporter.wrap([1, 2, 3])) == [1, 2, 3]
    assert exporter.resume() is None
    exporter.resumed(0)
    with exporter.phase("evaluation"):
        exporter.event("evaluation", loss=1.0)
    exporter.batch(torch.zeros(1, 2, dtype=torch.int64))
    exporter.step(1.0)
    exporter.checkpoint(1, "x")
    exporter.close()
    assert (exporter.port, exporter.attempt, exporter.start_id) == (None, 0, None)
    assert exporter.global_step == 1
    assert exporter.notices == []
    assert list(tmp_path.iterdir()) == []
    assert before == (torch.nn.utils.clip_grad.clip_grad_norm_, torch.nn.utils.get_total_norm)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"model": "gpt"}, TypeError, "model"),
        ({"optimizer": None}, TypeError, "optimizer"),
        ({"optimizer": []}, TypeError, "optimizer"),
        ({"run": 3}, TypeError, "run"),
        ({"run": "../up"}, ValueError, "run name"),
        ({"port": "80"}, TypeError, "port"),
        ({"cadence": 0}, ValueError, "cadence"),
        ({"cadence": 1.5}, TypeError, "cadence"),
        ({"cadance": 5}, TypeError, "cadance"),
        ({"watch_steps": -1}, ValueError, "watch_steps"),
        ({"watch_steps": 2.5}, TypeError, "watch_steps"),
        ({"reader_seconds": "3"}, TypeError, "reader_seconds"),
        ({"reader_seconds": math.nan}, ValueError, "reader_seconds"),
        ({"side_timeout": "10"}, TypeError, "side_timeout"),
        ({"side_timeout": 0}, ValueError, "side_timeout"),
        ({"side_timeout": math.inf}, ValueError, "side_timeout"),
        ({"protect_metrics": "false"}, TypeError, "protect_metrics"),
        ({"side_group": "no"}, TypeError, "side_group"),
        ({"own_gradients": None}, TypeError, "own_gradients"),
        ({"preflight": 0}, TypeError, "preflight"),
        ({"total_steps": 0}, ValueError, "total_steps"),
        ({"port": 70_000}, ValueError, "port"),
        ({"port": -1}, ValueError, "port"),
    ],
)
def test_a_bad_argument_is_refused_when_the_exporter_is_made(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], names: str
) -> None:
    model = make()
    good = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "run": "r", "dir": tmp_path, "port": 0}
    with pytest.raises(error, match=names):
        Exporter(**{**good, **arguments})


def test_a_loader_that_cannot_be_wrapped_is_handed_back(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert exporter.wrap(7) == 7
    assert "wrap" in exporter.notices[0]
    exporter.close()


def test_steps_that_nobody_takes_are_dropped_and_counted_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwarden.exporter import drain

    monkeypatch.setattr(drain, "PENDING", 10)
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    parts = exporter._parts
    assert parts is not None
    monkeypatch.setattr(parts.recorder, "step", lambda *_: time.sleep(0.05))
    began = time.monotonic()
    for _ in range(60):
        exporter.step(1.0)
    assert time.monotonic() - began < 0.5
    assert parts.drain.dropped >= 40
    assert len(exporter.notices) == 1
    exporter.close()


def test_the_exporter_counts_its_own_time_on_the_training_thread(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    train(model, optimizer, exporter, 3)
    assert exporter._parts is not None
    assert 0 < exporter._parts.observer.seconds < 1
    steps(exporter, tmp_path)


def test_closing_twice_and_stepping_afterwards_does_nothing(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.step(1.0)
    exporter.close()
    exporter.close()
    exporter.step(2.0)
    assert [event.kind for event in events(tmp_path)] == ["start", "exit"]


def test_importing_the_exporter_imports_none_of_the_daemons_libraries() -> None:
    heavy = ("lark", "starlette", "uvicorn", "apscheduler", "sqlite3", "requests", "jinja2", "typer")
    script = f"import sys, trainwarden.exporter; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert os.environ.get("TRAINWARDEN_DISABLE") is None
