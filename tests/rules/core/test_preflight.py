"""Settings that are wrong are said once, as a notice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules.core.runs import Attempt, core
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
