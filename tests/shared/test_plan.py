"""Plans and ledgers: what they refuse, which checkpoints they abandon, how ranges add up."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden import plan as plans
from trainwarden.plan import Applied, Checks, CloseLook, Exclusion, Ledger, LedgerEntry, Plan, PlanError, Target

PLAN = Plan(
    plan_id="p-1",
    run_uid="u",
    for_attempt=1,
    target=Target(attempt=0, step=400, path="ckpt/400.pt"),
    fallback_targets=[Target(attempt=0, step=300, path="ckpt/300.pt")],
    reset_optimizer=True,
    lr_factor=0.5,
    rewarmup_steps=100,
    skip_samples=[(4096, 8192)],
    exclude=[Exclusion(dataset="stdlib", shard="s-07", first=0, end=4096)],
    reasons={"lr_factor": "the rate was too high"},
    checks=Checks(start_step=401, lr=1e-3, optimizer_step=1, skipped=[(4096, 8192)]),
    anomaly=CloseLook(first_step=480, steps=13),
)


def changed(**fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(PLAN), **fields})


def test_a_plan_comes_back_as_it_was_and_reads_well() -> None:
    text = plans.encode(PLAN)
    assert plans.decode_plan(text) == PLAN
    assert text.endswith(b"}\n")
    assert b'\n  "lr_factor": 0.5,\n' in text


def test_a_plan_of_an_older_version_looks_at_nothing_closely() -> None:
    older = {name: value for name, value in msgspec.to_builtins(PLAN).items() if name != "anomaly"}
    assert plans.decode_plan(msgspec.json.encode(older)).anomaly is None


def test_a_close_look_of_the_most_steps_is_read_whole() -> None:
    look = plans.decode_plan(changed(anomaly={"first_step": 1, "steps": 1000, "check_nan": True})).anomaly
    assert look == CloseLook(first_step=1, steps=1000, check_nan=True)
    assert look.end == 1001


def test_fields_of_a_later_version_are_ignored() -> None:
    assert plans.decode_plan(changed(moon_phase="full")) == PLAN


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed()[:-20], "truncated"),
        (changed(plan_id="../../etc/x"), "plan_id"),
        (changed(plan_id=""), "plan_id"),
        (changed(lr_factor=0), "lr_factor"),
        (changed(lr_factor=2), "lr_factor"),
        (changed(rewarmup_steps=-1), "rewarmup_steps"),
        (changed(for_attempt=-1), "for_attempt"),
        (changed(skip_epoch=-1), "skip_epoch"),
        (changed(skip_samples=[[8, 8]]), "skip_samples"),
        (changed(skip_samples=[[-8, 8]]), "skip_samples"),
        (changed(exclude=[{"dataset": "d", "shard": "s", "first": 9, "end": 3}]), "exclude"),
        (changed(checks={"start_step": 401, "skipped": [[9, 3]]}), "checks.skipped"),
        (changed(skip_mode="forget"), "skip_mode"),
        (changed(anomaly={"first_step": 480, "steps": 0}), r"anomaly\.steps: 0 is not in 1 to 1000"),
        (changed(anomaly={"first_step": 480, "steps": 1001}), r"anomaly\.steps: 1001 is not in 1 to 1000"),
        (changed(anomaly={"first_step": 0, "steps": 5}), r"anomaly\.first_step: 0 is no step"),
        (changed(anomaly={"first_step": 2**60, "steps": 5}), r"anomaly\.first_step"),
        (changed(anomaly={"first_step": "soon", "steps": 5}), r"got `str` - at `\$\.anomaly\.first_step`"),
        (changed(anomaly={"first_step": 480}), r"required field `steps` - at `\$\.anomaly`"),
        (changed(anomaly="yes"), r"got `str` - at `\$\.anomaly`"),
        (changed(target={"attempt": 0, "path": "x"}), "step"),
        (b"\xff", "here"),
        (b'{"probe": ' + b"[" * 100_000, "here"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_with_source_and_field(data: bytes, says: str) -> None:
    with pytest.raises(PlanError, match=says) as error:
        plans.decode_plan(data, "here/1-p.json")
    assert str(error.value).startswith("here/1-p.json: ")


@given(st.binary(max_size=100) | st.sampled_from([changed(), plans.encode(Ledger(run_uid="u"))]).flatmap(lambda whole: st.integers(0, len(whole)).map(lambda cut: whole[:cut])))  # fmt: skip
def test_any_bytes_bring_a_plan_or_a_plan_error(data: bytes) -> None:
    for decode in (plans.decode_plan, plans.decode_ledger):
        try:
            decode(data)
        except PlanError:
            pass


def test_a_report_names_what_was_not_applied() -> None:
    report = Applied(plan_id="p-1", start_step=401, not_applied={"reset_optimizer": "unknown optimizer Lion"})
    assert json.loads(plans.encode(report))["not_applied"] == {"reset_optimizer": "unknown optimizer Lion"}


def test_a_ledger_of_another_major_version_is_refused() -> None:
    with pytest.raises(PlanError, match="schema 2"):
        plans.decode_ledger(b'{"run_uid": "u", "entries": [], "schema": 2}')


def rolled_back(*entries: tuple[int, int]) -> Ledger:
    return Ledger(
        run_uid="u",
        entries=[LedgerEntry(plan_id=f"p{a}", for_attempt=a, target_step=step) for a, step in entries],
    )


@pytest.mark.parametrize(
    ("entries", "attempt", "step", "abandoned"),
    [
        ([], 0, 500, False),
        ([(1, 400)], 0, 400, False),  # the target itself
        ([(1, 400)], 0, 300, False),  # older than the target
        ([(1, 400)], 0, 401, True),
        ([(1, 400)], 0, 10**9, True),  # however high, as one that a SIGTERM handler wrote
        ([(1, 400)], 1, 500, False),  # the new line's own
        ([(1, 400)], 2, 500, False),  # a crash restart of the new line
        ([(1, 400), (2, 200)], 0, 300, True),  # the second rollback went further back
        ([(1, 400), (2, 200)], 1, 450, True),
        ([(1, 400), (2, 450)], 1, 450, False),
        ([(1, 400), (2, 450)], 0, 430, True),  # abandoned once, abandoned for ever
        ([(1, 400), (2, 450)], 2, 10**9, False),
    ],
)
def test_a_checkpoint_is_abandoned_once_a_later_attempt_went_back_before_it(
    entries: list[tuple[int, int]], attempt: int, step: int, abandoned: bool
) -> None:
    assert rolled_back(*entries).abandoned(attempt, step) is abandoned


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=5),
    st.tuples(st.integers(1, 5), st.integers(0, 20)),
    st.integers(0, 5),
    st.integers(0, 25),
)
def test_what_is_abandoned_stays_abandoned_whatever_is_executed_later(
    entries: list[tuple[int, int]], later: tuple[int, int], attempt: int, step: int
) -> None:
    if rolled_back(*entries).abandoned(attempt, step):
        assert rolled_back(*entries, later).abandoned(attempt, step)


SMALL_RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(SMALL_RANGES)
def test_merged_ranges_hold_the_same_positions_sorted_and_apart(ranges: list[tuple[int, int]]) -> None:
    merged = plans.merge_ranges(ranges)
    assert {i for first, end in merged for i in range(first, end)} == {
        i for first, end in ranges for i in range(first, end)
    }
    assert all(first < end for first, end in merged)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))
    assert plans.merge_ranges(merged) == merged
