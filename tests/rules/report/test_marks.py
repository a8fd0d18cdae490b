"""What is marked over a curve, and which signals stand below it in a close-up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.rules.report.drawn import falling, incident, lines, recorded, report
from tests.rules.report.test_pages import HOSTILE, Elements
from trainwarden.record import Event, Step, Value
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.settings import PlannedChange, Settings
from trainwarden.rules.report.page import run_page
from trainwarden.rules.report.recorded import Recorded
from trainwarden.rules.rulefiles import read_packs

PACK = read_packs(["default"])
Lines = Iterator[tuple[Start, int, Step | Event]]


def run(first: int, last: int, attempt: int = 0, **signals: Any) -> Lines:
    """Yield records whose signals are constant or functions of the step; a quiet gradient norm is among them."""
    start = Start("uid", "toy", attempt, f"s{attempt}")
    for seq, step in enumerate(range(first, last + 1), start=1):
        values: dict[str, Value] = {"loss": 2.0 + 0.01 * (step % 7), "grad_norm": {"all": 1.0 + 0.02 * (step % 5)}}
        values |= {name: of(step) if callable(of) else of for name, of in signals.items()}
        yield start, 0, Step(seq=seq, step=step, time=float(step), signals=values)


def with_events(of: Lines, *events: Event) -> Lines:
    """Yield the lines, each event behind the record of its step."""
    for start, rank, line in of:
        yield start, rank, line
        for event in events:
            if isinstance(line, Step) and line.step == event.step:
                yield start, rank, event


def closeups(page: str) -> list[str]:
    """Return the headings of the pictures of the first close-up."""
    section = re.search(r'<section class="incident.*?</section>', page, re.DOTALL)
    assert section
    return re.findall(r"<figcaption><b>(.*?)</b>", section[0])


def page_of(kept: Recorded, *rows: dict[str, Any], planned: tuple[PlannedChange, ...] = (), **changes: Any) -> str:
    settings = Settings(planned_changes=planned)
    return run_page(report(kept, rows, **changes), kept, reads=PACK.reads, settings=settings)[0]


def test_a_wrong_learning_rate_shows_itself_and_the_attempt_before_and_nothing_that_is_quiet() -> None:
    kept = recorded(
        run(1, 200, lr=lambda step: {"all": 3e-4}),
        run(151, 300, attempt=1, lr=lambda step: {"all": 1e-6 * (step - 150)}, ungraded=4.0),
    )
    row = incident(151, attempt=1, start_id="s1", verdict="mismatch", alerts=["TrainingResumeLr"], action="none")
    page = page_of(kept, row)
    assert closeups(page) == ["loss", "lr"]
    section = page[page.index('<section class="incident') :]
    first = re.search(r'data-first="([\d.]+)"', section)
    assert first
    assert float(first[1]) < 120


def test_what_an_alert_reads_comes_before_what_moved_farther() -> None:
    def jumps(to: float) -> Any:
        return lambda step: {"all": to if step >= 100 else 1.0}

    kept = recorded(run(1, 200, lr=jumps(1.4), update_norm=jumps(90.0), activation_rms=jumps(50.0)))
    row = incident(100, verdict="mismatch", alerts=["TrainingLrJump"], action="none")
    assert closeups(page_of(kept, row))[:2] == ["loss", "lr"]
    assert "grad_norm" not in closeups(page_of(kept, row))
    assert closeups(page_of(kept, incident(100, alerts=["Unknown"], action="none")))[1] == "update_norm"


def test_what_an_alert_reads_is_shown_though_quiet_only_where_nothing_moved() -> None:
    row = incident(100, verdict="drift", alerts=["TrainingNormGrowth"], action="none")
    assert closeups(page_of(recorded(run(1, 200)), row)) == ["loss", "grad_norm"]
    row = incident(100, alerts=["TrainingGradCollapse"], action="none")
    assert closeups(page_of(recorded(run(1, 200)), row)) == ["loss"]


def test_a_planned_change_is_marked_with_its_burn_in_and_named_in_head_and_legend() -> None:
    kept = recorded(lines(falling(100) + [6.0] * 100))
    one = PlannedChange(step=101, kind="mixture", settle_steps=50, note="phase 2")
    notice = {"kind": "planned_change", "signal": None, "step": 100, "says": "The loss was 2 before it and is 6."}
    page = page_of(kept, planned=(one,), notices=[notice])
    found = Elements(page)
    assert found.of("rect", **{"class": "planned"})
    assert "Planned change from step 101: mixture (phase 2); burn-in up to step 150" in page
    assert re.search(r'<text class="flag planned"[^>]*><title>[^<]*</title>mixture</text>', page)
    assert "mixture (phase 2) from step 101" in found.text
    assert "planned change with its burn-in" in found.text
    assert found.text.count("The loss was 2 before it and is 6.") == 2  # below the curve, and among the notices
    assert "planned change" not in Elements(page_of(kept)).text
    other = PlannedChange(step=101, kind="mixture", run="another*")
    assert "planned change" not in page_of(kept, planned=(other,))


def test_events_plan_too_and_a_close_up_shows_them() -> None:
    stage = Event(kind="stage", time=0.0, step=100, fields={"name": HOSTILE, "settle_steps": 20})
    unplanned = Event(kind="batch_size", time=0.0, step=50, fields={"planned": False})
    kept = recorded(with_events(run(1, 200), stage, unplanned))
    page = page_of(kept, incident(110, closed_step=130, action="none"))
    _, _, section = page.partition('<section class="incident')
    assert 'class="mark planned"' in section
    assert "planned change with its burn-in" in section
    assert page.count(">stage</text>") == 2
    assert ">batch size</text>" not in page
    assert not Elements(page).of("img")


def test_checkpoints_and_evaluations_are_ticks_and_attempts_are_lines() -> None:
    saved = [Event(kind="checkpoint", time=0.0, step=step) for step in range(20, 200, 20)]
    told = Event(kind="evaluation", time=0.0, step=100)
    kept = recorded(with_events(run(1, 200), *saved, told), run(151, 300, attempt=1))
    page = page_of(kept)
    ticked = re.search(r'<path class="ticked checkpoint" d="([^"]*)"', page)
    assert ticked
    assert ticked[1].count("M") == 9
    text = Elements(page).text
    assert "checkpoint (9)" in text
    assert "evaluation" in text
    assert "attempt begins" in text
    assert 'class="mark checkpoint' not in page


def test_an_event_without_a_step_lies_behind_the_newest_record() -> None:
    def told() -> Lines:
        for start, rank, line in run(1, 200):
            yield start, rank, line
            if isinstance(line, Step) and line.step == 120:
                yield start, rank, Event(kind="mixture", time=0.0, fields={"settle_steps": 10})

    assert "Planned change from step 121: mixture; burn-in up to step 130" in page_of(recorded(told()))
