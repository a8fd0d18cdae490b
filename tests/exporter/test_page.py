"""The Prometheus page: complete from the start, right after a run, clean for promtool, and no spike lost to a scrape."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.cases.registry import case
from tests.exporter.runs import make, train, watch
from tests.real import free_port, need_program, wait_until
from trainwarden.exporter import series as series_module
from trainwarden.exporter.series import Page, Window
from trainwarden.record import Event, ShardSpan, Step
from trainwarden.signals import DERIVED, GROUPS, LABEL_VALUES, QUANTITIES, SIGNALS


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("run", "rank")))
            found[sample.name, labels] = sample.value
    return found


def render(page: Page) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(page)
    return samples_of(generate_latest(registry).decode())


def scrape(port: int | None) -> str:
    answer = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert answer.status_code == 200
    return answer.text


def test_every_label_set_is_there_before_the_first_step_counters_at_zero_and_what_was_not_measured_as_nan() -> None:
    found = render(Page("r", 0))
    for signal in SIGNALS:
        if not signal.probed:
            assert not any(key[0] == signal.series for key in found)
            continue
        if signal.name == "lr":
            assert math.isnan(found[signal.series, (("group", "all"),)])
            continue
        expected = 0 if signal.per == "clock" else 1  # no GPU, no series of one
        for label in signal.labels:
            expected *= len(LABEL_VALUES[label])
        assert len([key for key in found if key[0] == signal.series]) == expected, signal.series
    for derived in DERIVED:
        assert any(key[0] == derived.name for key in found), derived.name
    counters = {one.series for one in SIGNALS if one.type == "counter"} | {
        one.name for one in DERIVED if one.type == "counter"
    }
    zeros = counters | {"train_step", "train_phase", "train_exporter_lag_steps"}
    for (name, _), value in found.items():
        if name != "train_run_info":
            assert value == 0.0 if name in zeros else math.isnan(value), name


def test_what_is_never_measured_never_claims_to_be_zero() -> None:
    page = Page("r", 0)
    for number in range(1, 5):
        page.step(Step(seq=number, step=number, time=100.0 + number, signals={"loss": 2.0, "grad_norm": {"all": 1.0}}))
    found = render(page)
    assert (found["train_loss", ()], found["train_grad_norm", (("group", "all"),)]) == (2.0, 1.0)
    assert (found["train_step", ()], found["train_skipped_steps_total", ()]) == (4.0, 0.0)
    for name in ("train_rank_loss", "train_loss_scale", "train_checkpoint_last_timestamp_seconds"):
        assert math.isnan(found[name, ()]), name
    assert math.isnan(found["train_grad_norm", (("group", "mlp"),)])


def test_the_page_has_far_fewer_series_than_its_limit_allows() -> None:
    assert len(render(Page("r", 0))) < 200


def test_counters_add_up_and_gauges_hold_the_last_value() -> None:
    page = Page("r", 0)
    for number in range(1, 4):
        signals: dict[str, Any] = {
            "loss": 1.0 * number,
            "skipped": 1.0 if number == 2 else 0.0,
            "nonfinite": {"loss": 1.0, "grad": 0.0},
            "grad_norm": {"all": 2.0 * number, "mlp": 1.0},
            "samples_seen": 32.0 * number,
            "lr": 0.5,
        }
        page.step(Step(seq=number, step=number, time=100.0 + number, signals=signals))
    found = render(page)
    assert found["train_loss", ()] == 3.0
    assert found["train_skipped_steps_total", ()] == 1.0
    assert found["train_nonfinite_total", (("quantity", "loss"),)] == 3.0
    assert found["train_samples_total", ()] == 96.0
    assert found["train_grad_norm", (("group", "all"),)] == 6.0
    assert found["train_learning_rate", (("group", "all"),)] == 0.5
    assert found["train_steps_total", ()] == 3.0
    assert found["train_last_step_timestamp_seconds", ()] == 103.0
    assert set(QUANTITIES) == {key[1][0][1] for key in found if key[0] == "train_nonfinite_total"}


def test_the_loss_ema_ratio_is_against_a_bias_corrected_average_of_0_98() -> None:
    page = Page("r", 0)
    losses = [3.0, 2.5, 2.0, 6.0]
    average = weight = 0.0
    for number, loss in enumerate(losses, start=1):
        page.step(Step(seq=number, step=number, time=1.0, signals={"loss": loss}))
        average, weight = 0.98 * average + 0.02 * loss, 0.98 * weight + 0.02
    assert render(page)["train_loss_ema_ratio", ()] == pytest.approx(6.0 / (average / weight), rel=1e-12)


def test_more_series_than_the_limit_are_refused_and_counted() -> None:
    page = Page("r", 0, max_series=300)
    rates = {str(number): 0.1 for number in range(1000)}
    page.step(Step(seq=1, step=1, time=1.0, signals={"lr": {"all": 0.1, **rates}}))
    found = render(page)
    assert found["train_exporter_dropped_series_total", ()] == page.dropped > 600
    assert len([key for key in found if key[0] != "train_run_info"]) == 300


def test_the_shard_is_an_exemplar_and_not_a_label() -> None:
    from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

    page = Page("r", 0)
    name = "s" * 300
    page.step(Step(seq=1, step=1, time=1.0, signals={"samples_seen": 4.0}, shards=[ShardSpan(name, 0, 4)]))
    registry = CollectorRegistry()
    registry.register(page)
    line = next(x for x in openmetrics(registry).decode().splitlines() if x.startswith("train_samples_total"))
    assert "# {shard=" in line
    assert "shard" not in line.partition(" # ")[0]


def test_only_a_complete_checkpoint_is_shown() -> None:
    page = Page("r", 0)
    page.event(Event(kind="checkpoint", time=5.0, step=10, fields={"complete": False, "path": "a"}))
    assert math.isnan(render(page)["train_checkpoint_last_step", ()])
    page.event(Event(kind="checkpoint", time=6.0, step=20, fields={"complete": True, "path": "b"}))
    assert render(page)["train_checkpoint_last_step", ()] == 20.0
    assert render(page)["train_checkpoint_last_timestamp_seconds", ()] == 6.0


def test_a_window_forgets_after_its_time_and_not_before() -> None:
    window = Window(60.0)
    window.add(9.0, 100.0)
    for second in range(1, 60):
        window.add(2.0, 100.0 + second)
    assert window.extremes(159.9) == (2.0, 9.0)
    assert window.extremes(161.0) == (2.0, 2.0)
    assert window.extremes(1000.0) == (2.0, 2.0)
    window.add(float("nan"), 1000.0)
    assert window.extremes(1000.0) == (2.0, 2.0)


def test_a_windows_memory_does_not_grow_with_the_rate_of_the_steps() -> None:
    window = Window(60.0)
    for number in range(100_000):
        window.add(float(number % 7), number / 1000)
    assert len(window._buckets) <= 60 / series_module.BUCKET_SECONDS + 2


def test_promtool_finds_nothing_to_say_about_the_page(tmp_path: Path) -> None:
    promtool = need_program("promtool")
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    exporter = watch(model, optimizer, tmp_path)
    train(model, optimizer, exporter, 3)
    wait_until(lambda: "train_step{" in (text := scrape(exporter.port)) and "} 3.0" in text)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=scrape(exporter.port), capture_output=True, text=True, check=False
    )
    exporter.close()
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def spiky_run(folder: Path, seconds: float, spike_at: float) -> tuple[Any, threading.Thread]:
    """Return an exporter and a thread that closes hundreds of steps a second with one spike of one step."""
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), folder)

    def run() -> None:
        began, spiked = time.monotonic(), False
        while time.monotonic() - began < seconds:
            spike = not spiked and time.monotonic() - began > spike_at
            spiked = spiked or spike
            exporter.step(9.0 if spike else 2.0)
            time.sleep(0.002)

    return exporter, threading.Thread(target=run)


def every(seconds: float, until: Callable[[], bool], act: Callable[[], None]) -> None:
    while not until():
        act()
        time.sleep(seconds)


@case("D12")
def test_a_spike_of_one_step_is_seen_by_each_of_two_slow_scrapers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwarden.exporter.assembly.WINDOW_SECONDS", 2.0)  # four scrapes, as 60 s at 15 s
    exporter, run = spiky_run(tmp_path, seconds=2.5, spike_at=0.7)
    seen: list[list[float]] = [[], []]
    last: list[list[float]] = [[], []]

    def scraper(number: int) -> None:
        def act() -> None:
            found = samples_of(scrape(exporter.port))
            seen[number].append(found["train_loss_window_max", ()])
            last[number].append(found["train_loss", ()])

        every(0.5, lambda: not run.is_alive(), act)

    run.start()
    scrapers = [threading.Thread(target=scraper, args=(number,)) for number in (0, 1)]
    for thread in scrapers:
        thread.start()
    for thread in (run, *scrapers):
        thread.join()
    exporter.close()
    for number in (0, 1):
        assert 9.0 in seen[number], (seen, last)
        assert len(seen[number]) <= 6


@pytest.mark.slow
def test_a_real_prometheus_that_scrapes_seldom_still_has_the_spike(tmp_path: Path) -> None:
    prometheus = need_program("prometheus")
    exporter, run = spiky_run(tmp_path / "runs", seconds=9.0, spike_at=6.2)
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 3s, scrape_timeout: 2s}\n"
        "scrape_configs:\n"
        "  - job_name: trainer\n"
        f"    file_sd_configs: [{{files: ['{tmp_path}/runs/run/targets/*.json']}}]\n"
    )
    server = subprocess.Popen(
        [
            prometheus,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        run.start()

        def query(expression: str) -> float:
            answer = requests.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression}, timeout=5)
            result = answer.json()["data"]["result"]
            return float(result[0]["value"][1]) if result else 0.0

        def seen() -> bool:
            try:
                return query('max_over_time(train_loss_window_max{run="run",rank="0"}[1m])') == 9.0
            except requests.ConnectionError:
                return False

        wait_until(seen, 20.0, what="the spike in Prometheus", every=0.3)
        assert query("count(train_grad_norm)") == len(GROUPS)
    finally:
        server.terminate()
        server.wait(10)
        run.join()
        exporter.close()
