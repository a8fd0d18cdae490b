"""An attempt that is a probe: what it resumes from, what it reports, and what it asks of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.test_resume import Run, chosen
from trainwarden.exporter import Exporter
from trainwarden.plan import Probe
from trainwarden.record import Event, decode_lines

ASKED = Probe(kind="without_evaluation", first_step=101, steps=20, samples=[(800, 808)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path)
    found.saved(0, 90)
    found.saved(0, 110)
    return found


def asked(run: Run, probe: Probe = ASKED, **fields: Any) -> None:
    run.rolled_back(run.target(0, 90), 1, action="probe", probe=probe, **fields)


def test_a_probe_begins_from_its_target_and_leaves_its_parents_line_behind(run: Run) -> None:
    asked(run)
    resume = run.resume(1)
    assert chosen(resume) == (0, 90)
    applied = resume.apply([], 91)
    assert applied is not None
    assert (applied.probe, applied.not_applied) == (ASKED, {})
    run.saved(1, 105)
    assert chosen(run.resume(2)) == (1, 105)  # a crash: the attempt after it goes on with the probe's line


def test_without_the_ledgers_word_a_probe_abandons_the_line_all_the_same(run: Run) -> None:
    run.rolled_back(run.target(0, 90), 1, note=False, action="probe", probe=ASKED)
    assert chosen(run.resume(1)) == (0, 90)


def test_an_attempt_that_begins_behind_the_step_in_question_does_not_answer(run: Run) -> None:
    asked(run)
    applied = run.resume(1).apply([], 111)
    assert applied is not None
    assert applied.probe is None
    assert applied.not_applied["probe"] == "it asks about step 101, and this attempt begins at step 111"


def trainer(run: Run, attempt: str, monkeypatch: pytest.MonkeyPatch) -> Exporter:
    monkeypatch.setenv("TRAINWARDEN_ATTEMPT", attempt)
    model = torch.nn.Linear(4, 1)
    return Exporter(model, torch.optim.SGD(model.parameters(), lr=0.1), run="r", dir=run.base, port=0)


def test_a_trainer_that_asks_is_told_to_leave_evaluation_out_for_the_whole_line_of_the_probe(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(run)
    for attempt, without in (("1", True), ("2", True)):
        exporter = trainer(run, attempt, monkeypatch)
        try:
            target = exporter.resume()
            assert target is not None
            exporter.resumed(target.step)
            assert exporter.without_evaluation is without
            assert exporter.plan is not None
            assert exporter.plan.probe == ASKED
        finally:
            exporter.close()
        run.saved(int(attempt), 105 + int(attempt))
    starts = [
        line
        for path in run.folder.journal_files()
        if "attempt-1" in str(path)
        for line in decode_lines(path.open("rb"))
        if isinstance(line, Event) and line.kind == "start"
    ]
    assert starts[0].fields["plan_applied"]["probe"]["kind"] == "without_evaluation"
    run.rolled_back(run.target(0, 90), 3)
    exporter = trainer(run, "3", monkeypatch)
    try:
        assert exporter.without_evaluation is False  # the plan behind it asks for no such thing
        assert exporter.plan is not None
    finally:
        exporter.close()


@pytest.mark.parametrize("kind", ["replay", "other_host"])
def test_the_other_probes_leave_evaluation_alone(run: Run, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(run, Probe(kind=kind, first_step=101, steps=20))
    exporter = trainer(run, "1", monkeypatch)
    try:
        assert exporter.without_evaluation is False
    finally:
        exporter.close()


def test_without_a_plan_and_where_the_exporter_is_off_a_trainer_evaluates(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = trainer(run, "0", monkeypatch)
    try:
        assert (exporter.plan, exporter.without_evaluation) == (None, False)
    finally:
        exporter.close()
    asked(run)
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    off = trainer(run, "1", monkeypatch)
    assert off.without_evaluation  # the line is the probe's, whoever watches it
