"""The policy's table: which line holds for what, and what no line ever wants."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution import Cause
from trainwarden.rules.core.facts import Facts, Finding
from trainwarden.rules.core.grounds import Past
from trainwarden.rules.core.policy import ACTIONS, OTHERWISE, POLICY, SOFT, decide
from trainwarden.rules.core.settings import Settings

PAST = Past(rollbacks=0, rolled_back=False, steps_run=400)
ALLOWING = Settings(lower_lr=True, probe=True, soft_steps=50)


def cause(name: str = "undetermined", confidence: float = 0.9, *findings: Finding, **scores: float) -> Cause:
    return Cause(name=name, confidence=confidence, scores=scores, findings=list(findings), cheapest_test="Test it.")


def healthy() -> Facts:
    return facts()


def high(last: int = 420) -> Facts:
    """A loss that stays two above its trend from the onset on."""
    found = facts(at(range(301, last + 1), loss=lambda old: old + 2.0), last=last)
    return replace(found, samples=((4800, 4816),))


def destroyed() -> Facts:
    return facts(at(range(301, 321), loss=math.nan))


def dirty() -> Facts:
    return facts(
        at(
            range(301, 321),
            loss=lambda old: old + 2.0,
            grad_norm={"all": 9.0},
            batch_longest_repeat_tokens=400.0,
            batch_unique_token_ratio=0.9,
        )
    )


def never(scale: float | None = 0.0) -> Facts:
    signals: dict[str, Any] = {"loss": math.nan} if scale is None else {"loss": math.nan, "loss_scale": scale}
    return facts(at(range(1, 61), **signals), onset=1, last=60)


def line(found: Facts, why: Cause, past: Past = PAST, settings: Settings = ALLOWING, **shape: str) -> str:
    decision = decide(found, why, past, settings, **shape)
    action = next(one.action for one in (*POLICY, OTHERWISE) if one.name == decision.line)
    assert decision.action == action
    return decision.line


def test_what_shows_nothing_and_what_is_not_high_for_long_is_left_alone() -> None:
    assert line(healthy(), cause("data", 1.0)) == "otherwise"
    assert line(high(last=340), cause("data", 1.0)) == "otherwise"


@pytest.mark.parametrize("found", [high(), destroyed()])
def test_what_persists_is_rolled_back(found: Facts) -> None:
    decision = decide(found, cause("numeric"), PAST, Settings())
    assert (decision.action, decision.line, decision.needs_approval) == ("rollback", "lasts", False)


def test_dirty_data_is_rolled_back_where_it_is_the_cause() -> None:
    assert line(dirty(), cause("data")) == "lasts"
    assert line(dirty(), cause("model")) == "otherwise"


@pytest.mark.parametrize(
    ("why", "past"),
    [
        (cause("undetermined", 0.3), PAST),
        (cause("planned_change"), PAST),
        (cause("model", 0.4), PAST),
        (cause("model"), replace(PAST, handed_over=True)),
    ],
)
def test_an_unclear_cause_and_one_that_nobody_looked_at_need_a_person(why: Cause, past: Past) -> None:
    decision = decide(high(), why, past, Settings())
    assert (decision.action, decision.needs_approval) == ("rollback", True)


def test_what_was_overwritten_is_rolled_back_though_the_loss_is_on_its_way_back() -> None:
    healing = facts(at(range(301, 420), loss=lambda old: old + 0.3), last=420)
    healing = replace(healing, loss_high=np.zeros_like(healing.loss_high))
    written = Finding(kind="weights_rewritten", says="Something else wrote to them.", cause="hardware", weight=0.75)
    assert line(healing, cause("hardware", 0.75)) == "otherwise"
    assert line(healing, cause("hardware", 0.75, written)) == "lasts"
    assert line(healing, cause("hardware", 0.4, written)) == "otherwise"
    assert line(healing, cause("data", 0.75, written)) == "otherwise"
    assert line(healthy(), cause("hardware", 0.75, written)) == "otherwise"


REPEATED = Finding(kind="repeated_step", says="It broke at the same step before.", cause="model", weight=0.5)
EVALUATED = Finding(kind="after_event", says="It began behind an evaluation again.", cause="numeric", weight=0.6)


@pytest.mark.parametrize(
    ("why", "past", "expected"),
    [
        (cause("model", 0.9, REPEATED), PAST, "comes_again"),
        (cause("data", 0.9, REPEATED), PAST, "lasts"),  # a plan takes the data away
        (cause("numeric", 0.9, EVALUATED), PAST, "comes_again"),
        (cause("numeric"), replace(PAST, rollbacks=2), "enough"),
        (cause("numeric"), replace(PAST, mismatch="warning"), "resumed_wrongly"),
    ],
)
def test_where_going_back_would_only_repeat_it_a_person_takes_over(why: Cause, past: Past, expected: str) -> None:
    assert line(high(), why, past, Settings()) == expected


def test_a_probe_is_wanted_where_it_tells_and_is_allowed() -> None:
    unclear = cause("undetermined", 0.3, data=0.3, hardware=0.3)
    assert line(high(), unclear) == "probe_tells"
    assert line(high(), unclear, settings=Settings()) == "lasts"
    assert line(high(), unclear, replace(PAST, probed=1)) == "lasts"
    assert line(high(), unclear, replace(PAST, targets=False)) == "lasts"
    assert line(replace(high(), samples=()), unclear) == "lasts"
    assert line(high(), cause("undetermined", 0.3, learning_rate=0.3)) == "lasts"  # a replay tells nothing of that
    assert line(high(), cause("numeric", 0.9, EVALUATED)) == "probe_tells"
    assert line(high(), cause("data", 0.9)) == "lasts"


def test_a_run_that_never_learned_is_stopped_at_once_by_a_dead_scale_and_else_behind_its_warm_up() -> None:
    young = replace(PAST, targets=False, steps_run=20)
    old = replace(young, steps_run=60)
    assert line(never(), cause("numeric"), young) == "nothing_learned"
    assert line(never(scale=1e-300), cause("undetermined", 0.2), young) == "nothing_learned"
    assert line(never(scale=65536.0), cause("numeric"), young) == "lasts"
    assert line(never(scale=None), cause("numeric"), old) == "nothing_learned"
    assert not decide(never(), cause("undetermined", 0.2), young, ALLOWING).needs_approval


def test_a_run_that_learned_something_or_has_where_to_go_is_not_stopped() -> None:
    none = replace(PAST, targets=False)
    assert line(never(), cause("numeric"), PAST) == "lasts"
    assert line(destroyed(), cause("numeric"), none) == "lasts"
    assert line(high(), cause("numeric"), none) == "lasts"
    assert line(replace(never(), resumed_from=0), cause("numeric"), none) == "lasts"


RATE = cause("learning_rate", 0.8)


def test_a_rate_that_is_too_high_is_lowered_before_it_is_rolled_back() -> None:
    assert line(high(last=360), RATE) == "rate_too_high"
    assert line(high(last=360), RATE, settings=Settings()) == "otherwise"
    assert line(high(last=340), RATE) == "otherwise"  # case A01 heals in thirty steps
    assert line(high(last=360), cause("learning_rate", 0.4)) == "otherwise"
    assert line(high(last=360), cause("undetermined", 0.9)) == "otherwise"
    assert line(high(last=360), RATE, severity="info") == "otherwise"
    assert line(high(last=360), RATE, replace(PAST, mismatch="warning")) == "otherwise"
    assert line(high(last=360), RATE, replace(PAST, refused=True, lowered=1)) == "otherwise"
    assert line(facts(last=360), RATE, verdict="recurring_spikes") == "rate_too_high"
    assert line(facts(last=360), RATE, verdict="transient_spike") == "otherwise"


def test_a_lowered_rate_has_its_time_and_then_more_is_done() -> None:
    lowered = replace(PAST, lowered=1, lowered_at=360, lowered_until=860)
    assert line(high(last=420), RATE, lowered) == "being_tried"
    assert line(high(last=460), RATE, lowered) == "being_tried"
    assert line(high(last=461), RATE, lowered) == "lasts"
    assert line(high(last=420), RATE, replace(lowered, refused=True)) == "lasts"
    assert line(destroyed(), RATE, replace(lowered, lowered_at=301)) == "lasts"


def test_the_rate_is_lowered_so_often_and_no_more() -> None:
    past = replace(PAST, lowered=2, lowered_at=200, lowered_until=250)
    assert line(high(last=360), RATE, past) == "rate_too_high"
    assert line(high(last=360), RATE, replace(past, lowered=3)) == "otherwise"
    assert line(high(last=360), RATE, replace(past, lowered_until=400)) == "otherwise"


FOUND = (healthy(), high(360), high(), destroyed(), dirty(), never())
NAMES = ("data", "learning_rate", "numeric", "optimizer_state", "hardware", "distributed", "model", "undetermined")
PASTS = st.builds(
    Past,
    rollbacks=st.integers(0, 3),
    rolled_back=st.booleans(),
    steps_run=st.integers(1, 500),
    mismatch=st.sampled_from(["", "warning", "critical"]),
    handed_over=st.booleans(),
    targets=st.booleans(),
    lowered=st.integers(0, 4),
    lowered_at=st.none() | st.integers(1, 500),
    lowered_until=st.none() | st.integers(1, 900),
    refused=st.booleans(),
    probed=st.integers(0, 2),
)
CAUSES = st.builds(
    cause,
    st.sampled_from(NAMES),
    st.floats(0, 1),
    *[st.sampled_from([REPEATED, EVALUATED, Finding(kind="other", says="Nothing.")])],
)
SETTINGS = st.builds(Settings, lower_lr=st.booleans(), probe=st.booleans(), max_rollbacks=st.integers(0, 3))
VERDICTS = st.sampled_from(["outlier", "transient_spike", "drift", "periodic_spikes", "level_shift", "nonfinite"])


@how(max_examples=400, deadline=None)
@given(
    st.integers(0, len(FOUND) - 1), CAUSES, PASTS, SETTINGS, VERDICTS, st.sampled_from(["info", "warning", "critical"])
)
def test_whatever_is_seen_no_decision_breaks_a_limit(
    place: int, why: Cause, past: Past, settings: Settings, verdict: str, severity: str
) -> None:
    found = FOUND[place]
    decision = decide(found, why, past, settings, verdict, severity)
    assert decision.action in ACTIONS
    if decision.action != "none":
        assert decision.why
    if decision.action in ("rollback", "probe"):
        assert past.rollbacks < settings.max_rollbacks
        assert not past.mismatch
    if decision.action == "probe":
        assert settings.probe
        assert past.probed < settings.max_probes
    if decision.action == "lower_lr":
        assert settings.lower_lr
        assert why.name == "learning_rate"
        assert past.lowered < settings.max_lower_lr
        assert not found.nonfinite[-5:].all()
        assert severity != "info"
    if decision.action == "stop":
        assert not past.targets
        assert found.nonfinite.all()
    if place == 0 and why.name not in ("distributed", "learning_rate"):
        assert decision.action == "none"


def test_the_table_names_each_line_once_and_wants_every_action_somewhere() -> None:
    names = [one.name for one in (*POLICY, OTHERWISE)]
    assert len(set(names)) == len(names)
    assert {one.action for one in (*POLICY, OTHERWISE)} == set(ACTIONS)
    assert all(one.when and one.because for one in POLICY)


def test_soft_actions_are_off_unless_the_settings_allow_them() -> None:
    for found, name in product(FOUND, NAMES):
        assert decide(found, cause(name), PAST, Settings()).action not in SOFT
