"""What a person reads at a terminal, wide or narrow."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from tests.rules.report.drawn import falling, incident, lines, recorded, report
from trainwarden.rules.report.terminal import incident_to_text, to_text


def printed(reports: list[dict[str, Any]], width: int = 100) -> str:
    file = io.StringIO()
    to_text(reports, Console(file=file, width=width, highlight=False))
    return file.getvalue()


def test_the_verdict_and_what_to_do_come_before_the_evidence() -> None:
    kept = recorded(lines(falling(200)))
    row = incident(60, state="confirmed")
    text = printed([report(kept, [row])])
    words = ("From step 60 the loss rose", "Decided: roll back", "→ A daemon under policy act", "The batch is odd.")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert "inc_1" in text


def test_nothing_is_wider_than_a_narrow_terminal() -> None:
    kept = recorded(lines(falling(200)))
    row = incident(60, summary="A long sentence about many things. " * 10)
    text = printed([report(kept, [row])], width=40)
    assert max(len(line) for line in text.splitlines()) <= 40


def test_infos_are_one_line_a_kind() -> None:
    kept = recorded(lines(falling(200)))
    rows = [incident(onset, severity="info", verdict="outlier", action="none") for onset in range(10, 110, 2)]
    text = printed([report(kept, rows)])
    assert text.count("outlier") == 1
    assert "and 38 more" in text


def noted(onset: int, alert: str, *summaries: str) -> dict[str, Any]:
    """Return an incident of severity info that rules of these summaries opened."""
    rules = [{"alert": alert, "annotations": {"summary": says}} for says in summaries]
    return incident(onset, severity="info", verdict="outlier", action="none", plan=None, rules=rules)


def test_an_info_has_what_its_first_rule_says_in_one_line_a_rule() -> None:
    kept = recorded(lines(falling(200)))
    guarded = noted(60, "TrainingGuardSkipped", "The guard left out the update of step 60.", "Another reason.")
    rows = [guarded, *(noted(step, "TrainingLossOutlier", f"One loss stands out at {step}.") for step in (80, 90))]
    found = printed([report(kept, rows)]).splitlines()
    place = found.index("  info  outlier at step 60, 80, 90")
    assert found[place + 1 : place + 3] == [
        "      TrainingGuardSkipped: The guard left out the update of step 60.",
        "      TrainingLossOutlier, first at step 80: One loss stands out at 80.",
    ]
    assert "Another reason." not in "\n".join(found)


def test_what_an_info_says_is_cut_where_the_terminal_ends_and_not_in_a_file() -> None:
    kept = recorded(lines(falling(200)))
    reports = [report(kept, [noted(60, "TrainingGuardSkipped", "The guard\nleft out, " + "and again, " * 20 + "all.")])]
    (line,) = [one for one in printed(reports, width=60).splitlines() if "TrainingGuardSkipped" in one]
    assert len(line) == 60
    assert line.endswith("…")
    assert "and again" not in printed(reports, width=60).split(line)[1]
    file = io.StringIO()
    to_text(reports, Console(file=file, width=60, soft_wrap=True, highlight=False))
    (line,) = [one for one in file.getvalue().splitlines() if "TrainingGuardSkipped" in one]
    assert line.endswith("and again, all.")


def test_several_runs_begin_with_a_table_and_calm_ones_are_only_there() -> None:
    kept = recorded(lines(falling(200)))
    text = printed([report(kept, run="calm"), report(kept, [incident(60)], run="broken")])
    assert text.count("calm") == 1
    assert text.count("broken") == 2


def test_a_hostile_name_cannot_steer_the_terminal() -> None:
    kept = recorded(lines(falling(200)))
    name = "\x1b[2J\x07[bold]x[/bold]\nsecond line"
    text = printed([report(kept, [incident(60, summary=name)], run=name)])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text


def test_one_incident_is_printed_with_its_timeline() -> None:
    file = io.StringIO()
    incident_to_text(incident(60, action="none", plan=None), Console(file=file, width=100))
    assert "step 60: watching: An alert fires." in file.getvalue()


def test_an_info_that_was_the_beginning_of_something_graver_has_its_line_too() -> None:
    kept = recorded(lines(falling(200)))
    first = incident(58, severity="info", verdict="outlier", action="none", closed_step=61, start_id="s")
    text = printed([report(kept, [first, incident(60, opened_step=61, start_id="s")])])
    assert "info  outlier at step 58 (the beginning of the level shift)" in text


def test_what_is_over_is_not_to_be_looked_at_now() -> None:
    kept = recorded(lines(falling(200)))
    text = printed([report(kept, [incident(60, verdict="stall", action="escalate", state="recovered")])])
    assert "now" not in text
    assert "→ It is over: find out what it was before it comes again." in text


def test_where_no_loss_was_found_nothing_is_said_to_be_usual() -> None:
    kept = recorded(lines(falling(200)))
    bare = report(kept, run="bare", signals=["ce"], judged=[], columns=["step", "ce"])
    text = printed([bare], width=120)
    assert "Not judged: no loss was found (columns: step, ce); name it with --map loss=COLUMN." in text
    assert "Nothing unusual" not in text
    text = printed([bare, report(kept, run="calm", judged=["loss"])], width=120)
    assert "Not judged: no loss" in text
    assert text.count("calm") == 1
    text = printed([report(kept, signals=["ce", "lr"], judged=["lr"])], width=120)
    assert "Only lr could be judged, and nothing unusual was found there: no loss was found (signals: ce, lr)." in text
