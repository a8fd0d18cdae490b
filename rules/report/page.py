"""A recorded run as one page of HTML that needs nothing but itself, and a list of pages for several runs.

Everything that came from a run is escaped. A content policy in the page allows its own style and script by their digests
and nothing else, so that even a mistake here could not load or run anything.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from trainwarden.record import encode_numbers
from trainwarden.rules.core.settings import Settings

from . import scale, words
from .curve import Picture
from .dossier import dossier
from .marks import announced
from .panels import Gallery
from .recorded import Recorded
from .telling import Reads

#: Incidents of severity info that get a close-up; a run with more lists the others in the table alone.
MOST_CLOSEUPS_OF_INFO = 40
MOST_CLOSEUPS = 200
#: Controls of a terminal or of the direction of writing: in no template, and from a run they only mislead.
_CONTROLS = dict.fromkeys(
    [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"
)

#: What the page asks of a row, a plan and an item; a result of another version may lack some.
_ROW = (
    *("severity", "verdict", "state", "action", "held_by", "cause", "scope", "alerts", "rules", "evidence", "timeline"),
    *("plan", "run", "id"),
    *("summary", "cheapest_test", "suspect_samples", "suspect_epoch", "attempt", "start_id"),
    *("onset_step", "opened_step", "confirmed_step", "closed_step"),
)
_PLAN = (
    *("target", "skip_samples", "skip_mode", "exclude", "exclude_hosts"),
    *("reset_optimizer", "lr_factor", "rewarmup_steps", "reasons"),
)
_DEFAULTS = Settings()
_ITEM = ("step", "state", "says", "kind", "signal")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a list of pages says of one of them."""

    href: str
    report: dict[str, Any]
    sketch: Picture | None


def _text_of(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(value: Any) -> Markup:
    """Return JSON that can stand inside a script element: nothing in it can end the element."""
    text = json.dumps(encode_numbers(value), separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # the characters that could leave the element are gone


def _complete(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with None for whatever a row lacks."""
    rows = []
    for given in report.get("incidents") or []:
        row = {**dict.fromkeys(_ROW), **given}
        if isinstance(row["plan"], dict):
            row["plan"] = {**dict.fromkeys(_PLAN), **row["plan"]}
        row["cause"] = {"name": None, "confidence": None, "scores": {}, **(row["cause"] or {})}
        row["said"] = _alerts(row)
        for name in ("evidence", "timeline"):
            row[name] = [{**dict.fromkeys(_ITEM), **item} for item in row[name] or []]
        rows.append(row)
    notices = [{**dict.fromkeys(_ITEM), **notice} for notice in report.get("notices") or []]
    head = {"run": "", "source": "", "records": 0, "first_step": None, "last_step": None, "stride": 1}
    return {**head, **report, "incidents": rows, "notices": notices}


def _alerts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each alert of an incident says: ``alert``, ``since``, ``summary``, ``runbook``, ``link``, ``texts``.

    ``link`` is the runbook's address if it is one of the web: no other may be followed from a page, whatever a rule file says.
    """
    known = {one["alert"]: one for one in row["rules"] or [] if isinstance(one, dict) and "alert" in one}
    found = []
    for name in list(dict.fromkeys([*(row["alerts"] or []), *known])):
        one = known.get(name, {})
        texts = {key: str(text) for key, text in (one.get("annotations") or {}).items()}
        summary, runbook = texts.pop("summary", ""), texts.pop("runbook_url", "")
        link = runbook if runbook.lower().startswith(("https://", "http://")) else ""
        since = one.get("since")
        found.append(
            {"alert": name, "since": since, "summary": summary, "runbook": runbook, "link": link, "texts": texts}
        )
    return found


def _environment() -> Environment:
    names = ("base.html", "run.html", "incident.html", "index.html", "macros.html", "parts.html")
    environment = Environment(
        loader=DictLoader({name: _text_of(name) for name in names}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _text_of("style.css").strip(), _text_of("hover.js").strip()
    environment.globals.update(
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:",
        words=words,
        short=scale.short,
        whole=scale.whole,
        embedded=embedded,
    )
    return environment


def run_page(
    report: dict[str, Any],
    recorded: Recorded,
    *,
    index: str | None = None,
    reads: Reads | None = None,
    settings: Settings = _DEFAULTS,
) -> tuple[str, Picture | None]:
    """Return the page of one run, and a small picture for the list of pages.

    ``report`` is the object that ``replay --output json`` prints for the run; ``index`` is where the list of pages lies. ``reads``
    tells the signals that an alert reads; ``settings`` may plan changes.
    """
    report = _complete(report)
    changes = announced(recorded, settings, str(report["run"]))
    gallery = Gallery(report, recorded, reads=reads, changes=changes)
    drawn = {"info": 0, "all": 0}
    closeups = []
    for number, row in enumerate(gallery.incidents, start=1):
        info = row.get("severity") == "info"
        wanted = drawn["all"] < MOST_CLOSEUPS and not (info and drawn["info"] >= MOST_CLOSEUPS_OF_INFO)
        if wanted:
            drawn["all"] += 1
            drawn["info"] += info
        closeups.append((number, row, gallery.closeup(row, number) if wanted else None))
    page = (
        _environment()
        .get_template("run.html")
        .render(
            title=str(report.get("run") or report.get("source") or "run"),
            report=report,
            overview=gallery.overview(),
            closeups=closeups,
            dossiers=[dossier(row) for _, row, _ in closeups],
            signals=gallery.signals(),
            constant=gallery.constant(),
            changes=changes,
            told=list(dict.fromkeys(str(one["says"]) for one in report["notices"] if one["kind"] == "planned_change")),
            starts=gallery.starts,
            index=index,
        )
    )
    return page.translate(_CONTROLS), gallery.sketch()


def incident_page(
    row: dict[str, Any], curves: Recorded, *, markdown: str | None = None, reads: Reads | None = None
) -> str:
    """Return the report of one incident: ``curves`` are the records around it, ``markdown`` is where the same lies as Markdown."""
    report = _complete({"incidents": [row]})
    (whole_row,) = report["incidents"]
    gallery = Gallery(report, curves, reads=reads)
    panels = gallery.closeup(whole_row, 1)
    page = (
        _environment()
        .get_template("incident.html")
        .render(
            title=f"{words.title(whole_row)} in {whole_row.get('run') or 'run'}",
            row=whole_row,
            d=dossier(whole_row),
            panels=panels,
            more=gallery.around(whole_row, 1, panels),
            markdown=markdown,
        )
    )
    return page.translate(_CONTROLS)


def index_page(entries: Sequence[Entry]) -> str:
    """Return the list of pages, those with something critical first."""

    def rank(entry: Entry) -> tuple[int, int]:
        found = words.counts(entry.report)
        return -found["critical"], -found["warning"]

    return (
        _environment()
        .get_template("index.html")
        .render(title=f"{len(entries)} runs", entries=sorted(entries, key=rank))
        .translate(_CONTROLS)
    )
