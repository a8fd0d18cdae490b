"""Settings that are wrong are said once, as a notice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules.core.runs import BEGIN, Attempt, core
from trainwarden.record import Event
from trainwarden.rules.core.inputs import Happened
from trainwarden.rules.core.language import load_pack


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "float16"])
def test_a27_moments_in_low_precision_are_said_at_the_start(dtype: str) -> None:
    run = core()
    run.play(Attempt(last=5, start={"optimizer_state_dtype": dtype}))
    (notice,) = run.notices
    assert (notice["kind"], notice["signal"], notice["step"]) == ("preflight", "optimizer_state_dtype", 0)
    assert run.incidents == []


@pytest.mark.parametrize(
    "said", [{}, {"optimizer_state_dtype": "float32"}, {"optimizer_state_dtype": None}, {"optimizer_state_dtype": 7}]
)
def test_moments_in_full_precision_or_of_which_nothing_is_said_are_not(said: dict[str, Any]) -> None:
    run = core()
    run.play(Attempt(last=5, start=said))
    assert run.notices == []


def found_by_the_exporter(*said: dict[str, Any]) -> list[dict[str, Any]]:
    run = core()
    run.play(Attempt(last=5, end=None))
    who = Attempt().who
    for number, fields in enumerate(said):
        run.take(Happened(who, 0, Event(kind="preflight", time=BEGIN + 100, seq=7 + number, step=5, fields=fields)))
    assert run.incidents == []
    return run.notices


def test_what_the_exporter_finds_is_a_notice_once_a_check() -> None:
    clipping = {"check": "clipping", "says": "No clipping was seen."}
    notices = found_by_the_exporter(clipping, clipping, {"check": "warm_up", "says": "Short."})
    assert [(one["kind"], one["signal"], one["says"], one["step"]) for one in notices] == [
        ("preflight", "clipping", "No clipping was seen.", 5),
        ("preflight", "warm_up", "Short.", 5),
    ]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"check": "c"},
        {"check": 1, "says": "s"},
        {"check": "c", "says": "s" * 601},
        {"check": "c" * 41, "says": "s"},
    ],
)
def test_what_is_no_finding_or_a_book_is_passed_over(said: dict[str, Any]) -> None:
    assert found_by_the_exporter(said) == []


def test_a_start_has_so_many_checks_and_no_more() -> None:
    assert len(found_by_the_exporter(*({"check": f"c{number}", "says": "s"} for number in range(40)))) == 32


def test_an_alert_writes_the_notice_that_its_label_asks_for_once_in_a_start() -> None:
    rule = """
groups:
  - name: g
    rules:
      - alert: Odd
        expr: loss % 2 > 1
        labels: {severity: info, verdict: other, notice: preflight}
"""

    def alternating(step: int, signals: dict[str, Any]) -> None:
        signals["loss"] = 1.5 if step % 40 == 20 else 0.5

    run = core(pack=load_pack(rule, "test.yml"))
    run.play(Attempt(last=200, changes=[alternating]))
    assert [(one["kind"], one["step"]) for one in run.notices if one["kind"] == "preflight"] == [("preflight", 20)]
