"""Maintenance windows: when they are open, what is wrong with one, and what the core is told of them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from trainwarden.rules.config import ConfigError, read_config
from trainwarden.rules.fields import Seconds
from trainwarden.rules.windows import Maintenance, Windows


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


SUNDAY = Maintenance(cron="0 2 * * sun", lasts=Seconds(4 * 3600), time_zone="Europe/Berlin")


@pytest.mark.parametrize(
    ("time", "end"),
    [
        ("2026-11-29T01:59:59+01:00", None),
        ("2026-11-29T02:00:00+01:00", "2026-11-29T06:00:00+01:00"),
        ("2026-11-29T05:59:59+01:00", "2026-11-29T06:00:00+01:00"),
        ("2026-11-29T06:00:00+01:00", None),
        ("2026-11-30T03:00:00+01:00", None),  # a Monday
        ("2026-07-05T02:00:00+02:00", "2026-07-05T06:00:00+02:00"),  # in summer the same hour is another moment
    ],
)
def test_a_window_by_cron_is_open_from_its_beginning_for_as_long_as_it_lasts(time: str, end: str | None) -> None:
    assert SUNDAY.until(at(time)) == (None if end is None else at(end))


def test_a_window_of_some_days_is_open_in_between() -> None:
    window = Maintenance(begin="2026-12-24T18:00", end="2026-12-27T08:00", time_zone="Europe/Berlin")
    assert window.until(at("2026-12-24T16:59:59+00:00")) is None
    assert window.until(at("2026-12-24T17:00:00+00:00")) == at("2026-12-27T07:00:00+00:00")
    assert window.until(at("2026-12-27T07:00:00+00:00")) is None
    own = Maintenance(begin="2026-12-24T18:00+00:00", end="2026-12-25T18:00Z", time_zone="Europe/Berlin")
    assert own.until(at("2026-12-24T17:30:00+00:00")) is None


def test_windows_that_overlap_leave_no_gap() -> None:
    hourly = Maintenance(cron="0 * * * *", lasts=Seconds(5400))
    for minute in range(0, 24 * 60, 7):
        now = at("2026-11-30T00:00:00+00:00") + 60 * minute
        until = hourly.until(now)
        assert until is not None
        assert now < until <= now + 5400


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "give either cron and lasts, or begin and end"),
        ({"cron": "0 2 * * sun"}, "lasts: say how long"),
        ({"cron": "0 2 * * sun", "lasts": "4h", "end": "2026-01-01T00:00"}, "give either"),
        ({"cron": "0 2 * *", "lasts": "4h"}, "cron: '0 2 * *': wrong number of fields; got 4, expected 5"),
        ({"cron": "0 2 * * 0", "lasts": "4h"}, "write weekdays by name"),
        ({"cron": "0 99 * * *", "lasts": "4h"}, "cron: '0 99 * * *'"),
        ({"cron": "0 0 31 2 *", "lasts": "4h"}, "never begins"),
        ({"cron": "0 2 * * *", "lasts": "4h", "time_zone": "Mars/Olympus"}, "'Mars/Olympus' is no time zone"),
        ({"begin": "soon", "end": "2026-01-01T00:00"}, "begin: 'soon' is no time"),
        ({"begin": "2026-01-02T00:00", "end": "2026-01-01T00:00"}, "is not behind begin"),
    ],
)
def test_what_is_wrong_with_a_window_is_said_with_its_place(fields: dict[str, Any], says: str) -> None:
    text = "sources: [{targets: ['127.0.0.1:1']}]\nmaintenance:\n  - {"
    text += ", ".join(f"{name}: '{value}'" for name, value in fields.items()) + "}\n"
    with pytest.raises(ConfigError) as caught:
        read_config(text, "t.yml", Path())
    assert says in caught.value.errors[0]
    assert caught.value.errors[0].startswith("t.yml:3:")


def test_the_core_is_told_of_each_window_once_and_first_that_none_is_open() -> None:
    windows = Windows([SUNDAY, Maintenance(cron="30 3 * * sun", lasts=Seconds(600), run="gpt*", note="storage")])
    now = at("2026-11-29T00:00:00+01:00")
    told = []
    for minute in range(24 * 60):
        for command in windows.due(now + 60 * minute):
            windows.told(command)
            told.append((command.time, command.matchers, command.until, command.comment))
    assert told == [
        (now, {}, None, ""),
        (at("2026-11-29T02:00:00+01:00"), {"run": "*"}, at("2026-11-29T06:00:00+01:00"), ""),
        (at("2026-11-29T03:30:00+00:00"), {"run": "gpt*"}, at("2026-11-29T03:40:00+00:00"), "storage"),
    ]


def test_what_could_not_be_told_is_told_again() -> None:
    windows = Windows([SUNDAY])
    now = at("2026-11-29T03:00:00+01:00")
    assert len(windows.due(now)) == 2
    for command in windows.due(now + 1):
        windows.told(command)
    assert windows.due(now + 2) == []
