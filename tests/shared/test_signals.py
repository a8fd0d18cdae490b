"""The table of signals follows the naming rules of Prometheus and of the records."""

from __future__ import annotations

import re

import pytest

from trainwarden.signals import BY_NAME, DERIVED, LABEL_VALUES, SIGNALS, WINDOW_SECONDS, Series, Signal

EXCEPTIONS = {
    "lr": "train_learning_rate",
    "skipped": "train_skipped_steps_total",
    "samples_seen": "train_samples_total",
}
ALL: tuple[Signal | Series, ...] = (*SIGNALS, *DERIVED)


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_a_signal_is_named_after_its_series(signal: Signal) -> None:
    total = "_total" if signal.type == "counter" else ""
    assert signal.series == EXCEPTIONS.get(signal.name, f"train_{signal.name}{total}")


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_a_signal_has_a_unit_and_only_a_counter_is_cumulative(signal: Signal) -> None:
    assert signal.unit
    assert signal.type == "counter" or not signal.cumulative


@pytest.mark.parametrize("series", ALL, ids=lambda series: getattr(series, "series", series.name))
def test_a_series_is_named_as_prometheus_wants_it(series: Signal | Series) -> None:
    name = series.series if isinstance(series, Signal) else series.name
    assert re.fullmatch(r"train_[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert name.endswith("_total") == (series.type == "counter")
    # Base units only; and the endings that histograms, summaries and info metrics own.
    assert not re.search(
        r"_(percent|gib|mib|kib|gb|mb|kb|ms|us|ns|milliseconds|minutes|hours|per_sec|count|sum|bucket|info|created)(_|$)",
        name,
    )


@pytest.mark.parametrize("series", ALL, ids=lambda series: getattr(series, "series", series.name))
def test_a_series_says_what_it_is_in_one_sentence(series: Signal | Series) -> None:
    assert series.help[0].isupper() or series.help[0].isdigit()
    assert series.help.endswith(".")
    assert "\n" not in series.help


def test_no_two_series_and_no_two_signals_share_a_name() -> None:
    names = [series.series if isinstance(series, Signal) else series.name for series in ALL]
    assert len(set(names)) == len(names)
    assert len(BY_NAME) == len(SIGNALS)


def test_every_label_has_its_closed_set_of_values() -> None:
    for series in ALL:
        assert set(series.labels) <= set(LABEL_VALUES)
    for name, values in LABEL_VALUES.items():
        assert len(set(values)) == len(values), name
        assert len(values) <= 10, "more than ten values of a label: redesign it"


def test_all_label_sets_stay_far_below_the_limit_of_a_rank() -> None:
    total = 0
    for series in ALL:
        product = 1
        for label in series.labels:
            product *= len(LABEL_VALUES[label])
        total += product
    assert total < 500


def test_the_help_of_a_window_names_its_length() -> None:
    windows = [series for series in DERIVED if "_window_" in series.name]
    assert len(windows) == 3
    assert all(f"{WINDOW_SECONDS:g} seconds" in series.help for series in windows)


def test_no_signal_takes_the_name_of_a_field_of_the_line() -> None:
    assert not set(BY_NAME) & {"type", "seq", "step", "time", "stride", "samples", "shards", "ranks", "phase"}
