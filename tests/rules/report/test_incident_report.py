"""The report of one incident, as a page and as Markdown: every part, from what the daemon kept alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import Browser, chromium
from tests.rules.core.runs import only
from tests.rules.core.runs import recovered as verified_rollback
from tests.rules.report.drawn import incident
from trainwarden.rules.core.effects import Save
from trainwarden.rules.report.dossier import dossier
from trainwarden.rules.report.kept import recorded_of
from trainwarden.rules.report.markdown import code, text, to_markdown
from trainwarden.rules.report.page import incident_page

HOSTILE = "<script>alert(1)</script> [x](javascript:alert(1)) | **b** `c` ![i](http://evil/i.png) \u202e"
LONG = "a_name_without_any_place_to_break_it_" * 6


@pytest.fixture(scope="module")
def recovered() -> tuple[dict[str, Any], dict[str, Any]]:
    """A dirty shard, the rollback, the verified attempt: the incident's row and its curves."""
    played = verified_rollback()
    curves = [one.row for one in played.effects if isinstance(one, Save) and one.kind == "curves"][-1]
    return only(played.incidents), curves


def test_the_report_has_every_part_of_a_recovered_incident(recovered: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one = dossier(recovered[0])
    assert "The likely cause is the data" in one.sentence
    assert one.causes[0].name == "the data"
    assert one.causes[0].speaks_for
    assert len(one.triage) == 6
    assert one.samples[0].startswith("Positions [4,800, ")
    assert one.commands == ["trainwarden data show --run demo --step 301 --attempt 0"]
    assert any(name == "target" and value.startswith("step 250 of attempt 0") for name, value, _ in one.plan)
    assert [name for name, _, _ in one.windows] == [
        "from the target to the onset",
        "from the onset to the end of the skip",
        "behind skip and ramp",
    ]
    assert all(says != "not told yet" for _, _, says in one.windows)
    assert one.cost[0] == "170 steps were thrown away, which had taken 85 s."
    assert "until the next attempt began" in one.cost[1]
    assert one.timeline[0][0] == "2023-11-14 22:15:50"


def test_the_page_and_the_markdown_tell_the_same(recovered: tuple[dict[str, Any], dict[str, Any]]) -> None:
    row, curves = recovered
    page, markdown = incident_page(row, recorded_of(curves), markdown="x.md"), to_markdown(row)
    for title in ("Triage, from cheap to dear", "Plan", "Verified", "Cost", "Timeline"):
        assert title in page
        assert f"## {title}" in markdown
    assert 'href="x.md"' in page
    assert "attempt 0" in page
    assert "attempt 1" in page
    one = dossier(row)
    for says in (one.explained, one.cost[0], one.triage[1][1][0].says, row["summary"]):
        assert text(says) in markdown
    for stage, checks in one.triage:
        for check in checks:
            assert f"| {stage} | {check.name} | {check.words} |" in markdown


def test_a_row_that_holds_little_has_a_report_all_the_same() -> None:
    for row in ({}, {"id": "inc_1"}, incident(60, plan=None, verification=None)):
        assert "No curve was kept" in incident_page(row, recorded_of(None))
        assert to_markdown(row).startswith("# ")
    assert "No plan was made." in incident_page(incident(60, plan=None), recorded_of(None))


def hostile() -> dict[str, Any]:
    return incident(
        60,
        run=HOSTILE,
        id=HOSTILE,
        summary=HOSTILE,
        cheapest_test=HOSTILE,
        cause={"name": HOSTILE, "confidence": 0.5, "scores": {HOSTILE: 0.5}, "explained": HOSTILE},
        evidence=[{"kind": HOSTILE, "step": 60, "says": HOSTILE, "speaks": {HOSTILE: 0.5}}],
        triage=[{"stage": HOSTILE, "check": HOSTILE, "outcome": HOSTILE, "says": HOSTILE}],
        gates=[{"gate": HOSTILE, "answer": HOSTILE, "until": None, "why": HOSTILE}],
        prevention=[{"what": HOSTILE, "says": HOSTILE}],
        suspect_shards=[{"name": HOSTILE, "first": 0, "end": 1}],
        timeline=[{"time": 0.0, "step": 60, "state": HOSTILE, "says": HOSTILE}],
        verification={
            "attempt": HOSTILE,
            "checks": {HOSTILE: {"ok": None, "says": HOSTILE}},
            "windows": [{"first": 1, "end": 2, "says": HOSTILE}],
        },
        plan={
            "target": {"attempt": 0, "step": 1, "path": HOSTILE},
            "reasons": {HOSTILE: HOSTILE},
            "exclude_hosts": [HOSTILE],
        },
    )


def test_what_a_run_wrote_is_no_markup_in_either() -> None:
    page, markdown = incident_page(hostile(), recorded_of(None)), to_markdown(hostile())
    assert "<script>alert" not in page
    assert "\u202e" not in page + markdown
    plain = "\n".join(line for line in markdown.splitlines() if not line.startswith("- `"))  # code is what it is
    assert not re.search(r"(?<!\\)[<>\[\]]", plain)
    assert not re.search(r"(?<!\\)\*\*b", plain)
    assert "http://evil" not in plain
    assert 'href="javascript' not in page
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} <= {3, 4, 5}


def test_code_holds_whatever_backticks_it_is_given() -> None:
    assert code("a`b") == "``a`b``"
    assert code("`a") == "`` `a ``"
    assert text("# no heading") == "\\# no heading"
    assert text("- no item") == "\\- no item"
    assert text("a\nb | c") == "a b \\| c"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window_whatever_it_holds(
    browser: Browser, recovered: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, width: int, dark: bool
) -> None:
    row, curves = recovered
    many = [
        {"kind": f"k{n}", "step": n, "says": f"{LONG} {n}", "speaks": {"data": 0.1, "numeric": -0.1} if n % 3 else {}}
        for n in range(40)
    ]
    pages = {
        "recovered": incident_page(row, recorded_of(curves), markdown="x.md"),
        "many": incident_page(
            {**row, "run": LONG, "summary": LONG, "evidence": many, "plan": None}, recorded_of(curves)
        ),
        "hostile": incident_page(hostile(), recorded_of(None)),
        "empty": incident_page({}, recorded_of(None)),
    }
    browser.errors.clear()
    for name, page in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(page, encoding="utf-8")
        browser.open(path, width=width, dark=dark)
        assert browser.ask("document.documentElement.scrollWidth") <= width, name
        assert (browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)") is dark
    assert browser.errors == []
