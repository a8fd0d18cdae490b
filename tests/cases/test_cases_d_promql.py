"""Cases D12 and D14 in an engine of others: the shipped PromQL rules under promtool, on what a scrape of a real page reads."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cases.registry import case
from tests.real import need_program
from trainwarden.exporter.series import Page
from trainwarden.record import Step

RULES = Path(__file__).resolve().parent.parent.parent / "deploy/prometheus/trainwarden.rules.yml"
RUN = '{run="gpt", rank="0"}'


#: promtool's notation has no NaN: a quotient of two zeros makes one, of a series of 1 and then 0.
GOES_NAN = "1x20 0x20"


def fired(folder: Path, series: dict[str, str], alert: str, at: str, interval: str = "15s") -> bool:
    """Say whether an alert of the shipped rules fires at a time, on series in promtool's notation: whether to expect none is wrong."""
    nan = [name for name, values in series.items() if values == GOES_NAN]
    made = [{"record": name.partition("{")[0], "expr": f"2 * made_{name} / made_{name}"} for name in nan]
    (folder / "nan.yml").write_text(yaml.safe_dump({"groups": [{"name": "nan", "rules": made}]}))
    series = {f"made_{name}" if name in nan else name: values for name, values in series.items()}
    test = {
        "rule_files": [str(folder / "nan.yml"), str(RULES)],
        "evaluation_interval": interval,
        "tests": [
            {
                "interval": interval,
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
            }
        ],
    }
    path = folder / f"{alert}.yml"
    path.write_text(yaml.safe_dump(test))
    ran = subprocess.run(
        [need_program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0 or "got:[" in said, said
    return ran.returncode != 0


def counted(*, rises: bool, stale: bool = False) -> str:
    return "0x20 " + ("stale" if stale else "1x20" if rises else "0x20")


@case("D14")
@pytest.mark.parametrize("shown", [GOES_NAN, "2x20 0x20", "2x20 2x20", "2x20 stale"])
def test_d14_the_counter_pages_in_prometheus_whatever_the_gauge_shows(tmp_path: Path, shown: str) -> None:
    series = {
        f"train_loss{RUN}": shown,
        'train_nonfinite_total{run="gpt", rank="0", quantity="loss"}': counted(rises=True),
    }
    assert not fired(tmp_path, series, "TrainingNonFinite", "5m")
    assert fired(tmp_path, series, "TrainingNonFinite", "6m")


@case("D14")
@pytest.mark.parametrize("shown", [GOES_NAN, "2x20 0x20", "2x20 stale"])
@pytest.mark.parametrize("stale", [False, True])
def test_d14_a_gauge_that_is_nan_stale_or_0_alone_pages_nobody(tmp_path: Path, shown: str, stale: bool) -> None:
    series = {
        f"train_loss{RUN}": shown,
        f"train_loss_window_max{RUN}": shown,
        'train_nonfinite_total{run="gpt", rank="0", quantity="loss"}': counted(rises=False, stale=stale),
    }
    for alert in ("TrainingNonFinite", "TrainingLossSpike"):
        assert not fired(tmp_path, series, alert, "7m")


@case("D14")
def test_d14_a_gradient_that_a_scaler_skipped_pages_nobody_and_one_that_was_used_does(tmp_path: Path) -> None:
    grad = {'train_nonfinite_total{run="gpt", rank="0", quantity="grad"}': counted(rises=True)}
    for skipped in (True, False):
        series = grad | {f"train_skipped_steps_total{RUN}": counted(rises=skipped)}
        assert fired(tmp_path, series, "TrainingGradientNonFinite", "6m") is not skipped


def scraped(place: int, offset: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what a scrape every 15 s reads of a run with two steps a second and a spike of one step at ``place``."""
    clock = [0.0]
    monkeypatch.setattr("trainwarden.exporter.series.time.monotonic", lambda: clock[0])
    page, due = Page("gpt", 0), offset
    read: dict[str, list[float]] = {"train_loss": [], "train_loss_window_max": []}
    for number in range(1, 1201):
        clock[0] = number / 2
        page.step(Step(seq=number, step=number, time=clock[0], signals={"loss": 9.0 if number == place else 2.0}))
        if clock[0] >= due:
            due += 15.0
            families = {family.name: family.values[()] for family in page.families() if family.name in read}
            for name, value in families.items():
                read[name].append(value)
    assert all(math.isfinite(value) for values in read.values() for value in values)
    return {f"{name}{RUN}": " ".join(map(str, values)) for name, values in read.items()}


@case("D12")
@pytest.mark.parametrize(("place", "offset"), [(901, 7.0), (933, 7.0), (960, 2.5)])
def test_d12_a_spike_between_two_scrapes_fires_in_prometheus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, offset: float
) -> None:
    series = scraped(place, offset, monkeypatch)
    assert set(series[f"train_loss{RUN}"].split()) == {"2.0"}  # the plain gauge never shows it
    before, after = int(place / 2 - offset) // 15 * 15, int(place / 2 - offset) // 15 * 15 + 15
    assert not fired(tmp_path, series, "TrainingLossSpike", f"{before}s")
    assert fired(tmp_path, series, "TrainingLossSpike", f"{after}s")
