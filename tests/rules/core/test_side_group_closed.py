"""The ranks stop to add up what they see: the loss is one rank's own from there on, which is no fault of the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.rules.core.runs import BEGIN, Attempt, Change, Played, core, default_pack, only, shifted, spike
from tests.rules.core.test_planned_changes import lines, play, told
from trainwarden.record import Event

CLOSED = Event(kind="side_group", time=BEGIN, step=700, fields={"open": False, "reason": "connection closed by peer"})
#: This rank reads a harder source than the other does.
OWN = shifted(701, 0.3)


def run(*events: Event, changes: Sequence[Change] = (OWN,), after: int | None = None, last: int = 1300) -> Played:
    attempt = Attempt(last=last, changes=changes, end=None, world_size=2, checkpoint_every=0)
    return play(core(default_pack()), attempt.who, lines(attempt, *events, after=after), sizes=(64,))


def scope_notices(played: Played) -> list[tuple[int, str]]:
    return [(one["step"], one["says"]) for one in played.notices if one["kind"] == "metric_scope"]


def test_that_the_loss_is_a_ranks_own_is_no_level_shift_and_is_said() -> None:
    without = told(run())
    assert [one["severity"] for one in without] == ["critical"]
    played = run(CLOSED)
    assert told(played) == []
    ((step, says),) = scope_notices(played)
    assert step == 700
    assert "the rank's own in place of the mean" in says
    assert "connection closed by peer" in says
    assert [one for one in played.notices if one["kind"] == "planned_change"] == []


def test_news_that_come_late_take_back_what_was_opened_on_the_other_level() -> None:
    played = run(CLOSED, after=712)
    incident = only(played.incidents)
    assert (incident["state"], incident["cause"]["name"]) == ("dismissed", "instrument")
    assert "planned" not in str(incident["timeline"])


@pytest.mark.parametrize("fault", [spike({900: 2.0, 901: 2.0, 902: 2.0, 903: 2.0}), shifted(900, 0.5)])
def test_a_fault_of_the_training_behind_it_is_judged_as_ever(fault: Change) -> None:
    incident = only(told(run(CLOSED, changes=(OWN, fault), last=1700)))
    assert incident["onset_step"] == pytest.approx(900, abs=3)


def test_only_what_was_the_mean_begins_anew() -> None:
    def gradient(step: int, signals: dict[str, Any]) -> None:
        if step == 705:
            signals["grad_norm"]["all"] *= 40.0

    incident = only(told(run(CLOSED, changes=(OWN, gradient))))
    assert list(incident["alerts"]) == ["TrainingGradNormSurge"]
    assert incident["onset_step"] == 705


def test_one_that_was_open_all_along_or_opens_changes_nothing() -> None:
    opened = Event(kind="side_group", time=BEGIN, step=700, fields={"open": True})
    assert told(run(opened))
