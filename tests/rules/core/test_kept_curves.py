"""The signals around an incident are kept with it, attempts over each other, and so is what the rollback cost."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.rules.core.runs import (
    Attempt,
    Played,
    core,
    default_pack,
    not_a_number,
    only,
    plan_in,
    recovered,
    spike,
)
from trainwarden.rules.core.effects import Save


def kept(played: Played) -> dict[str, Any]:
    rows = [one.row for one in played.effects if isinstance(one, Save) and one.kind == "curves"]
    return rows[-1]


def test_the_curves_of_both_attempts_are_kept_once_the_rollback_is_verified() -> None:
    played = recovered()
    row = only(played.incidents)
    target = plan_in(row).target
    assert target is not None
    assert row["state"] == "recovered"
    curves = kept(played)
    assert curves["incident"] == row["id"]
    assert [one["attempt"] for one in curves["attempts"]] == [0, 1]
    old, new = curves["attempts"]
    assert old["start_id"] == row["start_id"]
    assert 301 in old["steps"]
    assert 301 in new["steps"]
    assert old["signals"]["loss"][old["steps"].index(301)] > new["signals"]["loss"][new["steps"].index(301)] + 1
    assert row["cost"] == {
        "steps": 420 - target.step,
        "seconds": (420 - target.step) * 0.5,
        "thrown": True,
        "idle": 60.0,
    }


def test_curves_are_json_with_words_for_what_is_not_finite_and_null_for_what_is_absent() -> None:
    played = core()
    played.play(Attempt(last=330, changes=[not_a_number(301)], end=None))
    curves = kept(played)
    json.dumps(curves, allow_nan=False)
    (one,) = curves["attempts"]
    at = one["steps"].index(301)
    assert one["signals"]["loss"][at] == "NaN"
    assert math.isfinite(one["signals"]["loss"][at - 1])
    assert one["signals"]["update_ratio"][at] is None


def test_a_piece_of_information_keeps_no_curves() -> None:
    played = core(default_pack())
    played.play(Attempt(last=600, changes=[spike({401: 0.4})]))
    assert [one["severity"] for one in played.incidents] == ["info"]
    assert not [one for one in played.effects if isinstance(one, Save) and one.kind == "curves"]
