"""A start from its identity to its exit event: attempts, start event, resume, checkpoints, phases, cadence."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import events, headers, lines, make, steps, train, watch
from tests.real import wait_until
from trainwarden.exporter import Exporter
from trainwarden.exporter.identity import choose_attempt, launch
from trainwarden.exporter.notices import Notices
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.record import Step
from trainwarden.runfolder import RunFolder


def one(folder: Path, **arguments: Any) -> Exporter:
    model = make()
    return watch(model, torch.optim.AdamW(model.parameters(), lr=1e-2), folder, **arguments)


def test_attempts_count_up_from_0_and_the_run_uid_stays(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        exporter = one(tmp_path)
        exporter.step(1.0)
        exporter.close()
        seen.append((exporter.attempt, exporter.start_id))
    assert [attempt for attempt, _ in seen] == [0, 1, 2]
    assert len({start_id for _, start_id in seen}) == 3
    assert len({header.run_uid for header in headers(tmp_path)}) == 1
    assert [header.attempt for header in headers(tmp_path)] == [0, 1, 2]


def test_a_start_that_died_before_its_first_step_used_up_its_attempt(tmp_path: Path) -> None:
    one(tmp_path).close()
    second = one(tmp_path)
    assert second.attempt == 1
    second.close()


@pytest.mark.parametrize(("given", "attempt"), [("5", 5), ("1", 3), ("x", 4)])
def test_the_environments_attempt_counts_unless_it_is_lower_than_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, attempt: int
) -> None:
    (tmp_path / "run" / "attempt-3").mkdir(parents=True)
    monkeypatch.setenv("TRAINWARDEN_ATTEMPT", given)
    notices = Notices()
    assert choose_attempt(RunFolder("run", tmp_path), notices) == attempt
    assert bool(notices.said) == (given == "1")


def test_the_same_launch_keeps_its_attempt_and_the_next_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder("run", tmp_path)
    found = []
    for job, restart in (("7", "0"), ("7", "0"), ("7", "1"), ("8", "1"), ("8", "1")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        found.append(choose_attempt(folder, Notices()))
    assert found == [0, 0, 1, 2, 2]


def test_a_torchrun_without_an_id_is_known_by_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert launch() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    assert launch() == "torchrun abc"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    name = launch()
    assert name is not None
    assert name != "torchrun none"
    assert name == launch()


def test_the_start_event_is_the_first_line_and_says_what_runs(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    exporter = watch(model, optimizer, tmp_path)
    loader = exporter.wrap(
        torch.utils.data.DataLoader(list(range(200)), batch_size=5),  # type: ignore[arg-type]
        shards=[("only", 0, 200)],
        dataset="numbers",
    )
    exporter.event("mixture", web=0.5)
    for _, _ in zip(range(2), loader, strict=False):
        exporter.step(1.0)
    exporter.close()
    found = events(tmp_path)
    assert [(event.kind, event.seq) for event in found] == [("start", 1), ("mixture", 2), ("exit", 5)]
    fields = found[0].fields
    assert fields["optimizer"] == "AdamW"
    assert fields["beta2"] == 0.95
    assert fields["model"] == "Block"
    assert fields["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert fields["precision"] == "float32"
    assert fields["optimizer_state_dtype"] == "float32"
    assert fields["replayable"] is True
    assert fields["loader_kind"] == "map"
    assert fields["can_skip"] == ["exclude", "shift", "substitute"]
    assert (fields["dataset"], fields["dataset_size"], fields["batch_size"]) == ("numbers", 200, 5)
    assert fields["resumed_from"] is None
    assert fields["plan_applied"] is None
    assert fields["world_size"] == 1
    assert (found[-1].fields["reason"], found[-1].fields["code"]) == ("finished", 0)


def test_numbering_goes_on_where_resumed_says_and_so_do_the_totals(tmp_path: Path) -> None:
    for number, count in ((0, 6), (4, 2)):
        exporter = one(tmp_path)
        exporter.resumed(number)
        for _ in range(count):
            exporter.batch(torch.zeros(2, 5, dtype=torch.int64))
            exporter.step(1.0)
        exporter.close()
        assert exporter.notices == []
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6, 5, 6]
    assert [record.value("tokens") for record in records] == [10, 20, 30, 40, 50, 60, 50, 60]
    assert events(tmp_path, "start")[1].fields["resumed_from"] == {"attempt": None, "step": 4, "path": None}


def test_a_plan_is_applied_reported_and_seen_in_the_records(tmp_path: Path) -> None:
    first = one(tmp_path, run="r")
    path = tmp_path / "step-3.pt"
    path.write_bytes(b"x")
    for number in range(1, 6):
        first.step(1.0)
        if number == 3:
            first.checkpoint(3, path)
    first.close()
    folder = RunFolder("r", tmp_path)
    identity = folder.identity()
    assert identity is not None
    target = Target(attempt=0, step=3, path=str(path))
    plan = Plan(plan_id="p1", run_uid=identity.run_uid, for_attempt=1, target=target, lr_factor=0.5)
    folder.write_plan(plan)
    folder.write_ledger(
        Ledger(run_uid=identity.run_uid, entries=[LedgerEntry(plan_id="p1", for_attempt=1, target_step=3)])
    )
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    second = watch(model, optimizer, tmp_path, run="r")
    assert second.resume() == target
    second.resumed(3)
    train(model, optimizer, second, 2)
    records = steps(second, tmp_path, run="r")[5:]
    assert [(record.step, record.value("lr")) for record in records] == [(4, 5e-3), (5, 5e-3)]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    started = events(tmp_path, "start", run="r")[1]
    assert started.fields["attempt"] == 1
    assert started.fields["resumed_from"] == {"attempt": 0, "step": 3, "path": str(path)}
    assert started.fields["plan_applied"]["plan_id"] == "p1"
    assert started.fields["plan_applied"]["start_step"] == 4


def test_a_plan_in_force_that_the_script_never_asked_for_is_reported(tmp_path: Path) -> None:
    folder = RunFolder("run", tmp_path)
    identity = folder.open_identity()
    folder.write_plan(Plan(plan_id="p1", run_uid=identity.run_uid, for_attempt=0, lr_factor=0.5))
    exporter = one(tmp_path)
    exporter.step(1.0)
    exporter.close()
    (started,) = events(tmp_path, "start")
    assert started.fields["plan_applied"] is None
    assert any("p1" in notice and "not applied" in notice for notice in started.fields["notices"])


def test_a_checkpoint_is_reported_with_its_path_in_full_and_whether_it_is_finite(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    train(model, optimizer, exporter, 2)
    exporter.checkpoint(2, "relative.pt")
    with torch.no_grad():
        model.mlp.weight[0, 0] = float("inf")
    exporter.checkpoint(2, tmp_path / "bad.pt")
    exporter.checkpoint(2, tmp_path / "said.pt", finite=True)
    exporter.close()
    found = events(tmp_path, "checkpoint")
    assert [event.step for event in found] == [2, 2, 2]
    assert [event.fields["finite"] for event in found] == [True, False, True]
    assert all(event.fields["complete"] is True for event in found)
    assert found[0].fields["path"] == str(Path("relative.pt").absolute())


class UploadOnly:
    def __init__(self, future: Any) -> None:
        self.upload_completion = future


@pytest.mark.parametrize("kind", ["concurrent", "torch", "response"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_asynchronous_save_is_reported_when_it_is_done(tmp_path: Path, kind: str, fails: bool) -> None:
    exporter = one(tmp_path)
    exporter.step(1.0)
    future: Any = torch.futures.Future() if kind == "torch" else concurrent.futures.Future()
    given = UploadOnly(future) if kind == "response" else future
    exporter.checkpoint(1, tmp_path / "c.pt", future=given)
    exporter.step(1.0)
    if fails:
        future.set_exception(OSError("disk"))
    else:
        future.set_result(None)
    exporter.close()
    order = [(getattr(line, "kind", "step"), getattr(line, "step", 0)) for line in lines(tmp_path)[1:]]
    assert order == [("start", 0), ("step", 1), ("step", 2), ("checkpoint", 1), ("exit", 2)]
    (event,) = events(tmp_path, "checkpoint")
    assert event.fields["complete"] is not fails
    if not fails:
        assert event.fields["finite"] is True


def test_the_future_of_torchs_own_asynchronous_save_is_understood(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import async_save

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    train(model, optimizer, exporter, 1)
    future = async_save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "saved"))
    exporter.checkpoint(1, tmp_path / "saved", future=future)
    wait_until(lambda: events(tmp_path, "checkpoint"), 20.0)
    exporter.close()
    assert events(tmp_path, "checkpoint")[0].fields["complete"] is True


def test_phases_are_events_and_part_of_the_records(tmp_path: Path) -> None:
    exporter = one(tmp_path)
    exporter.step(1.0)
    with exporter.phase("evaluation"):
        exporter.event("evaluation", loss=torch.tensor(2.5), name="held-out", shape=torch.Size([2]))
    exporter.step(1.0)
    exporter.close()
    assert [event.fields["phase"] for event in events(tmp_path, "phase")] == ["evaluation", "train"]
    (evaluation,) = events(tmp_path, "evaluation")
    assert (evaluation.fields["loss"], evaluation.fields["name"], evaluation.step) == (2.5, "held-out", 1)
    assert [line.phase for line in lines(tmp_path) if isinstance(line, Step)] == ["train", "train"]


def test_costly_probes_run_every_tenth_step_and_at_every_step_after_something_odd(tmp_path: Path) -> None:
    exporter = one(tmp_path, watch_steps=8)
    parts = exporter._parts
    assert parts is not None
    model_optimizer = parts.observer._optimizers[0]
    due = []
    for step in range(1, 61):
        for parameter in model_optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 50.0 if step == 33 else 1.0)
        model_optimizer.step()
        due.append(parts.observer.sheet.due)
        exporter.step(2.0)
        wait_until(lambda: parts.drain.lag == 0)
        time.sleep(0.005)
    found = [number for number, is_due in enumerate(due, start=1) if is_due]
    records = steps(exporter, tmp_path)
    assert [record.step for record in records if record.value("weight_rms") is not None] == found
    assert set(found) >= {1, 10, 20, 30, 40, 50, 60}
    assert set(found) >= set(range(35, 41))
    assert not set(range(2, 10)) & set(found)
    assert not set(range(51, 60)) & set(found)


def run_script(folder: Path, body: str, send: int | None = None) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from tests.exporter.runs import make, watch
        import torch
        model = make()
        exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), Path({str(folder)!r}))
        exporter.step(1.0)
        """
    ) + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if send is not None:
        wait_until(lambda: len(lines(folder)) >= 3, 60.0)
        process.send_signal(send)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, err)


@pytest.mark.parametrize(
    ("body", "send", "status", "reason", "code"),
    [
        ("", None, 0, "finished", None),
        ("raise ValueError('planted')", None, 1, "exception", 1),
        ("time.sleep(30)", signal.SIGINT, -signal.SIGINT, "signal", 130),
    ],
)
def test_the_exit_event_says_how_the_process_ended(
    tmp_path: Path, body: str, send: int | None, status: int, reason: str, code: int | None
) -> None:
    done = run_script(tmp_path, body, send)
    assert done.returncode == status, done.stderr
    (event,) = events(tmp_path, "exit")
    assert (event.fields["reason"], event.fields["code"]) == (reason, code)
    assert "planted" in done.stderr or "planted" not in body
    assert not (tmp_path / "run" / "targets" / "rank-0.json").exists()


def test_a_killed_process_leaves_whole_lines_and_no_exit_event(tmp_path: Path) -> None:
    done = run_script(tmp_path, "while True: exporter.step(1.0); time.sleep(0.001)", signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    assert events(tmp_path, "exit") == []
    found = lines(tmp_path)
    assert [line.seq for line in found[1:]] == list(range(1, len(found)))  # type: ignore[union-attr]


def test_the_targets_file_is_what_prometheus_and_the_daemon_read(tmp_path: Path) -> None:
    exporter = one(tmp_path)
    (entry,) = json.loads((tmp_path / "run" / "targets" / "rank-0.json").read_text())
    assert entry == {"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"run": "run", "rank": "0"}}
    exporter.close()
