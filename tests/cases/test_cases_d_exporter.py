"""Cases of category d that an exporter must get right by itself: what is absent, what lags, what is refused, what runs out of memory."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from tests.cases.build import Row, judge, rows
from tests.cases.registry import case
from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.runs import lines, loss_of, make, steps, train, watch
from tests.real import free_port, wait_until
from trainwarden.exporter.series import Page
from trainwarden.record import Step

Labels = tuple[tuple[str, str], ...]


def scrape(port: int | None) -> list[tuple[str, Labels, float]]:
    """Return each sample of a page with all of its labels, as Prometheus reads it."""
    answer = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert answer.status_code == 200
    return [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    ]


def value_of(port: int | None, name: str, **labels: str) -> float:
    (found,) = [
        value for series, those, value in scrape(port) if series == name and labels.items() <= dict(those).items()
    ]
    return found


# -- D06: gradients that are None


@case("D06")
@pytest.mark.parametrize("clip", [False, True])
def test_d06_a_gradient_that_is_none_gives_no_norm_and_no_zero_and_stops_nothing(tmp_path: Path, clip: bool) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)

    def step(number: int, backward: bool) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        if backward:
            loss.backward()
        if clip and backward:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exporter.step(loss)

    step(1, backward=False)
    wait_until(lambda: value_of(exporter.port, "train_step") == 1)
    page = [value for name, _, value in scrape(exporter.port) if name == "train_grad_norm"]
    assert page
    assert all(math.isnan(value) for value in page)
    assert math.isfinite(value_of(exporter.port, "train_loss"))
    step(2, backward=True)
    first, second = steps(exporter, tmp_path)
    assert not {"grad_norm", "clip_ratio", "update_ratio", "grad_zero_ratio"} & set(first.signals)
    assert (second.value("grad_norm") or 0.0) > 0


@case("D06")
def test_d06_an_engine_that_keeps_its_norm_to_itself_gives_none_until_it_has_taken_one() -> None:
    from trainwarden.exporter.partitions import norm_of

    class Engine:
        """What DeepSpeed's ZeRO optimizer shows of its norm: None before its first step, and always at stage 0."""

        _global_grad_norm: float | None = None

    engine = Engine()
    assert norm_of(engine) is None
    engine._global_grad_norm = 0.5
    assert norm_of(engine) == 0.5
    assert norm_of(object()) is None


@case("D06")
def test_d06_a_norm_that_is_never_there_is_no_dead_signal_and_alerts_nobody() -> None:
    def make_row(step: int, chance: Any) -> Row:
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "lr": 1e-4}

    found = judge(rows(1, 600, make_row))
    assert (found.incidents, found.notices) == ([], [])


# -- D07: forked workers

FORKING = """
import sys, time
from pathlib import Path
import torch
from tests.exporter.runs import loss_of, make, watch
folder, port, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = watch(model, optimizer, folder, port=port)
data = torch.utils.data.DataLoader(range(4000), batch_size=4, num_workers=8, multiprocessing_context="fork")
batches = iter(exporter.wrap(data, reserve=0))
for step in range(1, count + 1):
    next(batches)
    loss = loss_of(model, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    exporter.step(loss)
print("ready", exporter.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def forking(tmp_path: Path) -> Iterator[Any]:
    """Start trainers with eight forked workers; whatever is left is killed at the end."""
    started: list[subprocess.Popen[str]] = []
    workers: set[int] = set()

    def start(port: int, count: int) -> tuple[subprocess.Popen[str], int, set[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FORKING), str(tmp_path), str(port), str(count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:1] == ["ready"]
        of_it = children(process.pid)
        workers.update(of_it)
        return process, int(said[1]), of_it

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    for worker in workers:
        try:
            os.kill(worker, signal.SIGKILL)
        except ProcessLookupError:
            continue


def children(pid: int) -> set[int]:
    """Return the processes that any thread of ``pid`` has forked and that live."""
    return {int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()}


def listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port of this machine."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(f"socket:[{fields[9]}]")
    return found


def sockets(pid: int) -> set[str]:
    """Return the sockets that a process holds."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found.add(str(path.readlink()))
        except OSError:
            continue
    return {one for one in found if one.startswith("socket:")}


@case("D07")
def test_d07_forked_workers_serve_nothing_and_a_killed_rank_leaves_no_series_behind(forking: Any) -> None:
    port = free_port()
    process, served, workers = forking(port, 7)
    assert served == port
    assert len(workers) >= 8
    assert listening(port)
    assert listening(port) <= sockets(process.pid)
    assert all(not (sockets(worker) & listening(port)) for worker in workers)
    wait_until(lambda: value_of(port, "train_step") == 7)
    before = scrape(port)

    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, again, _ = forking(port, 3)  # at once, while orphans of the killed one may still be there
    assert again == port
    wait_until(lambda: value_of(port, "train_step") == 3)
    after = scrape(port)
    for page in (before, after):
        names = [(name, labels) for name, labels, _ in page]
        assert len(names) == len(set(names))
        assert {dict(labels)["rank"] for _, labels in names} == {"0"}
        assert not {"pid", "process", "worker", "instance", "hostname"} & {
            label for name, labels in names for label, _ in labels if name != "train_run_info"
        }
    assert value_of(port, "train_steps_total") == 3  # nothing of the one that was killed
    assert {name for name, _, _ in before} == {name for name, _, _ in after}


# -- D09: what is read lags, and is not waited for


@case("D09")
def test_d09_the_page_is_never_more_than_two_steps_behind_without_another_step_being_made(tmp_path: Path) -> None:
    model = gpt(layers=2, width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path)
    for number in range(1, 41):
        optimizer.zero_grad()
        loss = loss_on(model, batch(number))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
        if number % 8 == 0:
            expected = float(loss.detach())
            wait_until(lambda n=number: value_of(exporter.port, "train_step") >= n - 2)  # type: ignore[misc]
            wait_until(lambda n=number: value_of(exporter.port, "train_step") == n)  # type: ignore[misc]
            assert value_of(exporter.port, "train_loss") == pytest.approx(expected, rel=1e-6)
            assert value_of(exporter.port, "train_exporter_lag_steps") <= 2
    assert [record.step for record in steps(exporter, tmp_path)] == list(range(1, 41))


# -- D10: compiled before


@pytest.fixture
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@case("D10")
@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("way", ["module", "original", "in place", "blocks"])
def test_d10_a_model_that_was_compiled_and_ran_before_is_warned_of_and_the_rest_is_exported(
    tmp_path: Path, way: str
) -> None:
    model = gpt(layers=2, width=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    running: nn.Module = model
    if way in ("module", "original"):
        running = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif way == "in place":
        model.compile(backend="eager")
    else:
        for block in model.h:
            block.compile(backend="eager")

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_on(running, batch(number))
        loss.backward()
        optimizer.step()
        return loss

    step(1)
    exporter = watch(running if way == "module" else model, optimizer, tmp_path, cadence=1)
    losses = []
    for number in range(2, 7):
        loss = step(number)
        losses.append(float(loss.detach()))
        exporter.step(loss)
    wait_until(lambda: value_of(exporter.port, "train_steps_total") == 5)
    page = scrape(exporter.port)
    exporter.close()
    said = [one for one in exporter.notices if "make the exporter before torch.compile" in one]
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    seen = [record.value("activation_rms") is not None for record in records]
    assert len(said) == 1 or (
        said == [] and all(seen)
    )  # what torch compiles anew with our hooks is seen, and needs no warning
    assert said or way == "original"
    assert [record.value("loss") for record in records] == pytest.approx(losses, rel=1e-6)
    for record in records:
        assert (record.value("grad_norm") or 0.0) > 0
        assert (record.value("update_ratio") or 0.0) > 0
        assert record.value("lr") == 1e-3
    inside = [value for name, _, value in page if name.startswith("train_activation")]
    assert inside
    assert way == "blocks" or any(seen) or all(math.isnan(value) for value in inside)  # absent, and no zero


@case("D10")
@pytest.mark.parametrize("model_that_runs", ["another", "none"])
def test_d10_blocks_that_are_never_seen_are_told_of_within_three_steps(tmp_path: Path, model_that_runs: str) -> None:
    model, other = gpt(layers=2, width=8), gpt(layers=2, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for number in range(1, 6):
        loss = loss_on(other, batch(number)) if model_that_runs == "another" else torch.tensor(2.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    (said,) = [one for one in exporter.notices if "no block of the model was seen in 3 steps" in one]
    assert "torch.compile" in said
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert all((record.value("grad_norm") or 0.0) > 0 for record in records)


# -- D11: how many series

#: What docs/series.md and the setting ``max_series`` promise of a rank's page.
BUDGET = 1000


@case("D11")
def test_d11_two_hundred_layers_on_64_ranks_stay_within_the_budget_and_without_labels_that_grow(tmp_path: Path) -> None:
    model = gpt(layers=200, width=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for number in range(1, 4):
        optimizer.zero_grad()
        loss = loss_on(model, batch(number))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    wait_until(lambda: value_of(exporter.port, "train_step") == 3)
    first = scrape(exporter.port)
    assert value_of(exporter.port, "train_exporter_dropped_series_total") == 0
    records = steps(exporter, tmp_path)
    labels = {label for name, those, _ in first for label, _ in those if name != "train_run_info"}
    assert not labels & {"step", "time", "timestamp", "run_uid", "start_id", "attempt", "parameter", "shard", "sample"}
    assert len(first) <= BUDGET

    total = 0
    for rank in range(64):
        page = Page("run", rank)
        for record in records:
            page.step(record)
        total += sum(len(family.values) + (family.info is not None) for family in page.families())
        assert page.dropped == 0
    assert total <= 64 * BUDGET


@case("D11")
def test_d11_what_does_not_fit_is_refused_counted_and_said_once(tmp_path: Path) -> None:
    model = gpt(layers=200, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1, max_series=300)
    for number in range(1, 4):
        loss = loss_on(model, batch(number))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    wait_until(lambda: value_of(exporter.port, "train_step") == 3)
    page = scrape(exporter.port)
    assert len([name for name, _, _ in page if name != "train_run_info"]) == 300
    assert value_of(exporter.port, "train_exporter_dropped_series_total") > 50
    exporter.close()
    (said,) = [one for one in exporter.notices if "max_series" in one]
    assert "300" in said
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert len(records[-1].signals["block_rms"]) == 200  # type: ignore[arg-type]  # the records have all of them


# -- D15: details that do not fit into memory


def weights_after(folder: Path | None) -> tuple[list[torch.Tensor], list[Step], list[str]]:
    model = gpt(layers=2, width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = None if folder is None else watch(model, optimizer, folder, cadence=2)
    for number in range(1, 21):
        optimizer.zero_grad()
        loss = loss_on(model, batch(number))
        loss.backward()
        optimizer.step()
        if exporter is not None:
            exporter.step(loss)
    records: list[Step] = []
    if exporter is not None and folder is not None:
        exporter.close()
        records = [line for line in lines(folder) if isinstance(line, Step)]
    return [one.detach().clone() for one in model.parameters()], records, [] if exporter is None else exporter.notices


@case("D15")
@pytest.mark.parametrize(
    ("where", "lost"),
    [
        ("trainwarden.exporter.probes.optimizer_state._look_packed", "weight_rms"),
        ("trainwarden.exporter.inside._norm", "activation_rms"),
        ("trainwarden.exporter.probes.grad_norm.norms", "grad_norm"),
    ],
)
def test_d15_details_that_run_out_of_memory_are_given_up_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, lost: str
) -> None:
    tries: list[str] = []

    def full(*_: Any, **__: Any) -> Any:
        tries.append(where)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 117.00 GiB. GPU 0 has 200.00 MiB free.")

    plain, _, _ = weights_after(None)
    monkeypatch.setattr(where, full)
    watched, records, notices = weights_after(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert [record.step for record in records] == list(range(1, 21))
    assert all(record.value("loss") is not None and record.value("lr") == 1e-3 for record in records)
    assert not any(lost in record.signals for record in records)
    (said,) = [one for one in notices if "out of memory" in one]
    assert "training goes on" in said
    assert len(tries) == 1  # not again at each interval


# -- D12: kept by the page between two scrapes


@case("D12")
@pytest.mark.parametrize("offset", [7.0, 0.25, 14.75])
@pytest.mark.parametrize("place", [61, 77, 100])
def test_d12_a_spike_of_half_a_second_is_on_the_page_at_the_next_scrape(
    monkeypatch: pytest.MonkeyPatch, offset: float, place: int
) -> None:
    clock = [0.0]
    monkeypatch.setattr("trainwarden.exporter.series.time.monotonic", lambda: clock[0])
    page, seen = Page("run", 0), []
    due = offset
    for number in range(1, 241):  # two a second for two minutes
        clock[0] = number / 2
        spike = number == place
        signals: dict[str, Any] = {"loss": 9.0 if spike else 2.0, "grad_norm": {"all": 50.0 if spike else 0.5}}
        signals["nonfinite"] = {"grad": 1.0 if spike else 0.0}
        page.step(Step(seq=number, step=number, time=clock[0], signals=signals))
        if clock[0] >= due:
            due += 15.0
            read = {family.name: family.values for family in page.families()}
            seen.append(
                (
                    clock[0],
                    read["train_loss"][()],
                    read["train_loss_window_max"][()],
                    read["train_grad_norm_window_max"][()],
                    read["train_nonfinite_total"][("grad",)],
                )
            )
    at = place / 2
    nearest = next(one for one in seen if one[0] >= at)
    assert nearest[0] - at <= 15
    assert nearest[2:] == (9.0, 50.0, 1.0)
    assert all(one[2:] == (2.0, 0.5, 0.0) for one in seen if one[0] < at)
    assert seen[-1][4] == 1.0  # a counter never forgets
    if nearest[0] != at:
        assert all(one[1] == 2.0 for one in seen)  # the plain gauge missed it
    (told,) = judge([(n, {"loss": 9.0 if n == place + 300 else 2 + 1e-3 * (n % 7)}) for n in range(1, 600)]).incidents
    assert told["onset_step"] == place + 300


@case("D14")
def test_d14_a_loss_that_is_nan_raises_a_counter_on_the_page_whatever_its_gauge_shows(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path)
    train(model, optimizer, exporter, 3)
    wait_until(lambda: value_of(exporter.port, "train_step") == 3)
    assert value_of(exporter.port, "train_nonfinite_total", quantity="loss") == 0.0
    window = value_of(exporter.port, "train_loss_window_max")
    exporter.step(torch.tensor(float("nan")))
    exporter.step(torch.tensor(float("inf")))
    wait_until(lambda: value_of(exporter.port, "train_step") == 5)
    assert value_of(exporter.port, "train_nonfinite_total", quantity="loss") == 2.0
    assert math.isfinite(window)
    exporter.close()


@case("D14")
@pytest.mark.parametrize("shown", [math.nan, 0.0, 2.0, None])
def test_d14_the_counter_pages_whatever_became_of_the_nan_on_its_way(shown: float | None) -> None:
    def row(step: int, chance: Any) -> Row:
        broken = step >= 400
        loss = shown if broken else 2.0 + 0.02 * float(chance.normal())
        return {"nonfinite": {"loss": float(broken)}} | ({} if loss is None else {"loss": loss})

    (page,) = judge(rows(1, 460, row)).pages
    assert (page["verdict"], page["onset_step"]) == ("nonfinite", 400)
