"""Which groups and modules hold the gradient norm that an incident speaks of."""

from __future__ import annotations

from typing import Any

import pytest

from trainwarden.record import Step
from trainwarden.rules.core.groups import KEPT, GroupNorms, finding, split, where


def norms(rows: list[dict[str, float]]) -> GroupNorms:
    found = GroupNorms()
    found.extend(
        [Step(seq=step, step=step, time=float(step), signals={"grad_norm": row}) for step, row in enumerate(rows, 1)]
    )
    return found


CALM: dict[str, Any] = {"all": 1.0, "head": 0.8, "mlp": 0.4, "attention": 0.4}


def test_the_group_that_grew_is_named_and_not_the_one_that_is_large_anyway() -> None:
    ((label, share),) = where(norms([CALM] * 50 + [{**CALM, "mlp": 4.0}] * 5), 51, drifts=False)
    assert label == "mlp"
    assert share == pytest.approx(1.0)


def test_what_grows_everywhere_is_nowhere() -> None:
    grown = dict.fromkeys(("embedding", "head", "mlp", "attention", "all"), 3.0)
    assert where(norms([{**grown, "head": 1.0}] * 50 + [dict.fromkeys(grown, 9.0)] * 5), 51, drifts=False) == []


def test_of_a_drift_the_share_of_the_norm_itself_counts() -> None:
    named = where(norms([{"all": 1.9, "output_proj": 1.85, "mlp": 0.3, "attention": 0.3}] * 200), 1, drifts=True)
    assert [label for label, _ in named] == ["output_proj"]
    assert split(named) == ([], ["output_proj"])
    assert finding(named, 7, drifts=True).says == "Of the squared gradient norm, 95 % in output_proj."


def test_groups_of_the_table_are_groups_and_others_modules() -> None:
    assert split([("head", 0.5), ("blocks.3", 0.4)]) == (["head"], ["blocks.3"])


@pytest.mark.parametrize("rows", [[], [CALM] * 3])
def test_without_records_before_it_nothing_is_named(rows: list[dict[str, float]]) -> None:
    assert where(norms(rows), 1, drifts=False) == []


def test_one_after_another_or_together_is_the_same_and_bounded() -> None:
    rows = [{**CALM, "mlp": float(step)} for step in range(3 * KEPT)]
    together, single = norms(rows), GroupNorms()
    for step, row in enumerate(rows, 1):
        single.extend([Step(seq=step, step=step, time=0.0, signals={"grad_norm": row})])
    assert single == together
    assert len(single.rows) == KEPT


def test_modules_that_a_flat_log_names_count_too() -> None:
    found = GroupNorms()
    signals: dict[str, Any] = {
        "grad_norm": 1.9,
        "grad_norm_clipped": 1.0,
        "grad_norm_output_proj": 1.85,
        "grad_norm_mlp": 0.4,
    }
    found.extend([Step(seq=1, step=1, time=0.0, signals=signals)])
    assert [label for label, _ in where(found, 1, drifts=True)] == ["output_proj"]
