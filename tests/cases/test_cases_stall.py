"""Cases of a training that hangs: D03, F03, A33, A43 and E08, live with ticks and polls, and in a replay of a journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.cases.registry import case
from tests.rules.core.runs import Played, acting, default_pack
from trainwarden.record import Event, Step
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, SourceSeen, Start, Steps, Tick
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Outcome, Replay

MINUTE = 60.0
WHO = Start("uid", "hung", 0, "start-0")
Line = Step | Event


class Run:
    """A run that is written down as it goes, with a clock of its own."""

    def __init__(self, first: int = 1, clock: float = 1.7e9, **start: Any) -> None:
        self.lines: list[Line] = []
        self.clock = clock
        self.step = first - 1
        self.chance = np.random.default_rng(0)
        self.event("start", world_size=1, attempt=0, start_id=WHO.start_id, **start)

    def event(self, kind: str, **fields: Any) -> Run:
        self.lines.append(Event(kind=kind, time=self.clock, seq=len(self.lines) + 1, step=self.step, fields=fields))
        return self

    def steps(self, count: int, seconds: float, phase: str | None = "train", loss: float = 2.3) -> Run:
        for _ in range(count):
            self.step += 1
            self.clock += seconds
            signals = {"loss": loss + 0.02 * float(self.chance.normal())}
            line = Step(seq=len(self.lines) + 1, step=self.step, time=self.clock, signals=signals, phase=phase)  # type: ignore[arg-type]
            self.lines.append(line)
        return self

    def passes(self, minutes: float) -> Run:
        self.clock += minutes * MINUTE
        return self

    def evaluation(self, minutes: float) -> Run:
        return self.event("phase", phase="evaluation").passes(minutes).event("phase", phase="train")


class Live:
    """A daemon that polls and ticks every 3 s, with a clock that is not the trainer's."""

    def __init__(self, skew: float = 0.0, **settings: Any) -> None:
        self.skew = skew
        self.settings = settings
        self.played: Played = acting(default_pack(), **settings)
        self.now = 0.0
        self.seq = 0

    def follow(self, run: Run, answers: bool = True) -> Live:
        """Take what the run has written, each line when it was written, up to the run's own clock."""
        for line in run.lines[self.seq :]:
            self.until(line.time + self.skew, answers)
            if isinstance(line, Step):
                self.played.take(Steps(WHO, 0, (line,)))
            else:
                self.played.take(Happened(WHO, 0, line))
            self.seq = line.seq
        return self.until(run.clock + self.skew, answers)

    def until(self, time: float, answers: bool = True) -> Live:
        if not self.now:
            self.now = time
        for at in self._seconds(time):
            if self.seq:
                caught = {"caught_up": answers, "authenticated": answers, "may_act": True, "reachable": answers}
                self.played.take(SourceSeen(WHO, 0, at, self.seq, **caught))
            self.played.take(Tick(at))
        return self

    def _seconds(self, time: float) -> Iterator[float]:
        while self.now + 3 <= time:
            self.now += 3
            yield self.now

    @property
    def stalls(self) -> list[dict[str, Any]]:
        return [one for one in self.played.incidents if one["verdict"] == "stall"]

    @property
    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.played.notices]


def replay(*runs: Run) -> Outcome:
    """Play journals; each further run is the next attempt."""
    lines = []
    for number, run in enumerate(runs):
        who = msgspec.structs.replace(WHO, attempt=number, start_id=f"start-{number}")
        lines += [(who, 0, line) for line in run.lines]
    return Replay(Settings(), default_pack()).run(lines)


def stalls(outcome: Outcome) -> list[dict[str, Any]]:
    return [one for one in outcome.incidents.values() if one["verdict"] == "stall"]


def d03(evaluations: int = 4) -> Run:
    """The run of case D03 at a tenth of its length: 105 s a step, an evaluation of 12 minutes every hundred."""
    run = Run(first=44601)
    for _ in range(evaluations):
        run.steps(100, 105.0).evaluation(12)
    return run


@case("D03")
def test_d03_a_hang_in_an_evaluation_pages_at_twice_its_usual_time_and_no_usual_one_does() -> None:
    run = d03()
    live = Live().follow(run)
    assert live.played.incidents == []
    run.steps(1, 105.0)
    begun = run.clock
    live.follow(run.event("phase", phase="evaluation").passes(180))
    (page,) = live.stalls
    assert page["severity"] == "critical"
    assert page["onset_step"] == page["opened_step"] == run.step
    opened = page["timeline"][0]["time"] - begun
    assert 23.9 * MINUTE <= opened <= 24.2 * MINUTE
    assert (page["state"], page["action"], page["plan"]) == ("confirmed", "escalate", None)
    assert "in evaluation (budget 24 min, the longest so far took 12 min)" in page["summary"]
    assert [one.body["event"] for one in live.played.sent("notify")] == ["opened"]
    assert live.played.rollbacks == []


@case("D03")
@pytest.mark.parametrize("skew", [-1200.0, 1200.0])
def test_d03_a_clock_of_the_trainer_that_goes_wrong_is_no_stall(skew: float) -> None:
    run = Run()
    live = Live(skew).follow(run.steps(200, 1.0))
    assert live.played.incidents == []


@case("D03")
def test_d03_a_phase_that_records_alone_tell_is_one_too() -> None:
    run = Run(first=44001)
    for _ in range(4):
        run.steps(99, 105.0).steps(1, 105.0, phase="eval").passes(12)
    run.steps(50, 105.0).steps(1, 105.0, phase="eval")
    live, begun = Live().follow(run), run.clock
    assert live.played.incidents == []
    (page,) = live.follow(run.passes(180)).stalls
    assert 23 * MINUTE <= page["timeline"][0]["time"] - begun <= 26 * MINUTE


@case("D03")
def test_d03_a_hang_of_which_nobody_says_the_phase_pages_as_one_of_training() -> None:
    run = Run()
    for _ in range(3):
        run.steps(100, 105.0, phase=None).passes(12).event("evaluation", loss=2.1)
    live = Live().follow(run.steps(20, 105.0, phase=None))
    assert live.played.incidents == []
    begun = run.clock
    (page,) = live.follow(run.passes(180)).stalls
    assert 24 * MINUTE <= page["timeline"][0]["time"] - begun <= 31 * MINUTE


@case("D03")
def test_d03_in_a_replay_a_hang_that_was_overcome_is_said_with_its_length() -> None:
    run = d03().steps(1, 105.0).event("phase", phase="evaluation").passes(180).event("phase", phase="train")
    (stall,) = stalls(replay(run.steps(60, 105.0)))
    assert stall["state"] == "recovered"
    assert stall["severity"] == "critical"
    assert "It stood still for 3 h" in stall["summary"]


def test_a_hole_of_forty_minutes_in_a_journal_is_a_stall_and_the_end_of_a_file_is_none() -> None:
    run = Run().steps(300, 2.0).passes(40).steps(100, 2.0)
    (stall,) = stalls(replay(run))
    assert (stall["onset_step"], stall["state"]) == (300, "recovered")
    assert "stood still for 40 min" in stall["timeline"][-1]["says"]
    assert stalls(replay(Run().steps(300, 2.0))) == []


def test_between_two_attempts_nobody_knows_and_it_is_no_stall() -> None:
    first = Run().steps(300, 2.0)
    second = Run(first=251, clock=first.clock + 7200, resumed_from={"attempt": 0, "step": 250}).steps(200, 2.0)
    outcome = replay(first, second)
    assert stalls(outcome) == []
    assert "unseen" in [one["kind"] for one in outcome.notices.values()]


@case("A43")
def test_a43_a_step_of_35_seconds_beside_an_evaluation_is_no_stall() -> None:
    run = Run(first=2000).steps(100, 1.1).passes(35 / 60).event("evaluation", loss=4.04).event("checkpoint", path="c")
    assert Live().follow(run.steps(100, 1.1)).played.incidents == []
    assert replay(run).incidents == {}


@case("A33")
def test_a33_fifteen_minutes_of_silence_page_before_the_processes_die() -> None:
    run = Run(first=64000)
    for _ in range(3):
        run.steps(100, 30.0).event("phase", phase="checkpoint").passes(2).event("phase", phase="train")
    live, begun = Live().follow(run.steps(50, 30.0)), run.clock
    (page,) = live.follow(run.passes(16)).stalls
    assert page["timeline"][0]["time"] - begun <= 15.1 * MINUTE
    live.until(live.now + 3600, answers=False)  # the exporters die with their processes
    again = Run(first=64301, clock=run.clock + 3700, resumed_from={"attempt": 0, "step": 64300})
    who = msgspec.structs.replace(WHO, attempt=1, start_id="start-1")
    live.played.take(Happened(who, 0, again.lines[0]))
    assert live.stalls[0]["state"] == "inconclusive"
    assert live.kinds.count("unseen") == 1


@case("F03")
def test_f03_a_start_may_take_45_minutes_and_no_longer() -> None:
    run = Run()
    live = Live().follow(run.passes(44))
    assert live.played.incidents == []
    (page,) = live.follow(run.passes(2)).stalls
    assert "initialising" in page["summary"]
    live.follow(run.steps(3, 1.0))
    assert live.stalls[0]["state"] == "recovered"


@case("F03")
def test_f03_in_a_replay_a_start_of_an_hour_is_a_stall_and_one_of_half_an_hour_is_none() -> None:
    assert [one["verdict"] for one in stalls(replay(Run().passes(60).steps(100, 1.0)))] == ["stall"]
    assert stalls(replay(Run().passes(30).steps(100, 1.0))) == []


@case("F03")
def test_f03_a_run_that_finished_may_be_silent() -> None:
    run = Run().steps(200, 1.0)
    live = Live().follow(run.event("exit", reason="finished", code=0).passes(120))
    assert live.played.incidents == []
    phase = Run().steps(200, 1.0).event("phase", phase="finished").passes(120)
    assert Live().follow(phase).played.incidents == []


@case("E08")
def test_e08_two_polls_without_an_answer_are_nothing_and_ten_minutes_are_a_notice() -> None:
    run = Run().steps(100, 1.0)
    live = Live().follow(run)
    live.until(live.now + 6, answers=False)
    run.passes(6 / 60)
    live.follow(run.steps(100, 1.0))
    assert live.played.incidents == []
    assert live.kinds == []
    live.until(live.now + 3600, answers=False)
    assert live.played.incidents == []
    assert live.kinds == ["unseen"]


@case("E08")
def test_e08_a_daemon_that_was_away_takes_its_own_absence_for_no_stall() -> None:
    run = Run().steps(100, 1.0)
    live = Live().follow(run)
    live.played = Played(load(dump(live.played.state), Settings(mode="act", receiver=True), default_pack()))
    run.steps(7200, 1.0)
    live.now = run.clock
    live.played.take(Tick(live.now))
    seen = SourceSeen(WHO, 0, live.now, len(run.lines), caught_up=False, authenticated=True, may_act=True)
    live.played.take(seen)
    live.played.take(Tick(live.now + 1))
    live.follow(run.steps(100, 1.0))
    assert live.played.incidents == []


def test_a_hang_that_began_while_the_daemon_was_away_is_seen_at_once() -> None:
    live = Live().follow(Run().steps(100, 1.0).passes(1))
    live.now += 7200
    assert len(live.until(live.now + 4).stalls) == 1


def test_a_stall_in_a_stored_state_goes_on_as_it_was() -> None:
    run = Run().steps(100, 1.0)
    live = Live().follow(run)
    for _ in range(20):
        live.follow(run.passes(1))
        live.played.state = load(dump(live.played.state), Settings(mode="act", receiver=True), default_pack())
    (page,) = live.stalls
    assert page["timeline"][0]["time"] - (run.clock - 20 * MINUTE) == pytest.approx(900, abs=7)
    live.follow(run.steps(1, 1.0))
    assert live.stalls[0]["state"] == "recovered"


def test_a_log_without_times_has_no_stalls() -> None:
    run = Run(timed=False).steps(300, 1.0).passes(120).steps(100, 1.0)
    assert stalls(replay(run)) == []


def test_a_stall_with_a_broken_loss_behind_it_is_judged_by_the_loss() -> None:
    run = Run().steps(300, 1.0)
    live = Live().follow(run.passes(30))
    assert live.stalls[0]["state"] == "confirmed"
    live.follow(run.steps(20, 1.0, loss=float("nan")))
    last = live.played.incidents[-1]
    assert (last["verdict"], last["severity"]) == ("nonfinite", "critical")
    assert last["state"] != "recovered"


def test_the_rank_that_did_not_report_the_newest_step_is_named() -> None:
    played = acting(default_pack())
    for rank in range(4):
        start = Event(kind="start", time=0.0, seq=1, step=0, fields={"world_size": 4})
        played.take(Happened(WHO, rank, start))
    for step in range(1, 101):
        for rank in range(4):
            if step < 100 or rank != 2:
                record = Step(seq=step + 1, step=step, time=float(step), signals={"loss": 2.0 + step % 7})
                played.take(Steps(WHO, rank, (record,)))
    for at in range(101, 1200):
        for rank in range(4):
            last = 100 if rank == 2 else 101
            played.take(SourceSeen(WHO, rank, float(at), last, caught_up=True, authenticated=True, may_act=True))
        played.take(Tick(float(at)))
    (page,) = [one for one in played.incidents if one["verdict"] == "stall"]
    assert page["scope"]["ranks"] == [2]
    assert "Rank 2 did not report step 100" in page["summary"]


def test_a_clock_that_tells_no_time_stops_nothing() -> None:
    run = Run().steps(100, 1.0)
    live = Live().follow(run)
    run.passes(30)
    live.follow(run)
    (line,) = run.steps(1, 1.0).lines[-1:]
    line.time = float("nan")
    live.played.take(Steps(WHO, 0, (line,)))  # type: ignore[arg-type]
    assert live.stalls[0]["state"] == "recovered"
