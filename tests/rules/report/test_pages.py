"""Pages hold what a person needs, lose no spike, and let nothing of a run out of its place."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.rules.report.drawn import falling, incident, lines, recorded, report
from trainwarden.record import Step
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.report.files import Pages, PagesError
from trainwarden.rules.report.page import embedded, run_page
from trainwarden.rules.report.recorded import Recorded

HOSTILE = '</script><img src=x onerror="alert(1)"> \'"&{{ 7*7 }} ]]>'


class Elements(HTMLParser):
    """All elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.found
            if name == tag and all(value in (attributes.get(key) or "").split() for key, value in wanted.items())
        ]


def page_of(losses: list[float], *incidents: dict[str, Any], **more: Any) -> str:
    kept = recorded(lines(losses, **more))
    page, _ = run_page(report(kept, incidents), kept)
    return page


def heights(page: str, look: str = "line main") -> list[float]:
    """Return the y coordinates of the first line of this look."""
    found = re.search(rf'<path class="{look}" d="([^"]*)"', page)
    assert found
    return [float(y) for y in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", found[1])]


def test_a_page_has_the_curve_each_incident_its_plan_and_every_signal() -> None:
    losses = falling(60) + [6.0] * 60
    page = page_of(losses, incident(61), more={"grad_norm": {"all": 1.0, "mlp": 0.5}, "mine": 4.0})
    found = Elements(page)
    assert "From step 61 the loss rose and stayed at a higher level." in found.text
    assert "roll back to the checkpoint of step 50, skip 100 samples, learning rate × 0.5" in found.text
    for text in ("The batch is odd.", "TrainingLossSpike", "It is the newest complete one.", "An alert fires."):
        assert text in found.text
    assert found.of("path", **{"class": "main"})
    assert found.of("path", **{"class": "usual"})
    assert found.of("section", id="incident-1")
    assert found.of("a", href="#incident-1")
    assert "mine 4" in found.text  # a signal that never changed is said and not drawn


def test_each_alert_says_its_summary_and_its_runbook_is_a_link_of_the_web_or_none() -> None:
    texts = {
        "summary": "The loss is 2.1 times its average.",
        "runbook_url": "https://wiki/spike?a=1&b=2",
        "owner": "ops",
    }
    rules = [
        {"alert": "TrainingLossSpike", "since": 61, "step": 63, "value": 2.1, "annotations": texts},
        {"alert": "Mine", "since": 62, "step": 64, "value": None, "annotations": {"runbook_url": "docs/rules/Mine.md"}},
        {
            "alert": "Evil",
            "since": 62,
            "step": 64,
            "value": None,
            "annotations": {"runbook_url": "JavaScript:alert(1)"},
        },
        {
            "alert": HOSTILE,
            "since": 62,
            "step": 64,
            "value": None,
            "annotations": {"summary": HOSTILE, HOSTILE: HOSTILE},
        },
    ]
    page = page_of(falling(60) + [6.0] * 60, incident(61, rules=rules, alerts=[one["alert"] for one in rules]))
    found = Elements(page)
    table, _, section = page.partition('id="incident-1"')
    for text in (table, section):
        assert "The loss is 2.1 times its average." in text
        assert '<a href="https://wiki/spike?a=1&amp;b=2"' in text
    assert "since step 61" in found.text
    assert "owner: ops" in found.text
    assert "runbook docs/rules/Mine.md" in found.text
    links = {attributes["href"] for attributes in found.of("a")}
    assert {link for link in links if link and not link.startswith("#")} == {"https://wiki/spike?a=1&b=2"}
    assert not found.of("img")
    assert len(found.of("script")) == page_of(falling(60) + [6.0] * 60, incident(61)).count("<script")


def test_a_page_needs_nothing_but_itself() -> None:
    page = page_of(falling(200), incident(100))
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", page)
    assert "url(" not in page
    assert "@import" not in page
    policy = next(attributes["content"] for attributes in Elements(page).of("meta") if "http-equiv" in attributes)
    assert policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


@pytest.mark.parametrize("n", [5_000, 200_000])
def test_a_spike_of_one_step_is_drawn_whatever_the_length_of_the_run(n: int) -> None:
    losses = [2.0] * n
    losses[n // 2 + 1] = 9.0
    page = page_of(losses)
    drawn = heights(page)
    assert len(drawn) < 5_000
    assert min(drawn) < 0.1 * max(drawn)
    held = re.search(r'<script type="application/json" class="points">(.*?)</script>', page)
    assert held
    points = json.loads(held[1])
    assert "9" in points[0]["values"]


def test_non_finite_values_are_marked_and_break_the_line() -> None:
    losses = falling(100)
    losses[50] = math.nan
    losses[60] = math.inf
    page = page_of(losses)
    found = Elements(page)
    marks = found.of("path", **{"class": "nonfinite"})
    assert (marks[0]["d"] or "").count("M") == 2
    assert "loss is not finite from step 51 to 61 (NaN 1×, +Inf 1×)" in found.text
    main = found.of("path", **{"class": "main"})
    assert (main[0]["d"] or "").count("M") == 3


def test_a_run_of_nothing_but_nan_has_a_page() -> None:
    assert "is not finite" in page_of([math.nan] * 30, incident(1, verdict="nonfinite"))


def test_a_run_without_records_or_without_a_loss_has_a_page() -> None:
    nothing = recorded()
    page, sketch = run_page(report(nothing, first_step=None, last_step=None, records=0), nothing)
    assert "No loss was recorded." in page
    assert sketch is None


def test_what_a_run_wrote_is_text_and_never_markup() -> None:
    rows = [
        incident(
            60,
            id=HOSTILE,
            verdict=HOSTILE,
            state=HOSTILE,
            severity=HOSTILE,
            action=HOSTILE,
            held_by=HOSTILE,
            summary=HOSTILE,
            cheapest_test=HOSTILE,
            alerts=[HOSTILE],
            cause={"name": HOSTILE, "confidence": 0.5, "scores": {HOSTILE: 0.5}},
            evidence=[{"kind": HOSTILE, "step": 60, "says": HOSTILE}],
            timeline=[{"time": 0, "step": 60, "state": HOSTILE, "says": HOSTILE}],
        )
    ]
    rows[0]["plan"]["reasons"] = {HOSTILE: HOSTILE}
    rows[0]["plan"]["target"]["path"] = HOSTILE
    kept = recorded(lines(falling(120), run=HOSTILE, more={HOSTILE: {HOSTILE: 1.0, "b": 2.0}}))
    for place, start in enumerate(kept.starts):
        start.tracks[(HOSTILE, HOSTILE)].values[5] = 3.0 + place
    notices = [{"kind": HOSTILE, "signal": HOSTILE, "step": 3, "says": HOSTILE}]
    one = report(kept, rows, run=HOSTILE, source=HOSTILE, notices=notices)
    page, _ = run_page(one, kept, index="index.html")
    plain = page_of(falling(120), incident(60))
    found = Elements(page)
    assert not found.of("img")
    assert not any(name.startswith("on") for _, attributes in found.found for name in attributes)
    assert len([1 for attributes in found.of("script") if "type" not in attributes]) == len(
        [1 for attributes in Elements(plain).of("script") if "type" not in attributes]
    )
    assert "49" not in found.text.replace("7*7", "").split()
    assert found.text.count(HOSTILE) > 10


def test_controls_of_terminals_and_of_the_direction_of_writing_are_shown_as_what_cannot_be_shown() -> None:
    hostile = "a\x00b\x1b[31mc\x85d\u202ee\u2066f"
    kept = recorded(lines(falling(120), run=hostile))
    page, _ = run_page(report(kept, [incident(60, summary=hostile)], run=hostile), kept)
    assert "a\ufffdb\ufffd[31mc\ufffdd\ufffde\ufffdf" in Elements(page).text
    assert [
        one for one in page if (one != "\n" and ord(one) < 32) or (one in hostile[1:] and not one.isprintable())
    ] == []


def test_data_inside_a_script_element_cannot_end_it() -> None:
    text = embedded([{"name": "</script><!--", "value": math.nan}])
    assert "<" not in text
    assert json.loads(text) == [{"name": "</script><!--", "value": "NaN"}]


def test_an_attempt_that_was_left_behind_is_drawn_apart_from_what_led_to_the_end() -> None:
    kept = recorded(lines(falling(80) + [7.0] * 20), lines(falling(120)[60:], first=61, attempt=1))
    page, _ = run_page(report(kept, [incident(81)]), kept)
    found = Elements(page)
    assert "attempt 0, left behind" in found.text
    assert found.of("path", **{"class": "past"})
    assert "Attempt 1 goes on from step 61" in found.text


def test_several_runs_become_a_folder_with_an_index_the_critical_ones_first(tmp_path: Path) -> None:
    pages = Pages(tmp_path / "out", 3)
    for name, rows in (("a/../b", []), ("a/../b", [incident(60)]), ("index", [])):
        kept = recorded(lines(falling(120), run=name))
        pages.add(report(kept, rows, run=name), kept)
    page, path = pages.finish()
    assert page is None
    assert path == tmp_path / "out/index.html"
    assert sorted(item.name for item in (tmp_path / "out").iterdir()) == [
        "a-..-b-2.html",
        "a-..-b.html",
        "index-2.html",
        "index.html",
    ]
    links = [attributes["href"] for attributes in Elements(path.read_text()).of("a")]
    assert links == ["a-..-b-2.html", "a-..-b.html", "index-2.html"]


def test_several_runs_without_a_folder_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PagesError, match="give a folder for them with -o"):
        Pages(None, 2)
    file = tmp_path / "x"
    file.write_text("kept")
    with pytest.raises(PagesError, match="not a file"):
        Pages(file, 2)
    assert file.read_text() == "kept"


def test_steps_under_a_picture_are_whole_even_where_there_are_three() -> None:
    kept = recorded(lines([3.0, 3.1, 9.0], first=11446))
    page, _ = run_page(report(kept), kept)
    assert re.findall(r'<text class="tick[^>]*>([\d,.]+)</text>', page)[:3] == ["11,446", "11,447", "11,448"]


def test_values_of_each_rank_are_lines_of_one_picture() -> None:
    kept = Recorded()
    start = Start("uid", "toy", 0, "s0")
    for step in range(1, 50):
        for rank in range(3):
            signals = {"loss": 2.0, "rank_loss": 2.0 + rank + step / 100}
            for _ in kept.watch([(start, rank, Step(seq=step, step=step, time=float(step), signals=signals))]):
                pass
    page, _ = run_page(report(kept), kept)
    assert [f"rank {rank}" in page for rank in range(4)] == [True, True, True, False]
    page, _ = run_page(report(kept, [incident(30, scope={"ranks": [2]})]), kept)
    assert "Loss by rank around step 30, incident 1" in page


def test_a_gap_in_the_records_interrupts_the_line() -> None:
    kept = recorded(lines(falling(100)), lines(falling(100), first=5_000))
    page, _ = run_page(report(kept), kept)
    main = Elements(page).of("path", **{"class": "main"})
    assert (main[0]["d"] or "").count("M") == 2


def test_a_row_that_holds_little_has_its_place_all_the_same() -> None:
    kept = recorded(lines(falling(100)))
    page, _ = run_page({"run": "toy", "incidents": [{"onset_step": 50, "plan": {}}, {}]}, kept)
    assert 'id="incident-2"' in page
