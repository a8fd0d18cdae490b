"""Cases of category e: targets that are whole, a framework that mends itself, warm-up and the ladder, one page for one trouble."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, Verdicts, judge, rows, steady
from tests.cases.build_ranks import OfRank, Ranks, healthy, judge_ranks
from tests.cases.registry import case
from tests.rules.core.runs import (
    BEGIN,
    Attempt,
    Played,
    acting,
    default_pack,
    dirty,
    plan_in,
    seen,
    shifted,
    substituted,
    under,
)
from trainwarden.exporter.checkpoints import catalogue
from trainwarden.plan import Ledger
from trainwarden.receiver.targets import UnreadableError, check_readable
from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.core.inputs import Happened, Steps
from trainwarden.runfolder import RunFolder

NAN = {"loss": math.nan, "grad_norm": math.nan}


def checkpoint(step: int, **fields: Any) -> tuple[int, str, dict[str, Any]]:
    """Return an event of a checkpoint for ``judge``: complete, unless the fields say otherwise."""
    return (step, "checkpoint", {"step": step, "path": f"ckpt/step_{step}", "complete": True, **fields})


def broken_at(onset: int) -> list[tuple[int, Row]]:
    healthy_rows = rows(onset - 900, onset - 1, steady(2.4, 0.02, grad_norm=(0.5, 0.05)))
    return [*healthy_rows, *[(step, dict(NAN)) for step in range(onset, onset + 40)]]


# -- E03: the newest checkpoint is not whole


@case("E03")
@pytest.mark.parametrize("onset", [1520, 1511, 1899])
@pytest.mark.parametrize("incomplete", [{"complete": False}, {"complete": None}, {"complete": False, "latest": True}])
def test_e03_the_newest_whole_checkpoint_is_the_target_and_what_is_not_whole_is_said(
    onset: int, incomplete: dict[str, Any]
) -> None:
    found = judge(broken_at(onset), changes=[checkpoint(1000), checkpoint(1500, **incomplete)])
    (page,) = found.pages
    assert page["verdict"] == "nonfinite"
    assert (page["plan"]["target"]["step"], page["plan"]["target"]["path"]) == (1000, "ckpt/step_1000")
    assert all(one["step"] != 1500 for one in page["plan"]["fallback_targets"])
    says = page["plan"]["reasons"]["target"]
    assert "that of step 1500 " in says
    assert ("incomplete" if incomplete["complete"] is False else "never reported complete") in says
    assert page["post_mortem"]["last_good"]["step"] == 1000


@case("E03")
def test_e03_with_no_whole_checkpoint_there_is_no_rollback_and_a_page() -> None:
    (page,) = judge(broken_at(1520), changes=[checkpoint(1000, complete=False), checkpoint(1500, complete=False)]).pages
    assert page["action"] in ("escalate", "stop")
    assert page["plan"] is None or page["plan"]["target"] is None


@case("E03")
def test_e03_a_folder_without_its_metadata_is_refused_before_anything_is_stopped(tmp_path: Path) -> None:
    for name in ("step_1000", "step_1500"):
        (tmp_path / name).mkdir()
        for shard in range(2):
            (tmp_path / name / f"__{shard}_0.distcp").write_bytes(b"weights")
    (tmp_path / "step_1000" / ".metadata").write_bytes(b"index")
    (tmp_path / "latest").symlink_to("step_1500")
    check_readable(tmp_path / "step_1000")
    for name in ("step_1500", "latest"):
        with pytest.raises(UnreadableError, match=r"\.metadata is missing: the save did not finish"):
            check_readable(tmp_path / name)


# -- E10: a state that is kept for examination, and a framework that makes the step again


def rerun(code: int, last: int = 330, mark: dict[str, Any] | None = None, spike: bool = True) -> Verdicts:
    """A run that found a fault at its last step, kept the state of step 300 for examination and ended with ``code``."""

    def make(step: int, chance: np.random.Generator) -> Row:
        if step == last and spike:
            return dict(NAN)
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "grad_norm": abs(0.5 + 0.05 * float(chance.normal()))}

    kept = {"complete": False, "purpose": "forensic"} if mark is None else mark
    exits = (last, "exit", {"reason": "exit", "code": code})
    return judge(rows(1, last, make), changes=[checkpoint(200), checkpoint(300, **kept), exits])


@case("E10")
@pytest.mark.parametrize("mark", [{"purpose": "forensic", "complete": False}, {"forensic": True}, {"purpose": "debug"}])
@pytest.mark.parametrize("spike", [True, False])
def test_e10_a_run_that_ends_with_code_17_is_numeric_with_the_hardware_suspect_and_its_last_state_no_target(
    mark: dict[str, Any], spike: bool
) -> None:
    found = rerun(17, mark=mark, spike=spike)
    (incident,) = found.told
    scores = incident["cause"]["scores"]
    assert incident["cause"]["name"] == "numeric"
    assert 0 < scores["hardware"] < scores["numeric"]
    assert scores.get("data", 0.0) < 0.1
    assert incident["plan"]["target"]["step"] == 200
    assert "step 300 is kept for examination alone" in incident["plan"]["reasons"]["target"]
    assert incident["held_by"] is not None  # nothing is requested of a run that has ended
    assert any("code 17" in one["says"] and "passing fault" in one["says"] for one in incident["timeline"])


@case("E10")
@pytest.mark.parametrize("spike", [True, False])
def test_e10_code_16_asks_for_another_start_and_nothing_is_planned(spike: bool) -> None:
    (incident,) = rerun(16, spike=spike).told
    assert incident["plan"] is None
    assert incident["action"] == "none"
    assert incident["cause"]["name"] == ("numeric" if spike else "undetermined")
    assert {"data", "numeric"} <= set(incident["cause"]["scores"])
    assert any("code 16" in one["says"] for one in incident["timeline"])


@case("E10")
@pytest.mark.parametrize("code", [0, 1, 17])
def test_e10_an_exit_for_which_nothing_vouches_is_no_incident(code: int) -> None:
    assert rerun(code, mark={}, spike=False).told == []


@case("E10")
def test_e10_an_emergency_checkpoint_is_no_target_either_but_one_to_resume_from(tmp_path: Path) -> None:
    (page,) = judge(broken_at(1520), changes=[checkpoint(1000), checkpoint(1500, purpose="emergency")]).pages
    assert page["plan"]["target"]["step"] == 1000
    folder = RunFolder("run", tmp_path)
    journal = folder.journal(0, "start", 0)
    journal.mkdir(parents=True)
    header: Any = Header(run_uid="uid", run="run", attempt=0, start_id="start", rank=0)
    marks = [(100, None), (200, "emergency"), (300, "forensic")]
    events = [
        Event(
            kind="checkpoint",
            time=1.0,
            seq=seq,
            step=step,
            fields={"path": f"/c/{step}", "complete": True, "finite": True, "purpose": purpose},
        )
        for seq, (step, purpose) in enumerate(marks, start=1)
    ]
    (journal / "00001.ndjson").write_bytes(b"".join(encode_line(one) + b"\n" for one in [header, *events]))
    found = {one.step: one.quarantined for one in catalogue(folder)}
    assert found == {100: False, 200: False, 300: True}
    assert Ledger(run_uid="uid").entries == []


@case("E10")
@pytest.mark.parametrize("ends", ["the event", "a later step"])
def test_e10_while_the_framework_makes_the_step_again_nothing_is_requested(ends: str) -> None:
    free, attempt = acting(default_pack()), Attempt(changes=[dirty(351, 400)], end="signal")
    free.play(attempt, live=True, upto=380)
    decided = next(one["step"] for one in free.incidents[0]["timeline"] if "Decided" in one["says"])
    assert len(free.rollbacks) == 1

    class Again(Attempt):
        """The framework says before it records the step that it makes it again."""

        def lines(self) -> Any:
            seq = 0
            for line in super().lines():
                if isinstance(line, Step) and line.step == decided:
                    seq += 1
                    yield Event(kind="rerun", time=line.time, seq=seq, step=decided, fields={"state": "begin"})
                seq += 1
                line.seq = seq
                yield line

    held, again = acting(default_pack()), Again(changes=[dirty(351, 400)], end="signal")
    held.play(again, live=True, upto=decided)
    (incident,) = held.incidents
    assert (incident["action"], incident["held_by"]) == ("rollback", "rerun")
    assert held.rollbacks == []
    newest = [line for line in again.lines() if isinstance(line, Step) and line.step <= decided + 1]
    last = newest[-2]
    if ends == "the event":
        over = Event(kind="rerun", time=last.time, seq=last.seq + 1, step=decided, fields={"state": "end"})
        held.take(Happened(again.who, 0, over))
        held.take(seen(again, last.time, last.seq + 1))
    else:
        held.take(Steps(again.who, 0, (newest[-1],)))
        held.take(seen(again, newest[-1].time, newest[-1].seq))
    assert len(held.rollbacks) == 1


# -- E05: the same trouble again and again is refused (its steps are those of the case, in records of a hundred)


@case("E05")
@pytest.mark.parametrize(
    ("starts", "fails", "hint"),
    [
        ((0, 10_000, 20_000), (16_900, 26_900, 36_900), "steps after its start"),
        ((0, 10_000, 16_000), (16_900, 16_900, 16_900), "broke at step 16900 too"),
    ],
)
def test_e05_the_third_attempt_is_refused_with_a_hint_whether_it_is_the_time_or_the_step(
    starts: tuple[int, ...], fails: tuple[int, ...], hint: str
) -> None:
    def attempt(first: int, fail: int) -> Ranks:
        well = healthy()

        def make(step: int, rank: int, chance: np.random.Generator) -> Row:
            return well(step, rank, chance) | ({"loss": math.nan, "rank_loss": math.nan} if step >= fail else {})

        kept = tuple(step for step in range(1000, fail, 1000) if step > first)
        return Ranks(first + 100, fail + 2000, make, stride=100, checkpoints=kept)

    found = judge_ranks(*(attempt(first, fail) for first, fail in zip(starts, fails, strict=True)))
    third = found.pages[-1]
    assert third["attempt"] == 2
    assert third["action"] == "escalate"
    assert third["plan"] is None
    assert hint in " ".join(one["says"] for one in third["evidence"])


# -- E07: early steps are no ground, later ones are, and the ladder ends at a person


def settling(step: int, chance: np.random.Generator) -> Row:
    """A gradient that falls from 30 to 1 within 200 steps, and a loss that learns."""
    norm = 1 + 29 * math.exp(-step / 45)
    return {
        "loss": 2.5 + 5.5 * math.exp(-step / 120) + 0.03 * float(chance.normal()),
        "grad_norm": norm * math.exp(0.1 * float(chance.normal())),
        "lr": 3e-4 * min(1.0, step / 200),
    }


@case("E07")
@pytest.mark.parametrize("seed", range(4))
def test_e07_an_early_gradient_of_thirty_is_no_ground_for_anything(seed: int) -> None:
    found = judge(rows(1, 1500, settling, seed=seed))
    assert found.told == []
    assert all(one["action"] == "none" for one in found.incidents)


@case("E07")
def test_e07_even_a_spike_within_the_warm_up_is_left_alone_and_says_why() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        row = settling(step, chance)
        return row | NAN if 20 <= step < 45 else row

    found = judge(rows(1, 49, make), changes=[checkpoint(10)])
    (incident,) = found.told
    assert (incident["action"], incident["plan"], incident["held_by"]) == ("none", None, "warm_up")
    why = next(one["why"] for one in incident["gates"] if one["gate"] == "warm_up")
    assert "50" in why


@case("E07")
@pytest.mark.parametrize("mode", ["act", "observe"])
def test_e07_a_later_rise_climbs_the_ladder_and_the_message_says_value_and_limit(mode: str) -> None:
    played = acting(default_pack(), mode=mode)
    high = shifted(500, 1.5)
    played.play(Attempt(changes=[high], last=720, end="signal"), live=True)
    (first,) = played.incidents
    assert first["action"] == "rollback"
    assert first["held_by"] == ("approval" if mode == "act" else "mode")  # a trial run says it and does nothing
    assert played.rollbacks == []
    assert "loss up to" in first["summary"]
    assert " against " in first["summary"]
    decided = next(one["says"] for one in first["timeline"] if "Decided" in one["says"])
    assert "100 steps" in decided  # persist_steps, by which it was set
    for rule in first["rules"]:
        assert rule["value"] is not None
        assert rule["since"] <= rule["step"]
    plan = plan_in(first)
    assert plan.target is not None
    assert plan.target.step == 450
    again = Attempt(
        number=1,
        first=451,
        last=1100,
        changes=[high, substituted(plan)],
        start=under(plan),
        began=BEGIN + 10_000,
        end="signal",
    )
    played.play(again, live=True)
    second = played.incidents[-1]
    assert played.incidents[0]["state"] == "not_recovered"
    assert (second["attempt"], second["action"], second["state"]) == (1, "escalate", "escalated")


# -- E12: 64 ranks, one trouble


def storm(first: int) -> OfRank:
    """NaN on rank 3 from step 77 on, and on all others a step later."""
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if step >= (77 if rank == 3 else 78):
            row |= {"loss": math.nan, "rank_loss": math.nan, "grad_norm": math.nan}
        return row

    return make


def fed(run: Played, lines: list[Any]) -> float:
    """Feed the lines of ranks in pieces of 25 steps each, as polls bring them, and return the time of the last."""
    held: dict[int, list[Step]] = {}
    clock = 0.0
    for start, rank, line in lines:
        clock = max(clock, line.time)
        if isinstance(line, Step):
            held.setdefault(rank, []).append(line)
        if not isinstance(line, Step) or (all(len(each) >= 25 for each in held.values()) and len(held) == 64):
            for of, records in held.items():
                run.take(Steps(start, of, tuple(records)))
            held.clear()
        if not isinstance(line, Step):
            run.take(Happened(start, rank, line))
    for of, records in held.items():
        run.take(Steps(start, of, tuple(records)))
    return clock


@case("E12")
def test_e12_64_ranks_that_are_nan_for_500_steps_are_one_page_and_one_update_in_the_next_attempt() -> None:
    run = acting(default_pack())
    attempts = [Ranks(1, 577, storm(1), [f"h{rank // 8}" for rank in range(64)], checkpoints=(50,))]
    attempts.append(Ranks(51, 577, storm(51), [f"h{rank // 8}" for rank in range(64)]))
    clock, told = BEGIN, []
    for number, attempt in enumerate(attempts):
        before = len(run.sent("notify"))
        clock = fed(run, attempt.lines(number, clock)) + 100.0
        told.append([one.body for one in run.sent("notify")[before:]])
    first, second = run.incidents
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert second["follows"] == first["id"]
    assert first["verdict"] == second["verdict"] == "nonfinite"
    assert first["severity"] == second["severity"] == "critical"
    assert (first["onset_step"], first["scope"]["ranks"][0]) == (77, 3)
    assert first["summary"].startswith("Nonfinite from step 77")
    assert [one["event"] for one in told[0]].count("opened") == 1
    assert [one["event"] for one in told[1] if one["incident"]["attempt"] == 1].count("opened") == 0
    assert [one["event"] for one in told[1]].count("repeated") == 1
    assert len(told[0]) + len(told[1]) <= 8  # and not 64 for each of 500 steps
