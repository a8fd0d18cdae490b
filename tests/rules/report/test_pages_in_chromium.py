"""Pages in a real browser: nothing is refused or fails, nothing is wider than the window, numbers show under the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chromium import Browser, chromium
from tests.rules.report.drawn import falling, incident, lines, recorded, report
from trainwarden.rules.report.files import Pages


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pages")
    pages = Pages(target, 2)
    losses = falling(300)
    losses[150] = 9.0
    losses[200] = math.nan
    long = "a_name_without_any_place_to_break_it_" * 5
    more = {"grad_norm": {"all": 1.0, long: 2.0}, long: 3.0}
    for run in ("toy", long):
        kept = recorded(lines(losses, run=run, more=more), lines(falling(400)[250:], first=251, attempt=1))
        rows = [incident(151, summary=long), incident(201, severity="info", verdict="nonfinite", evidence=[])]
        notices = [{"kind": "gap", "signal": long, "step": 3, "says": long}]
        pages.add(report(kept, rows, run=run, source="/" + long, notices=notices), kept)
    pages.finish()
    return target


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_its_window_without_an_error(browser: Browser, folder: Path, width: int, dark: bool) -> None:
    browser.errors.clear()
    browser.requests.clear()
    for page in sorted(folder.glob("*.html")):
        browser.open(page, width=width, dark=dark)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask("[...document.querySelectorAll('svg.plot')].every(plot => plot.clientWidth > 150)")
        # Bright on dark in the one, dark on bright in the other: the style sheet was taken.
        colour = browser.ask("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(20, 23, 26)") is dark
    assert browser.errors == []
    assert all(url.startswith("file:") for url in browser.requests)


def test_numbers_show_under_the_pointer(browser: Browser, folder: Path) -> None:
    browser.open(folder / "toy.html", width=1280)
    said = browser.ask(
        """(() => {
          const plot = document.querySelector("svg.plot"), area = plot.getBoundingClientRect();
          const {first, last} = plot.parentElement.dataset;
          const x = area.left + area.width * (151 - first) / (last - first);
          plot.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: area.top + 50, bubbles: true}));
          return document.querySelector(".tip").textContent;
        })()"""
    )
    assert "step 151" in said
    assert "loss 9" in said


def test_a_printed_page_has_a_white_ground(browser: Browser, folder: Path) -> None:
    browser.open(folder / "toy.html", width=1280, dark=True, media="print")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
