"""Samples that spiked are remembered by the data set's own rows: who is told, what confirms them, what clears them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.rules.core.runs import (
    BATCH,
    Attempt,
    Change,
    Played,
    acting,
    core,
    dirty,
    gradients,
    only,
    plan_in,
    small_pack,
    spike,
)
from trainwarden.plan import Exclusion
from trainwarden.record import Event, Step
from trainwarden.rules.core.effects import Effect, Query, Save
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Command, Happened, Input, Observation, Steps
from trainwarden.rules.core.ordering import Order, layout_of
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.sightings import MOST, WHOLE_SHARD, answer

SHARD = 800
SHARDS = [[f"shard-{at:03d}", at * SHARD, (at + 1) * SHARD] for at in range(12)]
ROWS = len(SHARDS) * SHARD


def data(order: str = "sequential", seed: int = 0, **changed: Any) -> dict[str, Any]:
    """What a start event says of a loader over twelve shards."""
    loader: dict[str, Any] = {
        "seed": seed,
        "order": order,
        "function": None,
        "reserve": 0.0,
        "batch_size": BATCH,
        "world": 1,
        "shards": SHARDS,
        "shard_count": len(SHARDS),
        "skips": [],
        "exclude": [],
    }
    loader |= changed.pop("loader", {})
    event = {"loader_kind": "map", "dataset": "web", "dataset_size": ROWS, "loader": loader}
    event["can_skip"] = ["exclude", "substitute", "shift"]
    return {**event, **changed}


@dataclass
class Placed(Attempt):
    """An attempt whose records name the shards where its order has them."""

    epoch: int = 0
    back: int = 0  #: steps before the first that are not of this epoch

    def record(self, step: int, seq: int) -> Step:
        record = super().record(step, seq)
        first = (step - 1 - self.back) * BATCH
        record.signals["epoch"] = float(self.epoch)
        layout = layout_of(self.start, self.run_uid)
        shards = record.shards
        if layout is not None and layout.order == "shuffle":
            shards = []
        return msgspec.structs.replace(record, samples=[(first, first + BATCH)], shards=shards)


@dataclass
class Remembering(Played):
    """The core with a driver that hands back what it asks of its own memory, as both drivers do."""

    asked: list[Observation] = field(default_factory=list)

    def take(self, value: Input) -> list[Effect]:
        found = super().take(value)
        for one in found:
            told = answer(one, 0.0) if isinstance(one, Query) else None
            if told is not None:
                self.asked.append(told)
                super().take(told)
        return found

    def play(
        self, attempt: Attempt, chunk: int = 16, rank: int = 0, live: bool = False, upto: int | None = None
    ) -> None:
        super().play(attempt, chunk, rank, live, upto)

    @property
    def suspects(self) -> list[dict[str, Any]]:
        rows = {one.key: one.row for one in self.effects if isinstance(one, Save) and one.kind == "suspect"}
        return list(rows.values())

    def known(self, run: str) -> list[dict[str, Any]]:
        return [one for one in self.notices if one["kind"] == "known_suspect" and one["run"] == run]


def remembering(of: Played | None = None) -> Remembering:
    return Remembering((of or core()).state)


def run(name: str, *changes: Change, start: dict[str, Any] | None = None, **how: Any) -> Placed:
    return Placed(run_uid=f"uid-{name}", run=name, changes=changes, start=start or data(), **how)


def steps_of(start: dict[str, Any], first: int, end: int) -> tuple[int, int]:
    """Return the first and last step at which a run with this start event reads rows ``[first, end)``, which lie together."""
    layout = layout_of(start, "uid")
    assert layout is not None
    places = Order(layout).spread(0, first, end)
    assert places is not None
    ((low, high),) = places
    return low // BATCH + 1, -(-high // BATCH)


def reading(order: str, *rows: int) -> tuple[dict[str, Any], list[int]]:
    """Return the start event of an order that reads these rows neither early nor late, and the steps at which it does."""
    for seed in range(1000):
        layout = layout_of(data(order, seed), "uid")
        assert layout is not None
        steps = Order(layout).positions(0, np.array(rows)) // BATCH + 1
        if steps.min() > 40 and steps.max() < 560:
            return data(order, seed), [int(step) for step in steps]
    raise AssertionError("no such seed")


def broken(name: str = "a", **how: Any) -> Placed:
    return run(name, dirty(301, 350), **how)


def test_what_an_incident_blames_is_remembered_as_rows_of_its_shard() -> None:
    played = remembering()
    played.play(broken())
    seen = only(played.suspects)
    assert (seen["run"], seen["state"], seen["cause"], seen["weak"]) == ("a", "suspect", "data", False)
    assert seen["step"] == 301
    assert seen["confidence"] > 0.5
    assert seen["exclude"] == [{"dataset": "web", "shard": "shard-006", "first": 0, "end": WHOLE_SHARD}]
    assert seen["incident"] == only(played.incidents)["id"]
    assert not played.known("a")


def test_a_run_with_another_order_is_told_ahead_at_which_step_it_reads_them() -> None:
    played = remembering()
    played.play(broken())
    start = data("blocks", seed=2)
    first, _last = steps_of(start, 6 * SHARD, 7 * SHARD)
    played.play(run("b", start=start))
    told = only(played.known("b"))
    assert abs(told["step"] - first) <= 1
    assert first > 2
    assert "all of shard-006" in told["says"]
    assert "run a, attempt 0, at step 301" in told["says"]
    assert f"About step {told['step']}" in told["says"]


@pytest.mark.parametrize("chunk", [7, 600])
def test_how_records_are_cut_makes_no_difference(chunk: int) -> None:
    found = []
    for size in (1, chunk):
        played = remembering()
        for attempt in (broken(), run("b", *again(data("blocks", seed=2)), start=data("blocks", seed=2))):
            played.play(attempt, chunk=size)
        found.append((played.suspects, played.known("b"), [one["evidence"] for one in played.incidents]))
    assert found[0] == found[1]


def again(start: dict[str, Any]) -> tuple[Change, ...]:
    """The same shard's damage where this order reads it, in a fingerprint that says nothing."""
    first, _ = steps_of(start, 6 * SHARD, 7 * SHARD)
    return (spike({first + 3: 6.0, first + 4: 5.0, first + 5: 4.0}, first + 6, first + 30),)


def test_what_spikes_again_in_another_run_is_evidence_and_confirmed() -> None:
    start = data("blocks", seed=2)
    alone, played = remembering(), remembering()
    alone.play(run("b", *again(start), start=start))
    played.play(broken())
    before = only(played.suspects)["confidence"]
    played.play(run("b", *again(start), start=start))
    without, with_it = only(alone.incidents), played.incidents[-1]
    assert without["cause"]["scores"].get("data", 0) < with_it["cause"]["scores"]["data"]
    assert with_it["cause"]["name"] == "data"
    says = [one["says"] for one in with_it["evidence"] if one["kind"] == "known_suspects"]
    assert says
    assert "spiked in run a, attempt 0, at step 301" in says[0]
    first, second = sorted(played.suspects, key=lambda one: str(one["run"]))
    assert first["state"] == "confirmed"
    assert first["seen"] == 2
    assert first["confidence"] > before
    assert first["again"][0]["run"] == "b"
    assert first["again"][0]["how"] == "run"
    assert second["state"] == "confirmed"
    assert second["run"] == "b"


def test_the_same_step_of_the_same_recipe_is_a_weaker_witness() -> None:
    played = remembering()
    played.play(broken())
    played.play(run("b", spike({301: 6.0, 302: 5.0, 303: 4.0}, 304, 330)))
    evidence = [one for one in played.incidents[-1]["evidence"] if one["kind"] == "known_suspects"]
    assert evidence
    assert "same place of the same order" in evidence[0]["says"]
    twins = [one for one in played.suspects if one["run"] == "a"]
    assert twins[0]["state"] == "suspect"


def test_another_version_of_the_data_never_matches() -> None:
    played = remembering()
    played.play(broken())
    longer = data(dataset_size=ROWS + 1)
    moved = data(loader={"shards": [["shard-000", 0, 900], ["shard-006", 900, ROWS]], "shard_count": 2})
    for name, start in (("b", longer), ("c", moved), ("d", data(dataset="web-2")), ("e", data(dataset=None))):
        played.play(run(name, start=start))
        assert not played.known(name), name
    played.play(run("f"))
    assert played.known("f")


def test_a_data_set_without_a_name_is_remembered_for_its_own_run_alone() -> None:
    played = remembering()
    played.play(broken(start=data(dataset=None)))
    assert only(played.suspects)["exclude"] == []
    played.play(run("b", start=data(dataset=None)))
    assert not played.known("b")
    resumed = {"attempt": 0, "step": 250, "path": "ckpt/0/250"}
    played.play(run("a", start=data(dataset=None, resumed_from=resumed), number=1, first=251))
    assert played.known("a")


def test_what_passes_unharmed_is_cleared_and_told_no_more() -> None:
    played = remembering()
    played.play(broken())
    start = data("blocks", seed=2)
    played.play(run("b", start=start))
    seen = only(played.suspects)
    assert seen["state"] == "cleared"
    assert "run b, attempt 0" in seen["by"]
    played.play(run("c", start=data("blocks", seed=8)))
    assert not played.known("c")


def test_what_passes_diluted_clears_nothing() -> None:
    played = remembering()
    played.play(run("a", gradients({301: 30.0})))
    played.play(run("b", start=reading("shuffle", *range(300 * BATCH, 301 * BATCH))[0]))
    seen = only(played.suspects)
    assert seen["weak"]
    assert seen["state"] == "suspect"
    assert seen["passes"] == 1
    assert seen["exclude"][0]["shard"] == "shard-006"


def test_one_odd_step_is_remembered_weakly_and_the_common_rows_are_evidence() -> None:
    played = remembering()
    played.play(run("a", gradients({301: 30.0})))
    seen = only(played.suspects)
    assert (seen["weak"], seen["cause"], seen["shards"]) == (
        True,
        "undetermined",
        [{"shard": "shard-006", "rows": [[0, 16]]}],
    )
    start, (at,) = reading("shuffle", 6 * SHARD + 3)
    played.play(run("b", gradients({at: 30.0}), start=start))
    assert any(one["kind"] == "known_suspects" for one in played.incidents[-1]["evidence"])
    assert {one["state"] for one in played.suspects} == {"confirmed"}


def test_a_later_attempt_that_replays_them_confirms_or_clears() -> None:
    resumed: dict[str, Any] = {"resumed_from": {"attempt": 0, "step": 250, "path": "ckpt/0/250"}}
    for changes, state in (((dirty(301, 350),), "confirmed"), ((), "cleared")):
        played = remembering()
        played.play(broken())
        played.play(run("a", *changes, start=data(**resumed), number=1, first=251))
        first = next(one for one in played.suspects if one["attempt"] == 0)
        assert first["state"] == state, (state, first)
        assert "this run, attempt 0, at step 301" in only(played.known("a"))["says"]


def test_a_later_epoch_of_the_same_start_is_told_of_its_own() -> None:
    played = remembering()
    attempt = run("a", dirty(301, 350))
    second = Placed(
        run_uid="uid-a", run="a", start=data(), first=601, last=1200, epoch=1, back=600, began=attempt.time(601)
    )
    played.play(Placed(**{**vars(attempt), "end": None}))
    seq = 10_000
    for step in range(601, 1201):
        played.take(Steps(attempt.who, 0, (second.record(step, seq + step),)))
    told = only(played.known("a"))
    assert "this run, attempt 0, at step 301" in told["says"]
    assert "of epoch 1" in told["says"]
    assert told["step"] == 901


def test_what_a_person_dismisses_or_has_forgotten_is_told_no_more() -> None:
    for command in (
        Command("dismiss", "ann", 5.0, comment="known"),
        Command("forget", "ann", 5.0, matchers={"run": "a", "dataset": "web"}, comment="known"),
    ):
        played = remembering()
        played.play(broken())
        identity = only(played.incidents)["id"]
        played.take(Command("forget", "ann", 4.0, matchers={"run": "another"}))
        assert only(played.suspects)["state"] == "suspect"
        played.take(msgspec.structs.replace(command, incident=identity if command.name == "dismiss" else None))
        seen = only(played.suspects)
        assert seen["state"] == {"dismiss": "dismissed", "forget": "forgotten"}[command.name]
        assert (seen["by"], seen["comment"]) == ("ann", "known")
        played.play(run("b"))
        assert not played.known("b")


def test_what_the_run_leaves_out_itself_is_no_news() -> None:
    played = remembering()
    played.play(broken())
    gone = msgspec.to_builtins(Exclusion(dataset="web", shard="shard-006", first=0, end=WHOLE_SHARD))
    played.play(run("b", start=data("blocks", seed=2, loader={"exclude": [[gone, "substitute"]]})))
    assert not played.known("b")
    skip = [[0, [[300 * BATCH, 350 * BATCH]], "substitute"]]
    played.play(run("c", start=data(loader={"skips": skip})))
    assert not played.known("c")


def test_runs_that_train_at_the_same_time_are_told_when_it_is_seen() -> None:
    played = remembering()
    other = run("b", start=data("blocks", seed=2))
    first, _ = steps_of(other.start, 6 * SHARD, 7 * SHARD)
    assert first > 60
    lines = list(other.lines())
    played.play(other, upto=20)
    played.play(broken())
    for line in lines:
        if isinstance(line, Step) and line.step > 20:
            played.take(Steps(other.who, 0, (line,)))
    assert only(played.known("b"))["step"] >= first - 1


def test_the_memory_outlives_a_restart_at_any_place() -> None:
    start = data("blocks", seed=2)
    attempts = (broken(), run("b", *again(start), start=start))
    whole = remembering()
    for attempt in attempts:
        whole.play(attempt)
    cut = remembering()
    for attempt in attempts:
        for line in attempt.lines():
            if isinstance(line, Step) and line.step % 40 == 0:
                cut.state = load(dump(cut.state), Settings(), small_pack())
            cut.take(Steps(attempt.who, 0, (line,)) if isinstance(line, Step) else Happened(attempt.who, 0, line))
    assert cut.suspects == whole.suspects
    assert cut.known("b") == whole.known("b")
    assert [one["evidence"] for one in cut.incidents] == [one["evidence"] for one in whole.incidents]


def test_records_that_are_read_again_after_a_crash_are_not_seen_twice() -> None:
    played = remembering()
    lines = list(broken().lines())
    parts: dict[str, bytes] = {}
    for line in lines:
        if isinstance(line, Step) and line.step == 310:
            parts = {name: part for name, part in dump(played.state).items() if name}
        played.take(Steps(broken().who, 0, (line,)) if isinstance(line, Step) else Happened(broken().who, 0, line))
    after = only(played.suspects)
    head = dump(played.state, ())
    played.state = load({**head, **parts}, Settings(), small_pack())  # the run's part is older than the memory
    for line in lines:
        if isinstance(line, Step) and line.step >= 310:
            played.take(Steps(broken().who, 0, (line,)))
    assert only(played.suspects) == after


def test_an_answer_that_comes_before_its_start_is_kept_for_it() -> None:
    live = remembering()
    live.play(broken())
    live.play(run("b", start=data("blocks", seed=2)))
    (told,) = [one for one in live.asked if "uid-b" in one.query_id]
    letter = core()  # which has not seen run a: that it was told is in the daemon's journal
    letter.take(told)
    letter.play(run("b", start=data("blocks", seed=2)))
    known = [one for one in letter.notices if one["kind"] == "known_suspect"]
    assert known == live.known("b")


def test_a_plan_leaves_out_remembered_rows_in_every_epoch_only_where_it_skips_them() -> None:
    played = remembering(acting())
    played.play(run("a", gradients({310: 30.0, 120: 30.0})))
    seen = {one["step"]: one["exclude"] for one in played.suspects}
    assert set(seen) == {310, 120}
    other, again = reading("blocks", 309 * BATCH, 119 * BATCH)
    played.play(run("c", gradients(dict.fromkeys(again, 30.0)), start=other))
    assert [one["state"] for one in played.suspects if one["run"] == "a"] == ["confirmed", "confirmed"]
    played.play(broken("b"), upto=340)
    plan = plan_in(played.incidents[-1])
    left_out = {(one.shard, one.first) for one in plan.exclude}
    assert plan.skip_samples == [(300 * BATCH, 350 * BATCH)]
    inside = {(one["shard"], one["first"]) for one in seen[310]}
    outside = {(one["shard"], one["first"]) for one in seen[120]}
    assert inside <= left_out
    assert not outside & left_out
    assert "spiked before" in plan.reasons["exclude"]


def test_the_memory_is_bounded_and_what_counts_least_goes_first() -> None:
    played = remembering()
    played.play(broken())
    strong = only(played.suspects)["id"]
    book = played.state.memory.suspects
    for at in range(MOST):
        made = msgspec.structs.replace(
            book[strong], id=f"sus_{at}", incident=f"inc_{at}", weak=True, rows={}, samples=[]
        )
        book[made.id] = made
    played.play(run("b", dirty(101, 150)))
    assert len(book) == MOST
    assert strong in book
    gone = [one for one in played.suspects if one["state"] == "forgotten"]
    assert gone
    assert gone[0]["by"] == "trainwarden"


def test_without_a_loader_nothing_is_remembered() -> None:
    played = remembering()
    played.play(Attempt(changes=(dirty(301, 350),)))
    assert only(played.incidents)["cause"]["name"] == "data"
    assert not played.suspects
    assert not isinstance(played.state.memory.runs["uid"].alive.recalled.layout, Event)
